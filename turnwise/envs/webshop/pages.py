"""The pages of the shop as text, each with the labels that can be clicked on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from turnwise.envs.webshop.goals import short_wish, wish
from turnwise.envs.webshop.labels import ATTRIBUTES, BACK, BUY, NEXT, PREVIOUS, SUB_PAGES
from turnwise.envs.webshop.product import Product, dollars
from turnwise.envs.webshop.reward import Goal
from turnwise.envs.webshop.shop import Shop

PageName = Literal["search", "results", "item", "sub", "done"]
ObservationKind = Literal["full", "short"]

PAGE_SIZE = 10
"""Products on a page of results, as published."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a customer is: the whole state of an episode beside its goal."""

    page: PageName = "search"
    query: str = ""
    results: tuple[str, ...] = ()
    """Ids of the products that the search found."""
    number: int = 0
    """Page of the results, from 0."""
    item: str = ""
    """Id of the product that is looked at, or was bought."""
    sub_page: str = ""
    choices: tuple[tuple[str, str], ...] = ()
    """Option and chosen value, in the order of the product's options."""

    @property
    def shown_results(self) -> tuple[str, ...]:
        start = self.number * PAGE_SIZE
        return self.results[start : start + PAGE_SIZE]

    @property
    def has_next(self) -> bool:
        return len(self.results) > (self.number + 1) * PAGE_SIZE

    @property
    def key(self) -> str:
        """All of it as one text. The results follow from the query."""
        choices = ",".join(f"{name}={value}" for name, value in self.choices)
        return "|".join([self.page, self.query, str(self.number), self.item, self.sub_page, choices])


def labels(place: Place, shop: Shop, has_attributes: bool) -> tuple[str, ...]:
    """What can be clicked, in the order of the page."""
    if place.page == "results":
        turns = []
        if place.number:
            turns.append(PREVIOUS)
        if place.has_next:
            turns.append(NEXT)
        return (*place.shown_results, *turns, BACK)
    if place.page == "item":
        values = [value for prices in shop.product(place.item).options.values() for value in prices]
        return (*values, BUY, *sub_pages(has_attributes), PREVIOUS, BACK)
    if place.page == "sub":
        return (PREVIOUS, BACK)
    return ()


def sub_pages(has_attributes: bool) -> tuple[str, ...]:
    if has_attributes:
        return (*SUB_PAGES, ATTRIBUTES)
    return SUB_PAGES


def full_page(place: Place, goal: Goal, shop: Shop, clickable: Sequence[str] | None) -> str:
    """A page in sentences. `clickable` are the labels that it lists; None lists none."""
    lines = [wish(goal), *_full_body(place, shop)]
    if clickable is not None and place.page != "done":
        links = [f"click[{label}]" for label in clickable]
        lines.append(f"Actions: {', '.join(['search[words]', *links])}")
    return "\n".join(lines)


def short_page(place: Place, goal: Goal, shop: Shop, clickable: Sequence[str] | None) -> str:
    """A page in few words: a result has no brand, and links that the page shows anyway aren't listed
    again."""
    lines = [short_wish(goal), *_short_body(place, shop)]
    if clickable is not None and place.page != "done":
        shown = set(place.shown_results) if place.page == "results" else set()
        if place.page == "item":
            shown = {value for prices in shop.product(place.item).options.values() for value in prices}
        links = [f"[{label}]" for label in clickable if label not in shown]
        if place.page == "search":
            links = ["search"]
        lines.append(" ".join(links))
    return "\n".join(lines)


def _full_body(place: Place, shop: Shop) -> list[str]:
    match place.page:
        case "search":
            return ["You are at the search page."]
        case "results":
            return _full_results(place, shop)
        case "item":
            return _full_item(place, shop.product(place.item))
        case "sub":
            product = shop.product(place.item)
            return [f"{product.title}: {place.sub_page}", *_sub_page_lines(product, place.sub_page)]
        case "done":
            return [f"You bought {shop.product(place.item).title}."]


def _full_results(place: Place, shop: Shop) -> list[str]:
    if not place.results:
        return [f"No product fits {place.query!r}."]
    num_pages = -(-len(place.results) // PAGE_SIZE)
    lines = [f"Results for {place.query!r}, page {place.number + 1} of {num_pages}:"]
    for id in place.shown_results:
        product = shop.product(id)
        lines.append(f"[{id}] {product.title}, ${dollars(product.price)}")
    return lines


def _full_item(place: Place, product: Product) -> list[str]:
    choices = dict(place.choices)
    lines = [f"{product.title}, ${dollars(product.price_with(choices.values()))}"]
    for name, prices in product.options.items():
        values = [_value_and_price(value, added) for value, added in prices.items()]
        lines.append(f"{name}: {', '.join(values)}. Chosen: {choices.get(name, 'none')}.")
    return lines


def _value_and_price(value: str, added: float) -> str:
    if added:
        return f"{value} (+${dollars(added)})"
    return value


def _sub_page_lines(product: Product, name: str) -> list[str]:
    if name == "description":
        return [product.description or "There is none."]
    lines = product.features
    if name == ATTRIBUTES:
        lines = product.attributes
    return list(lines) or ["There are none."]


def _short_body(place: Place, shop: Shop) -> list[str]:
    match place.page:
        case "search":
            return []
        case "results":
            lines = []
            for id in place.shown_results:
                product = shop.product(id)
                lines.append(f"{id} {_short_title(product)} {dollars(product.price)}")
            return lines or ["nothing"]
        case "item":
            return _short_item(place, shop.product(place.item))
        case "sub":
            return _sub_page_lines(shop.product(place.item), place.sub_page)
        case "done":
            return [f"bought {place.item}"]


def _short_item(place: Place, product: Product) -> list[str]:
    choices = dict(place.choices)
    lines = [f"{place.item} {_short_title(product)} {dollars(product.price_with(choices.values()))}"]
    for name, prices in product.options.items():
        lines.append(f"{name}: {' '.join(f'[{value}]' for value in prices)}")
    if choices:
        lines.append(f"chosen: {' '.join(choices.values())}")
    return lines


def _short_title(product: Product) -> str:
    """The title without its first word, which is the brand of a generated product, and at most six words."""
    words = product.title.split()
    return " ".join(words[1:7] or words)
