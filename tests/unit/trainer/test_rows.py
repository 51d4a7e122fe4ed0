"""`Trainer` on rows and reward functions that are objects."""

from __future__ import annotations

import asyncio
from functools import lru_cache, partial
from types import FunctionType

import pytest
from messages import says
from toy_tools import LACKS_SANDBOX, Notebook, divide

from turnwise import Trainer
from turnwise.agents.single_turn_agent import SingleTurnAgent
from turnwise.errors import TurnwiseError
from turnwise.examine.examined import examine
from turnwise.tools.sandbox import run_python
from turnwise.tracking.jsonl import read_metrics
from turnwise.trainer.objects import Objects

ROWS = [{"prompt": f"write {letter}", "letter": letter} for letter in "abcd"]


def has_letter(completions, letter):
    return [float(wanted in text) for text, wanted in zip(completions, letter, strict=True)]


def longer(completions, than):
    return [float(len(text) > than) for text in completions]


class Brief:
    """A reward that is an object."""

    def __call__(self, completions):
        return [-len(text) / 100 for text in completions]


class Shouting(SingleTurnAgent):
    """A loop that is an object."""

    async def run(self, *args):
        trajectories = await super().run(*args)
        for trajectory in trajectories:
            trajectory.metrics["shouts"] = 3.0
        return trajectories


@pytest.fixture
def keys(small_keys):
    return small_keys | {"eval_steps": 2, "actor_infer": {"generating_args": {"max_new_tokens": 6}}}


def test_rows_and_functions_are_trained_on(keys):
    weights = [1.0, 0.5, 0.25, 2.0]
    functions = [has_letter, partial(longer, than=3), Brief(), lambda completions: [0.125] * len(completions)]
    trainer = Trainer(
        **keys,
        train_dataset=ROWS,
        eval_dataset=iter(ROWS[:2]),
        reward_funcs=functions,
        reward_weights=weights,
    )
    names = [asked.name.rpartition(":")[2] for asked in trainer.config.data.reward]
    assert names == ["has_letter", "partial", "Brief", "nameless"]
    for report in trainer.steps():
        for trajectory in (t for group in report.groups for t in group.trajectories):
            text = trajectory.turns[-1].text
            letter = trajectory.task.payload["letter"]
            parts = [float(letter in text), float(len(text) > 3), -len(text) / 100, 0.125]
            assert trajectory.score == pytest.approx(
                sum(w * part for w, part in zip(weights, parts, strict=True))
            )
    assert read_metrics(trainer.run_folder / "metrics.jsonl")[-1]["val/num_episodes"] == 2
    assert trainer.evaluate().overall.num_episodes == 2


@pytest.mark.skipif(LACKS_SANDBOX, reason="this kernel has no Landlock")
def test_a_reward_that_runs_programs_in_the_sandbox_is_trained_on(keys):
    async def counted(completions, letter):
        programs = [
            f"print({text!r}.count({wanted!r}))" for text, wanted in zip(completions, letter, strict=True)
        ]
        return [float(result.text) for result in await asyncio.gather(*map(run_python, programs))]

    trainer = Trainer(**keys | {"eval_steps": 0}, train_dataset=ROWS, reward_funcs=counted)
    trajectories = [t for report in trainer.steps() for group in report.groups for t in group.trajectories]
    assert trajectories
    assert [t.score for t in trajectories] == [
        t.turns[-1].text.count(t.task.payload["letter"]) for t in trajectories
    ]


def of_messages(completions, letter):
    return [
        float(wanted in completion[-1]["content"])
        for completion, wanted in zip(completions, letter, strict=True)
    ]


of_messages_of_trl = FunctionType(
    of_messages.__code__, {**globals(), "__name__": "trl.rewards.other"}, "of_messages_of_trl"
)


def test_entries_of_rewards_have_a_form_and_those_of_trl_need_none(keys):
    entries = [{"name": of_messages, "form": "messages", "weight": 2.0}, of_messages_of_trl]
    trainer = Trainer(**keys | {"max_steps": 1, "eval_steps": 0}, train_dataset=ROWS, rewards=entries)
    [report] = trainer.steps()
    for trajectory in (t for group in report.groups for t in group.trajectories):
        assert trajectory.score == 3.0 * (trajectory.task.payload["letter"] in trajectory.turns[-1].text)


def test_tools_are_functions_and_objects(keys):
    given = {
        "train_dataset": ROWS,
        "reward_funcs": has_letter,
        "tools": [divide, Notebook(), "toy_tools:greet"],
    }
    given["eval_steps"] = 0
    trainer = Trainer(**keys | given)
    assert [offered.name for offered in examine(trainer.config).tools.tools] == ["divide", "note", "greet"]
    assert trainer.config.data.default_agent == "tool_agent"
    named = Trainer(**keys | given, data={"default_agent": "single_turn_agent"})
    assert named.config.data.default_agent == "single_turn_agent"


def test_other_rows_have_another_text_and_equal_ones_the_same(keys):
    def text(rows):
        trainer = Trainer(**keys | {"eval_steps": 0}, train_dataset=rows, reward_funcs=has_letter)
        return trainer.config.data.train_files

    assert text(ROWS) == text([dict(row) for row in ROWS]) != text(ROWS[:3])
    [name] = text(pytest.importorskip("datasets").Dataset.from_list(ROWS))
    assert name.endswith(".datasets.arrow_dataset:Dataset")


class Judge:
    def __init__(self, bonus=0.0):
        self.bonus = bonus

    def short(self, completions):
        return [self.bonus - len(text) for text in completions]

    def long(self, completions):
        return [self.bonus + len(text) for text in completions]

    @classmethod
    def fixed(cls, completions):
        return [1.0] * len(completions)


class Kind:
    def short(self, completions):
        return [1.0] * len(completions)


def above(limit):
    def reward(completions):
        return [float(len(text) > limit) for text in completions]

    return reward


def test_methods_closures_and_instances_are_told_apart_by_what_they_are():
    def text(value):
        return Objects().text_of(value)

    alike = [text(Judge().short), text(Judge().short), text(Judge(0.0).short)]
    assert len(set(alike)) == 1 and alike[0].endswith(f".{__name__}:Judge.short")
    assert text(Judge.fixed).endswith(f".{__name__}:Judge.fixed")
    different = [
        Judge().short,
        Judge().long,
        Judge(1.0).short,
        Kind().short,
        Judge.fixed,
        above(1),
        above(2),
        lru_cache(above(1)),
    ]
    different += [partial(longer, than=1), partial(longer, than=2), partial(longer, 1)]
    texts = [text(value) for value in different]
    assert len({text.partition(".")[0] for text in texts}) == len(texts), texts
    assert text(above(1)) == text(above(1)) and "e3b0c44298fc" not in "".join(texts)


def test_a_function_without_a_module_is_an_object_too():
    names = {}
    exec("def score(completions): return [0.0] * len(completions)", names)
    assert Objects().text_of(names["score"]).endswith(".nameless:score")


def test_another_method_is_noted_when_a_run_on_rows_goes_on(keys, capsys):
    keys |= {"eval_steps": 0, "max_steps": 1, "train_dataset": ROWS}
    trainer = Trainer(**keys, reward_funcs=[Judge().short, Kind().short])
    [report] = trainer.steps()
    assert {*report.groups[0].trajectories[0].outcome_rewards} == {"Judge.short", "Kind.short"}
    again = Trainer(
        **keys | {"max_steps": 2}, reward_funcs=[Judge().long, Kind().short], resume_from_checkpoint=True
    )
    again.train()
    assert again.run_folder == trainer.run_folder and again.checkpoint.name == "checkpoint-2"
    said = capsys.readouterr().err
    assert "Judge.short" in said and "Judge.long" in said


def test_rows_are_played_by_a_loop_that_is_an_object(keys):
    data = {"default_agent": Shouting}
    trainer = Trainer(
        **keys | {"eval_steps": 0, "max_steps": 1}, data=data, train_dataset=ROWS, reward_funcs=has_letter
    )
    [report] = trainer.steps()
    assert {group.task.agent.rpartition(":")[2] for group in report.groups} == {"Shouting"}
    assert report.metrics["env/data/shouts"] == 3.0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"reward_funcs": None}, says("data.reward", "unset")),
        ({"train_dataset": [{"text": "a"}]}, says("column", "'prompt'")),
        ({"train_dataset": []}, says("Python", "no rows")),
        ({"train_dataset": ["a.jsonl"]}, "a.jsonl"),
        ({"eval_dataset": {"val": ROWS}}, "dict with val"),
        ({"reward_funcs": ["exact_mach"]}, says("'exact_mach'", "'exact_match'")),
        ({"reward_funcs": [len]}, says("parameter", "`completions`")),
        ({"reward_funcs": object}, says("reward", "function")),
        ({"reward_funcs": ValueError}, "parameters"),
        ({"reward_funcs": ["numpy:add"]}, says("parameters", "ufunc")),
        ({"reward_funcs": ["torch:ones"]}, "parameters"),
        ({"rewards": [has_letter]}, says("rewards", "reward_funcs")),
        (
            {"reward_funcs": [{"name": has_letter, "form": "message"}]},
            says("form", "'text'", "'messages'"),
        ),
        (
            {"reward_funcs": [{"name": has_letter, "weight": 1.0}], "reward_weights": [2.0]},
            says("weight", "already"),
        ),
        ({"reward_funcs": ["accuracy"]}, says("row 1", "data.reward accuracy", "ground_truth")),
        ({"tools": [3]}, says("tools", "'3'", "schema, create, execute")),
        ({"tools": [{"type": "function"}]}, says("tools", "dict")),
        ({"processing_class": object()}, "processing_class: unknown key.*save_pretrained"),
        ({"optimizers": (object(), None)}, "optimizers: unknown key.*AdamW"),
        ({"args": object()}, "args: unknown key.*Trainer"),
        ({"environment_factory": Brief}, "environment_factory: unknown key.*env="),
        ({"rollout_func": len}, says("rollout_func", "agent loop")),
        ({"model": object()}, says("model", "save_pretrained")),
    ],
)
def test_bad_rows_and_rewards_are_refused_when_the_trainer_is_made(keys, changes, sentence):
    given = {"train_dataset": ROWS, "reward_funcs": [has_letter]} | changes
    with pytest.raises(TurnwiseError, match=sentence):
        Trainer(
            **keys | {"eval_steps": 0} | {key: value for key, value in given.items() if value is not None}
        )
