"""WebShop: find a product that meets a goal, choose its options and buy it. Rules and reward are those of Yao
et al. 2022 (arXiv:2207.01206); the catalogue is generated from our own words, and needs no download."""

import random
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, get_args

from turnwise.envs.arguments import check_choice, check_format_penalty, check_type
from turnwise.envs.base import Step, TextEnv, episode_seed
from turnwise.envs.webshop.expert import next_action
from turnwise.envs.webshop.goals import drawn_goal, short_wish
from turnwise.envs.webshop.labels import BACK, BUY, NEXT, PREVIOUS
from turnwise.envs.webshop.pages import (
    ObservationKind,
    Place,
    full_page,
    labels,
    short_page,
    sub_pages,
)
from turnwise.envs.webshop.reward import Goal, Purchase, judge
from turnwise.envs.webshop.shop import Shop, open_shop
from turnwise.errors import EnvironmentFault
from turnwise.types import Reduction, Split

_ACTION = re.compile(r"\s*(search|click)\s*\[(.*)\]\s*", re.IGNORECASE | re.DOTALL)
_RULES = (
    "You shop for a customer: find a product that meets the wish, choose its options, and buy it.\n"
    "search[words] searches the shop, on every page. click[label] follows a link of the page."
)


class WebShopEnv(TextEnv):
    """A shop of generated products, or of a user's. The reward comes with `click[buy now]`, which ends the
    episode: a number in [0, 1], how far the purchase meets the goal (`reward.judge`). Any other action has
    reward 0.

    Actions are `search[words]` on every page, and `click[label]` with a label of the present page; case
    doesn't matter. Anything else changes nothing and costs `format_penalty` (≤ 0); the episode continues. The
    environment has no step limit of its own; the agent has `max_steps`. Raises EnvironmentFault if an
    argument is out of range or the catalogue is faulty; NotAvailableError without bm25s or rapidfuzz.

    Args:
        num_products: size of the generated catalogue.
        catalogue_seed: seed of the generated catalogue. It doesn't depend on the run's seed, so all runs
            shop in the same shop.
        catalogue: a JSONL file of products (docs/environments.md) in place of a generated catalogue.
        observation: `full`: pages in sentences. `short`: the same in few words, for small models.
        show_actions: whether a page lists what can be clicked.
        show_attrs: whether a product has a page of its attributes.
        format_penalty: reward of an invalid action.
        split: `train` or `val`: draws only goals whose kind and attributes belong to this split. None: draws
            from all goals.
        env_instruction: replaces the rules that open the first prompt; "" leaves them out.

    >>> shop = WebShopEnv(num_products=100, observation="short")
    >>> print(shop.reset(seed=1)[0])
    shampoo gentle whitening; cedar; double; 60
    search
    >>> shop.step("search[gentle shampoo]")[1:3], shop.step("click[the moon]")[1:3]
    ((0.0, False), (0.0, False))
    """

    relays_foreign_text: ClassVar[bool] = True
    metric_reductions: ClassVar[Mapping[str, Reduction]] = MappingProxyType(
        {
            "success": "last",
            "bought": "last",
            "purchase_score": "last",
            "action_is_valid": "mean",
            "action_is_effective": "mean",
            "format_penalty": "mean",
        }
    )

    def __init__(
        self,
        num_products: int = 1000,
        catalogue_seed: int = 0,
        catalogue: str | None = None,
        observation: ObservationKind = "full",
        show_actions: bool = True,
        show_attrs: bool = False,
        format_penalty: float = 0.0,
        split: Split | None = None,
        env_instruction: str | None = None,
    ) -> None:
        check_type("webshop", "num_products", num_products, int, "a whole number")
        check_type("webshop", "catalogue_seed", catalogue_seed, int, "a whole number")
        check_choice("webshop", "observation", observation, get_args(ObservationKind))
        check_choice("webshop", "split", split, (*get_args(Split), None))
        check_type("webshop", "show_actions", show_actions, bool, "true or false")
        check_type("webshop", "show_attrs", show_attrs, bool, "true or false")
        check_format_penalty(format_penalty)
        if catalogue is not None:
            check_type("webshop", "catalogue", catalogue, str, "the name of a JSONL file")
        self.shop: Shop = open_shop(num_products, catalogue_seed, catalogue)
        self._observation_kind = observation
        self._shows_actions = show_actions
        self._has_attributes = show_attrs
        self._format_penalty = float(format_penalty)
        self._split = split
        if env_instruction is None:
            env_instruction = _RULES
        self._instruction = env_instruction
        self._seed = 0
        self._goal: Goal | None = None
        self.place = Place()
        """The page of the current episode."""
        self.purchase: Purchase | None = None
        """What was bought; None until then."""

    @property
    def goal(self) -> Goal:
        """The goal of the current episode."""
        if self._goal is None:
            raise EnvironmentFault("WebShopEnv was used before reset; call reset(seed=…) first")
        return self._goal

    @property
    def labels(self) -> tuple[str, ...]:
        """What can be clicked on the present page."""
        return labels(self.place, self.shop, self._has_attributes)

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Draws the goal of `seed`. Without a seed, one is derived from the last episode's seed."""
        self._seed = episode_seed(seed, self._seed)
        self._goal = drawn_goal(self.shop, self._seed, self._split)
        self.place = Place()
        self.purchase = None
        return self._observe(), {"env_instruction": self._instruction}

    def step(self, action: str) -> Step:
        goal = self.goal
        place = self._place_after(action)
        is_valid = place is not None
        is_effective = is_valid and place != self.place
        reward = 0.0
        if place is not None and is_effective:
            self.place = place
            if place.page == "done":
                self.purchase = self._judged(goal, place)
                reward = self.purchase.score
        penalty = 0.0 if is_valid else self._format_penalty
        score = self.purchase.score if self.purchase else 0.0
        metrics = {
            "success": float(score >= 1.0),
            "bought": float(self.purchase is not None),
            "purchase_score": score,
            "action_is_valid": float(is_valid),
            "action_is_effective": float(is_effective),
            "format_penalty": penalty,
        }
        is_over = self.purchase is not None
        return self._observe(), reward + penalty, is_over, False, {"metrics": metrics}

    def state_key(self) -> str:
        """The wish, and where the customer is."""
        return f"{short_wish(self.goal)}|{self.place.key}"

    def expert_action(self) -> str:
        """The next action of a player who searches for the words of the goal and buys the first product that
        meets it. It always ends with score 1."""
        return next_action(self.place, self.goal, self.shop)

    def random_action(self, rng: random.Random) -> str:
        """A search for one to three words of the goal, or a click on a link; each link and the search are
        equally likely."""
        links = self.labels
        number = rng.randrange(len(links) + 1)
        if number < len(links):
            return f"click[{links[number]}]"
        goal = self.goal
        words = [goal.kind, *goal.attributes, *goal.options.values()]
        drawn = rng.sample(words, min(rng.randint(1, 3), len(words)))
        return f"search[{' '.join(drawn)}]"

    def render(self) -> str:
        """The present page in sentences."""
        return full_page(self.place, self.goal, self.shop, self.labels)

    def _observe(self) -> str:
        shown_labels = self.labels if self._shows_actions else None
        draw_page = short_page if self._observation_kind == "short" else full_page
        return draw_page(self.place, self.goal, self.shop, shown_labels)

    def _judged(self, goal: Goal, place: Place) -> Purchase:
        product = self.shop.product(place.item)
        values = [value for _, value in place.choices]
        return judge(product, values, goal, self.shop.nouns, self.shop.colors)

    def _place_after(self, action: str) -> Place | None:
        """Where an action leads; None if it isn't one."""
        match = _ACTION.fullmatch(action)
        if match is None or self.place.page == "done":
            return None
        name, words = match[1].lower(), " ".join(match[2].split())
        if name == "search":
            if not words:
                return None
            query = words.lower()
            return Place("results", query, self.shop.search(query))
        label = words.lower()
        if label not in self.labels:
            return None
        return self._clicked(label)

    def _clicked(self, label: str) -> Place:
        place = self.place
        if label == BACK:
            return Place()
        if place.page == "results":
            if label == NEXT:
                return replace(place, number=place.number + 1)
            if label == PREVIOUS:
                return replace(place, number=place.number - 1)
            return replace(place, page="item", item=label)
        if place.page == "sub":
            return replace(place, page="item", sub_page="")
        if label == PREVIOUS:
            return replace(place, page="results", item="", choices=())
        if label == BUY:
            return replace(place, page="done")
        if label in sub_pages(self._has_attributes):
            return replace(place, page="sub", sub_page=label)
        return self._chosen(label)

    def _chosen(self, value: str) -> Place:
        product = self.shop.product(self.place.item)
        choices = dict(self.place.choices) | {product.option_of(value) or "": value}
        in_order = tuple((name, choices[name]) for name in product.options if name in choices)
        return replace(self.place, choices=in_order)
