"""A shop: products, and the search over them. Made once per process for each catalogue."""

import hashlib
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from turnwise.data.word_index import WordIndex, words_of
from turnwise.envs.webshop.catalogue import generated_products, read_products
from turnwise.envs.webshop.lexicon import lexicon
from turnwise.envs.webshop.product import Product
from turnwise.errors import EnvironmentFault
from turnwise.model_files.hub import local_path

MAX_RESULTS = 50
"""Maximum results of a search, as published."""
MIN_PRODUCTS = MAX_RESULTS + 1
_making = threading.Lock()  # a cache alone would let threads make the same shop side by side
MAX_PRODUCTS = 1_000_000


class Shop:
    """The products of a catalogue and their index. Environments share it and don't change it.

    `key` identifies the catalogue; goals are drawn from it. `nouns` are the words of titles that say what
    a product is, and `colors` those that count as equal to longer names of themselves, for the reward."""

    def __init__(self, products: Sequence[Product], key: str) -> None:
        self.products = products
        self.key = key
        names = {name for product in products for name in (product.kind, *product.categories)}
        self.nouns = frozenset(word for name in names for word in words_of(name))
        self.colors = lexicon().colors
        self._numbers = {product.id: number for number, product in enumerate(products)}
        texts = (" ".join(product.texts) for product in products)
        self._index = WordIndex(texts, "the environment webshop", "webshop")

    def product(self, id: str) -> Product:
        """The product with this id. Raises KeyError if there is none."""
        return self.products[self._numbers[id]]

    def search(self, query: str) -> tuple[str, ...]:
        """The ids of the products that fit a query best, best first, at most `MAX_RESULTS`. Products that fit
        equally come in the order of the catalogue."""
        return tuple(self.products[number].id for number in self._index.best(query, MAX_RESULTS))


def open_shop(num_products: int, catalogue_seed: int, catalogue: str | None) -> Shop:
    """The shop of a generated catalogue or, if `catalogue` names one, of a JSONL file; made at the first call
    in a process, for which all its threads wait. Raises EnvironmentFault for fewer than `MIN_PRODUCTS` or
    more than `MAX_PRODUCTS` products, or a faulty file."""
    if catalogue is None:
        _check_size(f"num_products is {num_products}", num_products)
        with _making:
            return _generated_shop(num_products, catalogue_seed)
    path = local_path(catalogue)
    version: tuple[int, ...] = ()
    if path.is_file():
        status = path.stat()
        version = (status.st_mtime_ns, status.st_size)
    with _making:
        return _shop_of_file(path, version)


@lru_cache(maxsize=4)
def _generated_shop(num_products: int, catalogue_seed: int) -> Shop:
    products = generated_products(num_products, catalogue_seed)
    return Shop(products, f"generated {num_products} {catalogue_seed}")


@lru_cache(maxsize=4)
def _shop_of_file(path: Path, version: tuple[int, ...]) -> Shop:
    """`version`, the file's time and size, is for the cache only."""
    products = read_products(path)
    _check_size(f"catalogue {path} has {len(products)} products", len(products))
    return Shop(products, hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest())


def _check_size(fault: str, num_products: int) -> None:
    if not MIN_PRODUCTS <= num_products <= MAX_PRODUCTS:
        raise EnvironmentFault(
            f"webshop: {fault}; a shop has {MIN_PRODUCTS} to {MAX_PRODUCTS:,}, since a search shows the best "
            f"{MAX_RESULTS}"
        )
