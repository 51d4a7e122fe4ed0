"""WebShop's reward, term by term, on cases made by hand."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from itertools import combinations

import pytest
from messages import says

from turnwise.envs.webshop.lexicon import lexicon
from turnwise.envs.webshop.product import Product
from turnwise.envs.webshop.reward import Goal, is_same, judge, matching_value, type_factor
from turnwise.errors import NotAvailableError

COLORS = lexicon().colors
NOUNS = frozenset({"backpack", "tent", "canvas", "bag"})
BACKPACK = Product(
    id="k47",
    title="Alder rugged canvas backpack",
    kind="backpack",
    categories=("outdoor", "bags", "backpack"),
    price=34.0,
    attributes=("rugged", "foldable", "water resistant"),
    options={"color": {"navy blue": 0.0, "red": 0.0}, "size": {"small": 0.0, "large": 8.0}},
    description="For weekend trips, with a hidden pocket.",
    features=("It has a padded strap.",),
)
GOAL = Goal(
    product_id="k47",
    title="Birkwood foldable canvas backpack",
    kind="backpack",
    categories=("outdoor", "bags", "backpack"),
    attributes=("rugged", "foldable"),
    options={"color": "blue", "size": "large"},
    max_price=50.0,
)


def score(values: list[str], goal: Goal = GOAL, product: Product = BACKPACK) -> float:
    return judge(product, values, goal, NOUNS, COLORS).score


def test_everything_that_was_wished_for_is_one() -> None:
    assert score(["navy blue", "large"]) == 1.0


@pytest.mark.parametrize(
    ("attributes", "options", "max_price", "expected"),
    [
        (("rugged",), {"color": "green"}, 50.0, 2 / 3),  # the option is missing
        (("rugged", "silent"), {}, 50.0, 2 / 3),
        (("rugged", "silent", "foldable", "fireproof"), {"color": "red", "size": "huge"}, 50.0, 4 / 7),
        (("silent", "knitted", "foldable", "fireproof"), {"color": "red", "size": "huge"}, 20.0, 2 / 7),
        (("silent",), {"size": "huge"}, 20.0, 0.0),
    ],
)
def test_a_term_that_is_missing_costs_its_share(
    attributes: tuple[str, ...], options: dict[str, str], max_price: float, expected: float
) -> None:
    goal = replace(GOAL, attributes=attributes, options=options, max_price=max_price)
    assert score(["red"], goal) == pytest.approx(expected)


def test_attributes_are_compared_as_sets_of_words_and_looked_for_in_the_texts() -> None:
    def num_attributes(*attributes: str) -> int:
        return judge(BACKPACK, [], replace(GOAL, attributes=attributes), NOUNS, COLORS).num_attributes

    assert num_attributes("Resistant, water") == num_attributes("water") == 1
    assert num_attributes("hidden pocket") == num_attributes("Padded Strap") == num_attributes("canvas") == 1
    assert num_attributes("waterfall", "hidden strap") == 0


def test_options_count_by_their_colour_and_wherever_they_belong() -> None:
    def num_options(values: list[str], **options: str) -> int:
        return judge(BACKPACK, values, replace(GOAL, options=options), NOUNS, COLORS).num_options

    assert num_options(["navy blue"], color="light blue") == 1
    assert num_options(["red"], color="light blue") == num_options([], color="blue") == 0
    assert num_options(["large"], anything="LARGE") == 1
    assert num_options(["red", "large"], color="red", size="large") == 2


def test_the_price_is_that_with_the_chosen_options() -> None:
    def fits(values: list[str], max_price: float) -> bool:
        return judge(BACKPACK, values, replace(GOAL, max_price=max_price), NOUNS, COLORS).fits_price

    assert fits([], 34.0) and fits(["large"], 42.0) and fits(["large"], math.inf)
    assert not fits([], 33.99) and not fits(["large"], 41.0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1.0),
        ({"title": "Alder canvas tent", "kind": "tent"}, 1.0),  # one of two nouns: title score 1/2
        ({"title": "A bag", "categories": ("outdoor", "bags")}, 0.0),  # no noun of the goal's title
        ({"title": ""}, 0.0),
    ],
)
def test_the_type_follows_from_the_title(changes: dict[str, str], expected: float) -> None:
    assert type_factor(replace(BACKPACK, **changes), GOAL, NOUNS) == expected


def test_a_title_without_nouns_scores_a_fifth_and_needs_kind_or_categories() -> None:
    nameless = replace(GOAL, title="Birkwood 2000")
    assert type_factor(BACKPACK, nameless, NOUNS) == 1.0
    stranger = replace(BACKPACK, kind="tent", categories=("outdoor", "camping"))
    assert type_factor(stranger, nameless, NOUNS) == 0.5
    assert type_factor(replace(stranger, categories=("bags", "outdoor")), nameless, NOUNS) == 1.0
    assert type_factor(replace(stranger, kind="backpack"), nameless, NOUNS) == 1.0


def test_a_title_that_shares_less_than_a_tenth_counts_a_tenth() -> None:
    nouns = frozenset(f"noun{number}" for number in range(20))
    goal = replace(GOAL, title=" ".join(sorted(nouns)))
    assert type_factor(replace(BACKPACK, title="noun1"), goal, nouns) == 0.1
    assert type_factor(replace(BACKPACK, title="noun1 noun2"), goal, nouns) == 1.0  # the kind is the same
    stranger = replace(BACKPACK, title="noun1 noun2", kind="tent", categories=())
    assert type_factor(stranger, goal, nouns) == 0.5
    assert judge(BACKPACK, ["navy blue", "large"], goal, nouns, COLORS).score == 0.0


def test_the_cheapest_matching_value_is_found() -> None:
    assert matching_value(BACKPACK, "dark blue", COLORS) == ("color", "navy blue")
    assert matching_value(BACKPACK, "huge", COLORS) is None


def test_no_two_words_of_the_lexicon_count_as_the_same() -> None:
    words = lexicon()
    for option in words.options.values():
        assert not [pair for pair in combinations(option.values, 2) if is_same(*pair)]
    for kind in words.kinds:
        assert not [pair for pair in combinations(kind.attributes, 2) if is_same(*pair)]
        texts = " ".join(["it is", kind.name, *kind.uses, *words.brands]).lower()
        others = [name for name in kind.attributes if name in texts]
        assert not others
        assert not [
            (first, second)
            for first in kind.attributes
            for second in kind.attributes
            if first != second and first in second
        ]


def test_without_its_library_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    with pytest.raises(NotAvailableError, match=says("rapidfuzz", "pip install -e '.[webshop]'")):
        is_same("one that", "no test compares")
