"""What a customer wants: a function of the shop and a number."""

import math
import random

from turnwise.envs.hold_out import content_hash, in_split
from turnwise.envs.webshop.product import Product, dollars
from turnwise.envs.webshop.reward import Goal, judge
from turnwise.envs.webshop.shop import Shop
from turnwise.errors import EnvironmentFault
from turnwise.types import Split, derive_seed

NUM_ATTRIBUTES = 2
"""Maximum attributes of a goal."""
PRICE_STEP = 10.0
MAX_LIMIT = 990.0
"""The highest limit of a price."""
NUM_LIMITS = 4
"""A limit is the larger of two of this many steps above the price, as published."""
MAX_DRAWS = 256
"""Maximum goals drawn for one episode. A quarter of all goals are for validation."""


def drawn_goal(shop: Shop, seed: int, split: Split | None) -> Goal:
    """The first goal of the seed's draws that belongs to the split. Raises EnvironmentFault if there is
    none."""
    for draw in range(MAX_DRAWS):
        goal = goal_of(shop, derive_seed(seed, "goal", draw))
        if in_split(goal_hash(goal), split):
            return goal
    raise EnvironmentFault(
        f"webshop: none of {MAX_DRAWS} goals is for {split}: the catalogue has too few kinds and attributes "
        "to hold any out; set split: null in env_config, or take a larger catalogue"
    )


def goal_of(shop: Shop, index: int) -> Goal:
    """The goal with this number: a product, some of its attributes, a value of each of its options, and a
    limit of the price. Raises EnvironmentFault if the product itself doesn't meet it."""
    rng = random.Random(derive_seed(shop.key, index))
    product = rng.choice(shop.products)
    num_attributes = min(NUM_ATTRIBUTES, len(product.attributes))
    options = {name: rng.choice(sorted(prices)) for name, prices in product.options.items()}
    goal = Goal(
        product_id=product.id,
        title=product.title,
        kind=product.kind,
        categories=product.categories,
        attributes=tuple(rng.sample(product.attributes, num_attributes)),
        options=options,
        max_price=_drawn_limit(product.price_with(options.values()), rng),
    )
    _check_goal(shop, product, goal)
    return goal


def goal_hash(goal: Goal) -> int:
    """The `content_hash` of kind and attributes. Goals that differ in options or price alone belong to the
    same split."""
    return content_hash("\n".join([goal.kind, *sorted(goal.attributes)]))


def wish(goal: Goal) -> str:
    """The goal in words."""
    parts = [f"Find this: {goal.kind}, {', '.join(goal.attributes)}."]
    parts += [f"{name.capitalize()}: {value}." for name, value in goal.options.items()]
    if goal.max_price < math.inf:
        parts.append(f"Price: at most ${dollars(goal.max_price)}.")
    return " ".join(parts)


def short_wish(goal: Goal) -> str:
    """The goal in few words."""
    parts = [" ".join([goal.kind, *goal.attributes]), *goal.options.values()]
    if goal.max_price < math.inf:
        parts.append(dollars(goal.max_price))
    return "; ".join(parts)


def _drawn_limit(price: float, rng: random.Random) -> float:
    """The larger of two of the next `NUM_LIMITS` steps above a price; no limit if fewer than two are left."""
    first = math.floor(price / PRICE_STEP) + 1
    steps = [PRICE_STEP * number for number in range(first, first + NUM_LIMITS)]
    steps = [step for step in steps if step <= MAX_LIMIT]
    if len(steps) < 2:
        return math.inf
    return max(rng.sample(steps, 2))


def _check_goal(shop: Shop, product: Product, goal: Goal) -> None:
    purchase = judge(product, goal.options.values(), goal, shop.nouns, shop.colors)
    if purchase.score < 1:
        raise EnvironmentFault(
            f"webshop: no product meets a goal made of {product.id!r} ({product.title}), whose attributes "
            f"are {', '.join(map(repr, product.attributes))}; write attributes with letters or digits, and "
            "titles that name what the product is"
        )
