"""WebShop's reward (Yao et al. 2022, arXiv:2207.01206, section 3.1): how far a purchase meets a goal."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from turnwise.data.word_index import words_of
from turnwise.envs.webshop.product import Product
from turnwise.errors import NotAvailableError, install_hint

MIN_RATIO = 85
"""Two words count as the same if their token set ratio, rounded, is above this."""
NO_NOUN_SCORE = 0.2
"""The score of the title if the goal's title has no noun."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be bought."""

    product_id: str
    """The product that the goal was made of."""
    title: str
    kind: str
    categories: tuple[str, ...]
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    """Option → value."""
    max_price: float
    """Highest price in dollars; infinite if there is no limit."""

    @property
    def words(self) -> str:
        """The search for it: kind, attributes and options, in lower case."""
        return " ".join([self.kind, *self.attributes, *self.options.values()]).lower()


@dataclass(frozen=True, slots=True)
class Purchase:
    """The terms of the reward of one purchase."""

    type_factor: float
    """1, 0.5, 0.1 or 0: how far the product is of the right type."""
    num_attributes: int
    """Attributes of the goal that the product has."""
    num_options: int
    """Options of the goal that were chosen."""
    fits_price: bool
    num_wishes: int
    """Attributes and options of the goal, and the price."""

    @property
    def score(self) -> float:
        """The reward, in [0, 1].

        >>> Purchase(1.0, 1, 0, True, 3).score
        0.6666666666666666
        """
        num_met = self.num_attributes + self.num_options + self.fits_price
        return self.type_factor * num_met / self.num_wishes


def judge(
    product: Product, values: Iterable[str], goal: Goal, nouns: frozenset[str], colors: tuple[str, ...]
) -> Purchase:
    """Compares a product, bought with these values of its options, with a goal. `nouns` are words that count
    in titles; `colors` count as equal to longer names of themselves."""
    values = tuple(values)
    chosen = [_plain_color(value, colors) for value in values]
    wished = [_plain_color(value, colors) for value in goal.options.values()]
    return Purchase(
        type_factor=type_factor(product, goal, nouns),
        num_attributes=sum(_has_attribute(product, name) for name in goal.attributes),
        num_options=sum(any(is_same(value, wish) for value in chosen) for wish in wished),
        fits_price=product.price_with(values) <= goal.max_price,
        num_wishes=len(goal.attributes) + len(wished) + 1,
    )


def type_factor(product: Product, goal: Goal, nouns: frozenset[str]) -> float:
    title_score = NO_NOUN_SCORE
    nouns_of_goal = nouns.intersection(words_of(goal.title))
    if nouns_of_goal:
        shared_nouns = nouns_of_goal.intersection(words_of(product.title))
        title_score = len(shared_nouns) / len(nouns_of_goal)
    if title_score == 0:
        return 0.0
    if title_score < 0.1:
        return 0.1
    num_shared = len(set(product.categories) & set(goal.categories))
    if product.kind != goal.kind and num_shared < 2 and title_score <= NO_NOUN_SCORE:
        return 0.5
    return 1.0


def matching_value(product: Product, option_value: str, colors: tuple[str, ...]) -> tuple[str, str] | None:
    """The option and the cheapest value of it that the reward takes for the value of a goal; None if the
    product has none."""
    wish = _plain_color(option_value, colors)
    matching = [
        (added, option, value)
        for option, prices in product.options.items()
        for value, added in prices.items()
        if is_same(_plain_color(value, colors), wish)
    ]
    if not matching:
        return None
    _, option, value = min(matching)
    return option, value


@lru_cache(maxsize=65536)
def is_same(first: str, second: str) -> bool:
    """Whether two names count as the same. Case, order and repetition of words don't matter.

    >>> is_same("Navy, dark", "dark navy"), is_same("black", "slack")
    (True, False)
    """
    fuzz, utils = _library()
    return round(fuzz.token_set_ratio(first, second, processor=utils.default_process)) > MIN_RATIO


def _has_attribute(product: Product, attribute: str) -> bool:
    if any(is_same(name, attribute) for name in product.attributes):
        return True
    attribute = attribute.lower()
    texts = (product.title, " ".join(product.features), product.description)
    return any(attribute in text.lower() for text in texts)


def _plain_color(value: str, colors: tuple[str, ...]) -> str:
    """The first colour in a value, or the value itself, in lower case."""
    value = value.lower()
    return next((color for color in colors if color in value), value)


def _library() -> Any:
    try:
        from rapidfuzz import fuzz, utils
    except ImportError as fault:
        raise NotAvailableError(
            f"the environment webshop needs rapidfuzz, which isn't installed; {install_hint('webshop')}"
        ) from fault
    return fuzz, utils
