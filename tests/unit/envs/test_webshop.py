"""WebShop: pages, actions, goals, catalogues and players."""

from __future__ import annotations

import json
import math
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from messages import says

from turnwise.envs.webshop.catalogue import generated_products
from turnwise.envs.webshop.env import WebShopEnv
from turnwise.envs.webshop.goals import goal_hash, goal_of
from turnwise.envs.webshop.reward import Goal
from turnwise.envs.webshop.shop import open_shop
from turnwise.errors import EnvironmentFault
from turnwise.models.tokenizer import train_tokenizer
from turnwise.testing.env_contract import check_env_contract

SIZE = 300
ROW: dict[str, Any] = {
    "id": "A1",
    "title": "Steel bottle",
    "price": 9.5,
    "categories": ["kitchen", "bottles"],
    "attributes": ["leakproof", "steel"],
}


def shop_env(**options: Any) -> WebShopEnv:
    return WebShopEnv(**{"num_products": SIZE, **options})


def play_expert(env: WebShopEnv, max_steps: int = 20) -> list[str]:
    actions = []
    for _ in range(max_steps):
        actions.append(env.expert_action())
        if env.step(actions[-1])[2]:
            break
    return actions


def write_catalogue(path: Path, num_products: int = 60, **changes: Any) -> str:
    rows = [ROW | {"id": f"A{number}", "title": f"Steel bottle {number}"} for number in range(num_products)]
    rows[0] |= changes
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_purchase_step_by_step() -> None:
    env = shop_env()
    observation, info = env.reset(seed=5)
    goal = env.goal
    assert goal.kind in observation and "search[words]" in info["env_instruction"]
    assert env.labels == ()
    observation, *_ = env.step(f"Search[ {goal.kind}  ]")
    assert env.place.query == goal.kind and f"page 1 of {-(-len(env.place.results) // 10)}" in observation
    first = env.place.results[0]
    observation, *_ = env.step(f" CLICK[{first.upper()}] ")
    product = env.shop.product(first)
    assert product.title in observation
    [(option, values)] = list(product.options.items())[:1]
    for value in list(values)[:2]:
        env.step(f"click[{value}]")
        assert dict(env.place.choices) == {option: value}
    env.step("click[description]")
    assert product.description in env.render() and env.labels == ("< prev", "back to search")
    env.step("click[< prev]")
    assert dict(env.place.choices) == {option: value}, "a sub-page keeps the choices"
    observation, reward, is_terminated, is_truncated, info = env.step("click[buy now]")
    assert is_terminated and not is_truncated and env.purchase is not None
    assert reward == env.purchase.score == info["metrics"]["purchase_score"]
    assert info["metrics"]["bought"] == 1.0
    assert env.step("click[buy now]")[1:3] == (0.0, True), "nothing is bought twice"


def test_pages_of_results_are_turned() -> None:
    env = shop_env()
    env.reset(seed=5)
    env.step(f"search[{env.goal.kind} red]")
    first = env.place.shown_results
    assert len(first) == 10 and "< prev" not in env.labels
    env.step("click[next >]")
    assert not set(first) & set(env.place.shown_results)
    assert env.step(f"click[{first[0]}]")[4]["metrics"]["action_is_valid"] == 0.0, "it isn't on this page"
    while env.place.has_next:
        env.step("click[next >]")
    assert "next >" not in env.labels
    env.step("click[< prev]")
    env.step("click[back to search]")
    assert env.place.page == "search"
    assert "No product" in env.step("search[qwertyuiop]")[0]


@pytest.mark.parametrize(
    "action",
    ["", "buy", "search[]", "search[  ]", "click[the moon]", "click[]", "x search[red]", "search red"],
)
def test_an_unknown_action_changes_nothing_and_costs_the_penalty(action: str) -> None:
    env = shop_env(format_penalty=-0.25)
    before, _ = env.reset(seed=1)
    key = env.state_key()
    observation, reward, is_terminated, _, info = env.step(action)
    assert (observation, reward, is_terminated, env.state_key()) == (before, -0.25, False, key)
    metrics = info["metrics"]
    assert (metrics["action_is_valid"], metrics["format_penalty"], metrics["bought"]) == (0.0, -0.25, 0.0)


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_expert_always_scores_one(split: Any) -> None:
    env = shop_env(split=split)
    for seed in range(60):
        env.reset(seed=seed)
        actions = play_expert(env)
        assert env.purchase is not None and env.purchase.score == 1.0, actions


def test_the_expert_finds_its_way_from_anywhere() -> None:
    env = shop_env(observation="short", show_attrs=True)
    rng = random.Random(0)
    for seed in range(40):
        env.reset(seed=seed)
        for _ in range(rng.randrange(8)):
            action = env.random_action(rng)
            if action != "click[buy now]":
                env.step(action)
        play_expert(env)
        assert env.purchase is not None and env.purchase.score == 1.0


def test_random_actions_are_valid_and_follow_from_the_generator() -> None:
    def actions() -> list[str]:
        env = shop_env()
        env.reset(seed=3)
        rng = random.Random(7)
        drawn = []
        for _ in range(30):
            drawn.append(env.random_action(rng))
            assert env.step(drawn[-1])[4]["metrics"]["action_is_valid"] == 1.0
            if env.purchase:
                break
        return drawn

    assert actions() == actions() and len(set(actions())) > 1


def test_it_keeps_the_contract() -> None:
    check_env_contract(shop_env, ["search[red]", "click[next >]", "nonsense", "search[blue]"])


def test_siblings_start_in_the_same_page_with_the_same_prices() -> None:
    envs = [shop_env(split="train") for _ in range(8)]
    starts = {env.reset(seed=11)[0] for env in envs}
    query = f"search[{envs[0].goal.kind}]"
    results = {env.step(query)[0] for env in envs}
    items = {env.step(f"click[{env.place.results[0]}]")[0] for env in envs}
    assert len(starts) == len(results) == len(items) == 1
    assert "$" in items.pop() and len({env.goal.max_price for env in envs}) == 1


def test_a_wish_is_for_training_or_for_validation_whatever_its_options() -> None:
    def wishes(split: Any) -> set[tuple[str, frozenset[str]]]:
        env = shop_env(split=split)
        goals: list[Goal] = []
        for seed in range(300):
            env.reset(seed=seed)
            goals.append(env.goal)
        return {(goal.kind, frozenset(goal.attributes)) for goal in goals}

    assert not wishes("train") & wishes("val")


def test_goals_are_a_function_of_catalogue_and_number() -> None:
    shop = open_shop(SIZE, 0, None)
    goals = [goal_of(shop, index) for index in range(50)]
    assert goals == [goal_of(shop, index) for index in range(50)]
    assert len({goal_hash(goal) for goal in goals}) > 40
    assert goals != [goal_of(open_shop(SIZE, 1, None), index) for index in range(50)]
    for goal in goals:
        price = shop.product(goal.product_id).price_with(goal.options.values())
        assert goal.max_price % 10 == 0 and price < goal.max_price <= math.floor(price / 10) * 10 + 40


def test_a_catalogue_is_made_once_and_equal_arguments_give_equal_products() -> None:
    assert shop_env().shop is shop_env(observation="short").shop
    assert generated_products(80, 3) == generated_products(80, 3) != generated_products(80, 4)
    products = generated_products(3000, 0)
    assert len({product.id for product in products}) == 3000
    assert all(len(product.id) == 6 for product in products)


def test_threads_wait_for_one_shop() -> None:
    with ThreadPoolExecutor(8) as pool:
        shops = list(pool.map(lambda _: open_shop(177, 5, None), range(8)))
    assert all(shop is shops[0] for shop in shops)


def test_a_short_page_says_the_same_in_fewer_words() -> None:
    full, short = shop_env(), shop_env(observation="short")
    silent = shop_env(observation="short", show_actions=False)
    for env in (full, short, silent):
        env.reset(seed=2)
    for action in (f"search[{full.goal.words}]", "", ""):
        action = action or full.expert_action()
        texts = [env.step(action)[0] for env in (full, short, silent)]
        assert len(texts[0]) > 1.5 * len(texts[1]) and len(texts[1]) > len(texts[2])
    assert full.state_key() == short.state_key() == silent.state_key()


def test_the_page_of_attributes_is_there_if_asked_for() -> None:
    for show_attrs in (False, True):
        env = shop_env(show_attrs=show_attrs)
        env.reset(seed=2)
        env.step(f"search[{env.goal.words}]")
        env.step(env.expert_action())
        assert ("attributes" in env.labels) == show_attrs


def test_a_users_catalogue_is_played(tmp_path: Path) -> None:
    options = {"color": ["Red", "blue"], "size": {"0.5 l": 0, "1 l": 4.25}}
    env = WebShopEnv(
        catalogue=write_catalogue(tmp_path / "shop.jsonl", options=options, price=9.5), split=None
    )
    product = env.shop.product("a0")
    assert product.options == {"color": {"red": 0.0, "blue": 0.0}, "size": {"0.5 l": 0.0, "1 l": 4.25}}
    assert product.price_with(["1 l"]) == 13.75
    for seed in range(5):
        env.reset(seed=seed)
        play_expert(env)
        assert env.purchase is not None and env.purchase.score == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"price": -1}, says("line 1", "price", "-1", "above 0")),
        ({"price": True}, says("line 1", "price", "True")),
        ({"title": ""}, says("line 1", "title", "text")),
        ({"categories": []}, says("line 1", "categories", "list of texts")),
        ({"attributes": "steel"}, says("line 1", "attributes", "list of texts")),
        ({"colour": "red"}, says("line 1", "unknown colour")),
        ({"options": ["red"]}, says("line 1", "options", "{name: [values]}")),
        ({"options": {"color": {"red": "2"}}}, says("line 1", "'color'", "'red'", "'2'")),
        ({"options": {"color": ["red"], "trim": ["RED"]}}, says("line 1", "'trim'", "no two")),
        ({"options": {"color": ["Red", "RED"]}}, says("line 1", "'color'", "'Red'", "'RED'", "no two")),
        ({"options": {"color": {"Red": 0.0, "red": 2.0}}}, says("line 1", "'color'", "no two")),
        ({"options": {"color": ["red", "red"]}}, says("line 1", "'color'", "no two")),
        ({"id": "a7"}, says("'a7'", "unique")),
        ({"id": "Next  >"}, says("line 1", "label", "rename")),
        ({"options": {"extra": ["Buy now"]}}, says("line 1", "'Buy now'", "label")),
        ({"description": 3}, says("line 1", "description", "text")),
        ({"attributes": ["!!!"], "title": "Bottle", "id": "A0"}, None),
    ],
)
def test_a_faulty_catalogue_is_refused_with_its_line(
    tmp_path: Path, changes: dict[str, Any], message: str | None
) -> None:
    file = write_catalogue(tmp_path / "shop.jsonl", **changes)
    if message is not None:
        with pytest.raises(EnvironmentFault, match=message):
            WebShopEnv(catalogue=file)
        return
    shop = open_shop(0, 0, file)
    with pytest.raises(EnvironmentFault, match=says("no product meets", "'a0'", "'!!!'")):
        for index in range(2000):
            goal_of(shop, index)


def test_faulty_arguments_are_refused(tmp_path: Path) -> None:
    for num_products in (0, 10, 50):
        with pytest.raises(EnvironmentFault, match=says("num_products", str(num_products), "51", "50")):
            WebShopEnv(num_products=num_products)
    with pytest.raises(EnvironmentFault, match=says("10 products", "51")):
        WebShopEnv(catalogue=write_catalogue(tmp_path / "small.jsonl", 10))
    with pytest.raises(EnvironmentFault, match=says("nowhere.jsonl", "no such file")):
        WebShopEnv(catalogue=str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(EnvironmentFault, match=says("observation", "'html'", "'full'", "'short'")):
        WebShopEnv(observation="html")  # type: ignore[arg-type]
    alike = WebShopEnv(catalogue=write_catalogue(tmp_path / "alike.jsonl"), split="train")
    other = WebShopEnv(catalogue=write_catalogue(tmp_path / "alike.jsonl"), split="val")
    with pytest.raises(EnvironmentFault, match=says("goals", "split: null")):
        alike.reset(seed=0)
        other.reset(seed=0)


def test_a_short_page_has_at_most_120_tokens_of_a_small_tokenizer() -> None:
    env = WebShopEnv(num_products=1000, observation="short")
    rng = random.Random(0)
    pages = []
    for seed in range(150):
        pages.append(env.reset(seed=seed)[0])
        for _ in range(8):
            action = env.expert_action() if rng.random() < 0.5 else env.random_action(rng)
            pages.append(env.step(action)[0])
            if env.purchase:
                break
    tokenizer = train_tokenizer(pages, 1024)
    lengths = [len(tokenizer(page).input_ids) for page in pages]
    assert max(lengths) <= 120
