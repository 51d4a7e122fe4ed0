"""A player who knows the reward: searches for the words of the goal, and buys the first product that meets
it."""

from collections.abc import Mapping

from turnwise.envs.webshop.labels import BUY, NEXT, PREVIOUS
from turnwise.envs.webshop.pages import PAGE_SIZE, Place
from turnwise.envs.webshop.product import Product
from turnwise.envs.webshop.reward import Goal, judge, matching_value
from turnwise.envs.webshop.shop import Shop


def next_action(place: Place, goal: Goal, shop: Shop) -> str:
    """A good action at a place. Followed to the end, these buy a product of score 1."""
    match place.page:
        case "search":
            return _search(goal.words)
        case "results":
            return _of_results(place, goal, shop)
        case "item":
            return _of_item(place, goal, shop)
        case "sub":
            return _click(PREVIOUS)
        case "done":
            return _click(BUY)


def _of_results(place: Place, goal: Goal, shop: Shop) -> str:
    for rank, id in enumerate(place.results):
        if values_to_choose(shop.product(id), goal, shop) is not None:
            return _towards(place, rank, id)
    if place.query != goal.words:
        return _search(goal.words)
    return _search(goal.product_id)


def _towards(place: Place, rank: int, id: str) -> str:
    number = rank // PAGE_SIZE
    if number > place.number:
        return _click(NEXT)
    if number < place.number:
        return _click(PREVIOUS)
    return _click(id)


def _of_item(place: Place, goal: Goal, shop: Shop) -> str:
    values = values_to_choose(shop.product(place.item), goal, shop)
    if values is None:
        return _click(PREVIOUS)
    choices = dict(place.choices)
    for option, value in values.items():
        if choices.get(option) != value:
            return _click(value)
    purchase = judge(shop.product(place.item), choices.values(), goal, shop.nouns, shop.colors)
    if purchase.score < 1:  # an option that nobody wants costs too much
        return _click(PREVIOUS)
    return _click(BUY)


def values_to_choose(product: Product, goal: Goal, shop: Shop) -> Mapping[str, str] | None:
    """The options and values with which the product has score 1; None if there are none."""
    chosen: dict[str, str] = {}
    for wish in goal.options.values():
        match = matching_value(product, wish, shop.colors)
        if match is None:
            return None
        chosen[match[0]] = match[1]
    purchase = judge(product, chosen.values(), goal, shop.nouns, shop.colors)
    if purchase.score < 1:
        return None
    return chosen


def _search(words: str) -> str:
    return f"search[{words}]"


def _click(label: str) -> str:
    return f"click[{label}]"
