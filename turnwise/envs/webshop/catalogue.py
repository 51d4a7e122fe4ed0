"""Where products come from: drawn from the lexicon, or read from a user's file."""

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.envs.arguments import is_list_of_str
from turnwise.envs.webshop.labels import RESERVED
from turnwise.envs.webshop.lexicon import Kind, Lexicon, lexicon
from turnwise.envs.webshop.product import Product
from turnwise.errors import EnvironmentFault, TurnwiseError
from turnwise.runtime.jsonl import read_jsonl
from turnwise.types import MAX_ABS, derive_seed

NUM_SHOWN_ATTRIBUTES = 2
"""Attributes in the title of a generated product."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_NUM_IDS_OF_A_BLOCK = len(_LETTERS) * 100
_ROW = "id, title, price, categories, attributes; and options, description, features, kind, if there are any"


def generated_products(num_products: int, seed: int) -> tuple[Product, ...]:
    """Products drawn from the lexicon. Equal arguments give equal products, in every process."""
    words = lexicon()
    rng = random.Random(derive_seed("webshop", seed, num_products))
    ids = _generated_ids(num_products, rng)
    texts: dict[str, str] = {}
    return tuple(_generated_product(id, words, rng, texts) for id in ids)


def _generated_ids(num_products: int, rng: random.Random) -> Iterator[str]:
    """Different ids, in random order: blocks of a letter and two digits, as many as it takes."""
    num_blocks = 1
    while _NUM_IDS_OF_A_BLOCK**num_blocks < num_products:
        num_blocks += 1
    for number in rng.sample(range(_NUM_IDS_OF_A_BLOCK**num_blocks), num_products):
        id = ""
        for _ in range(num_blocks):
            number, place = divmod(number, _NUM_IDS_OF_A_BLOCK)
            letter, digits = divmod(place, 100)
            id += f"{_LETTERS[letter]}{digits:02d}"
        yield id


def _generated_product(id: str, words: Lexicon, rng: random.Random, texts: dict[str, str]) -> Product:
    """`texts` holds one copy of each text, as 100,000 products share most of them."""
    kind = rng.choice(words.kinds)
    brand = rng.choice(words.brands)
    attributes = tuple(rng.sample(kind.attributes, rng.choice((3, 4))))
    title = f"{brand} {' '.join(attributes[:NUM_SHOWN_ATTRIBUTES])} {kind.name}"
    description = f"A {kind.name} by {brand}, made for {rng.choice(kind.uses)}."
    return Product(
        id=id,
        title=texts.setdefault(title, title),
        kind=kind.name,
        categories=kind.categories,
        price=float(rng.randint(*kind.prices)),
        attributes=attributes,
        options=_generated_options(kind, words, rng),
        description=texts.setdefault(description, description),
        features=tuple(texts.setdefault(name, f"It is {name}.") for name in attributes),
    )


def _generated_options(kind: Kind, words: Lexicon, rng: random.Random) -> dict[str, dict[str, float]]:
    options = {}
    for name in kind.options:
        option = words.options[name]
        drawn = set(rng.sample(option.values, rng.randint(*option.num_values)))
        values = [value for value in option.values if value in drawn]
        options[name] = dict(zip(values, option.added_prices, strict=False))
    return options


def read_products(path: Path) -> tuple[Product, ...]:
    """The products of a JSONL file, one object per line. Raises EnvironmentFault, with file and line, unless
    each has the fields of a product."""
    products: dict[str, Product] = {}
    try:
        for place, row in read_jsonl(path):
            product = _read_product(row, place)
            if product.id in products:
                raise EnvironmentFault(f"{place}: the id {product.id!r} is there already; ids are unique")
            products[product.id] = product
    except TurnwiseError as fault:
        raise EnvironmentFault(f"catalogue {fault}") from fault
    return tuple(products.values())


def _read_product(row: Mapping[str, Any], place: str) -> Product:
    unknown = row.keys() - Product.__dataclass_fields__.keys()
    if unknown:
        raise EnvironmentFault(f"{place}: unknown {', '.join(sorted(unknown))}; a product has {_ROW}")
    categories = _strings(row, "categories", place, is_needed=True)
    price: Any = row.get("price")
    if type(price) not in (int, float) or not 0 < price <= MAX_ABS:
        raise EnvironmentFault(f"{place}: price is {price!r}; it must be a number of dollars above 0")
    return Product(
        id=_label(_string(row, "id", place), place),
        title=_string(row, "title", place),
        kind=_string(row, "kind", place, categories[-1]),
        categories=categories,
        price=float(price),
        attributes=_strings(row, "attributes", place, is_needed=True),
        options=_options(row.get("options", {}), place),
        description=_description(row, place),
        features=_strings(row, "features", place),
    )


def _string(row: Mapping[str, Any], name: str, place: str, default: str = "") -> str:
    value = row.get(name, default)
    if not isinstance(value, str) or not value.strip():
        raise EnvironmentFault(f"{place}: {name} is {value!r}; it must be a text. A product has {_ROW}")
    return _on_one_line(value)


def _description(row: Mapping[str, Any], place: str) -> str:
    if not row.get("description"):
        return ""
    return _string(row, "description", place)


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def _label(text: str, place: str) -> str:
    """A text as the label of a link, in lower case."""
    label = _on_one_line(text).lower()
    if label in RESERVED:
        raise EnvironmentFault(
            f"{place}: {text!r} is the label of a link that the shop has anyway; rename this id or value"
        )
    return label


def _strings(row: Mapping[str, Any], name: str, place: str, is_needed: bool = False) -> tuple[str, ...]:
    values: Sequence[str] = row.get(name, ())
    if not is_list_of_str(values) or not all(map(str.strip, values)) or (is_needed and not values):
        raise EnvironmentFault(
            f"{place}: {name} is {values!r}; it must be a list of texts. A product has {_ROW}"
        )
    return tuple(map(_on_one_line, values))


def _options(options: Any, place: str) -> dict[str, dict[str, float]]:
    """Options as `{name: [values]}` or `{name: {value: added price}}`, with values in lower case."""
    form = "options are {name: [values]} or {name: {value: dollars that it adds}}"
    if not isinstance(options, Mapping):
        raise EnvironmentFault(f"{place}: options is {options!r}; {form}")
    read: dict[str, dict[str, float]] = {}
    labels: set[str] = set()
    for name, values in options.items():
        num_values = len(values) if isinstance(values, list | Mapping) else 0
        if is_list_of_str(values):
            values = dict.fromkeys(values, 0.0)
        if not isinstance(values, Mapping) or not values:
            raise EnvironmentFault(f"{place}: option {name!r} is {values!r}; {form}")
        for value, added in values.items():
            if type(added) not in (int, float) or not 0 <= added <= MAX_ABS:
                raise EnvironmentFault(f"{place}: option {name!r}: {value!r} adds {added!r}; {form}")
        read[name] = {_label(value, place): float(added) for value, added in values.items()}
        labels_of_option = read[name].keys()
        # Two values that are equal, or differ in case alone, have become one label.
        are_equal = len(labels_of_option) < num_values
        if are_equal or labels & labels_of_option or "" in labels_of_option:
            raise EnvironmentFault(
                f"{place}: option {name!r} has {', '.join(map(repr, values))}; values are the labels of "
                "links in lower case, so none is empty, and no two of a product are equal"
            )
        labels |= labels_of_option
    return read
