"""The words of generated catalogues, from `lexicon.yaml`, which is ours."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from turnwise.spec.package_tables import read_table


@dataclass(frozen=True, slots=True)
class OptionWords:
    """The values of one option."""

    values: tuple[str, ...]
    num_values: tuple[int, int]
    """Fewest and most values of a product."""
    added_prices: tuple[float, ...]
    """Dollars that a value adds to the price, by its place in the product's list."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of product."""

    name: str
    categories: tuple[str, ...]
    prices: tuple[int, int]
    """Lowest and highest price in dollars."""
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    uses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lexicon:
    """All words."""

    brands: tuple[str, ...]
    colors: tuple[str, ...]
    options: Mapping[str, OptionWords]
    kinds: tuple[Kind, ...]


@cache
def lexicon() -> Lexicon:
    table = read_table(__file__, "lexicon.yaml")
    options = {
        name: OptionWords(tuple(words["values"]), tuple(words["num"]), tuple(map(float, words["added"])))
        for name, words in table["options"].items()
    }
    kinds = tuple(
        Kind(
            name=name,
            categories=(*group["categories"], name),
            prices=tuple(prices),
            attributes=tuple(group["attributes"]),
            options=tuple(group["options"]),
            uses=tuple(group["uses"]),
        )
        for group in table["groups"]
        for name, prices in group["kinds"].items()
    )
    return Lexicon(tuple(table["brands"]), tuple(table["colors"]), options, kinds)
