"""An episode that is told: the ledger is training's own, the words are the players', and outcomes come with
their turns."""

from __future__ import annotations

import asyncio
import itertools
import re
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest

from turnwise.assemble.rollouts import build_scheduler, open_served_policy
from turnwise.batching.samples import build_samples
from turnwise.chat.conversation import TextAnswer
from turnwise.config import parse_config
from turnwise.envs.parsing import as_answer
from turnwise.errors import ConfigError, RolloutError
from turnwise.examine.examined import examine
from turnwise.models.load import load_tokenizer
from turnwise.play.episode import TextContexts
from turnwise.play.policies import PlayStopped, person
from turnwise.play.setup import Choices, set_up
from turnwise.protocols import SilentObserver, TurnPlace
from turnwise.rollout.tasks import SeededTasks
from turnwise.types import SamplingParams, Task

LAKE = {
    "env_type": "frozen_lake",
    "max_steps": 4,
    "max_tokens_per_step": 16,
    "env_config": {"is_slippery": False, "size": 3, "env_instruction": ""},
}


class Notes(SilentObserver):
    """An onlooker that keeps everything."""

    def __init__(self):
        self.prompts, self.places, self.answers, self.outcomes, self.order = [], [], [], [], []

    def asked(self, place, messages):
        self.places.append(place)

    def prompted(self, prompt):
        self.prompts.append(prompt)
        self.order.append(f"prompt {self.places[-1].number + 1}")

    def sampled(self, place, turn, reply):
        self.answers.append(turn)
        self.order.append(f"response {place.number + 1}")

    def rewarded(self, place, turn):
        self.outcomes.append((turn.action, turn.reward, dict(turn.metrics)))
        self.order.append(f"outcome {place.number + 1}")

    def ended(self, trajectories, fault):
        self.end = (trajectories, fault)


def config_of(tiny_model, **changes):
    env = LAKE | {"agent_system_template": "Walk.", "agent_template": "{observation}"} | changes
    return parse_config({"pretrain": str(tiny_model), "sequence_length": 256, "custom_envs": {"Lake": env}})[
        0
    ]


def played(config, choices):
    notes = Notes()
    with closing(set_up(examine(config), "Lake", choices)) as setup:
        return notes, setup.play(notes), setup


@pytest.fixture
def tokens(tiny_model):
    return {"tokenizer": str(tiny_model)}


@pytest.mark.parametrize("mode", ["trajectory", "step"])
def test_a_scripted_episode_is_won_and_told_in_order(tiny_model, tokens, mode):
    notes, result, _ = played(config_of(tiny_model, mode=mode), Choices("scripted", seed=1, **tokens))
    turns = result.trajectory.turns
    assert result.trajectory.score == 1.0 and result.trajectory.status == "finished" and not result.is_left
    told = [[f"prompt {n}", f"response {n}", f"outcome {n}"] for n in range(1, len(turns) + 1)]
    assert notes.order == list(itertools.chain(*told)) and len(turns) >= 4
    assert notes.outcomes[-1][1:] == (1.0, turns[-1].metrics) and notes.outcomes[-1][2]["success"] == 1.0
    assert [place.context for place in notes.places] == [
        number if mode == "step" else 0 for number in range(len(turns))
    ]
    assert notes.end == ([result.trajectory], None)
    for place, prompt, turn in zip(notes.places, notes.prompts, turns, strict=True):
        assert list(prompt.added_ids) == turn.prompt_ids.tolist(), "what is told is what the turn holds"
        assert turn.text == f"<answer>{turn.action}</answer>"
        assert turn.starts_context == (mode == "step" or place.number == 0) == (prompt.num_before == 0)
    assert len(build_samples(result.trajectory)) == (len(turns) if mode == "step" else 1)
    first = load_tokenizer(tiny_model).decode(notes.prompts[0].added_ids)
    assert first.startswith("<|im_start|>system\nWalk.<|im_end|>") and first.endswith(
        "<|im_start|>assistant\n"
    )


def test_a_model_plays_what_it_plays_in_a_run(tiny_model):
    """The same seed gives the tokens and log-probs that the scheduler of a run gets."""
    config = config_of(tiny_model)
    task = SeededTasks(config.seed, "val", ("Lake",), (1,)).task(0)
    notes, result, _ = played(config, Choices(str(tiny_model), split="val", seed=task.seed))
    with closing(open_served_policy(examine(config))) as policy:
        [group] = build_scheduler(examine(config), policy, "val").get_batch(1)
    expected = group.trajectories[0]
    assert group.task.seed == task.seed
    for ours, theirs, answer in zip(result.trajectory.turns, expected.turns, notes.answers, strict=True):
        assert ours.prompt_ids.tolist() == theirs.prompt_ids.tolist()
        assert ours.response_ids.tolist() == theirs.response_ids.tolist() == answer.response_ids.tolist()
        assert ours.logprobs.tolist() == theirs.logprobs.tolist()


def test_a_person_plays_leaves_and_says_what_cannot_be_read(tiny_model, tokens):
    lines = iter(["Right", "", "  ", "!Jump", "<answer>down</answer>", "q", "never read"])
    notes, result, setup = played(config_of(tiny_model), Choices("human", read=lambda: next(lines), **tokens))
    assert [turn.action for turn in result.trajectory.turns] == ["Right", None, "down"]
    assert [answer.finish_reason for answer in notes.answers] == ["stop"] * 3
    assert result.is_left and result.trajectory.status == "truncated" and next(lines) == "never read"
    assert notes.order[-2:] == ["outcome 3", "prompt 4"] and isinstance(notes.end[1], PlayStopped)
    assert setup.agent._settings.episode_timeout_s is None


def test_an_answer_is_cut_at_the_budget_as_a_models_would_be(tiny_model, tokens):
    notes, result, _ = played(config_of(tiny_model, max_tokens_per_step=2), Choices("scripted", **tokens))
    assert {answer.finish_reason for answer in notes.answers} == {"length"}
    assert all(len(turn.response_ids) == 2 and turn.action is None for turn in result.trajectory.turns)
    assert result.trajectory.limit == "max_steps"


def test_a_context_without_room_ends_the_episode(tiny_model, tokens):
    config, _ = parse_config(
        {"pretrain": str(tiny_model), "sequence_length": 40, "custom_envs": {"Lake": LAKE}}
    )
    with pytest.raises(RolloutError, match="raise sequence_length"):
        played(config, Choices("random", **tokens))


def test_a_random_player_repeats_itself_under_a_seed(tiny_model, tokens):
    def actions(seed):
        _, result, _ = played(config_of(tiny_model), Choices("random", seed=seed, **tokens))
        return [turn.action for turn in result.trajectory.turns]

    assert actions(5) == actions(5)
    assert len({tuple(actions(seed)) for seed in range(5)}) > 1


def test_without_a_tokenizer_texts_are_played_and_it_is_said(tiny_model):
    notes, result, setup = played(config_of(tiny_model), Choices("scripted", seed=1))
    assert result.trajectory.score == 1.0 and "no tokenizer here" in setup.policy.note
    assert notes.answers[0].text.startswith("<answer>") and notes.prompts[0].messages[0]["role"] == "system"
    with_tools = parse_config({"pretrain": str(tiny_model), "custom_envs": {"Lake": LAKE}})[0]
    with_tools.agent.fill(function_tool_path="tools.py")
    with pytest.raises(ConfigError, match="--tokenizer"):
        played(with_tools, Choices("scripted"))


def test_nobody_to_play_is_a_sentence(tiny_model, tokens):
    config = config_of(tiny_model, env_type="toy_envs:LettersEnv", env_config={})
    with pytest.raises(ConfigError, match="--actions a,b,c"):
        played(config, Choices("random", **tokens))
    with pytest.raises(ConfigError, match=r"no expert_action\(\)"):
        played(config, Choices("scripted", **tokens))
    with pytest.raises(ConfigError, match="one of human, random, scripted, openai:URL"):
        played(config, Choices("nowhere"))
    notes, _, _ = played(config, Choices("random", actions=("ab", "CD"), **tokens))
    assert {outcome[0] for outcome in notes.outcomes} <= {"ab", "CD"}


def test_an_environment_that_raises_ends_it_with_its_place(tiny_model, tokens):
    config = config_of(tiny_model, env_type="odd_envs:RaisingEnv", env_config={})
    with pytest.raises(
        RolloutError, match=r"(?s)odd_envs.py:\d+ in step: raise .*RuntimeError: the toy is broken$"
    ):
        played(config, Choices("random", **tokens))


def test_a_policy_known_by_its_words_has_no_tokens(tiny_model):
    config, notes, asked = config_of(tiny_model), Notes(), []

    async def complete(messages, sampling, tools=()):
        asked.append(list(messages))
        return TextAnswer("<answer>Right</answer>", "stop")

    setup = set_up(examine(config), "Lake", Choices("openai:http://localhost:1/v1", model_name="small"))
    setup = replace(setup, policy=replace(setup.policy, contexts=partial(TextContexts, complete)))
    with closing(setup):
        result = setup.play(notes)
    assert len(result.trajectory.turns) == 4 and all(turn.num_tokens == 0 for turn in result.trajectory.turns)
    assert [message["role"] for message in notes.prompts[0].messages] == ["system", "user"]
    assert [message["role"] for message in notes.prompts[1].messages] == ["user"], "only what is new"
    assert len(asked[1]) == 4 and setup.policy.tokenizer is None


def test_the_examples_of_a_first_prompt_are_new_to_the_player():
    async def complete(messages, sampling, tools=()):
        return TextAnswer("4", "stop")

    async def talk():
        conversation = TextContexts(complete, notes)(SamplingParams(max_new_tokens=4))
        await conversation.generate(
            [{"role": role, "content": "2"} for role in ("system", "user", "assistant", "user")]
        )
        await conversation.generate([{"role": "user", "content": "Sure?"}])

    notes = Notes()
    notes.asked(TurnPlace(0, 0), [])
    asyncio.run(talk())
    roles = [[message["role"] for message in prompt.messages] for prompt in notes.prompts]
    assert roles == [["system", "user", "assistant", "user"], ["user"]]


@pytest.mark.parametrize(
    ("action", "pattern", "text"),
    [
        ("Up", r"<answer>(.*?)</answer>", "<answer>Up</answer>"),
        ("<answer>Up</answer>", r"<answer>(.*?)</answer>", "<answer>Up</answer>"),
        ("Up", r"<think>(.*?)</think>\s*<answer>(.*?)</answer>", "<think></think><answer>Up</answer>"),
        ("Up", None, "Up"),
        ("Up", "(Up|Down)", "Up"),
        ("Left", "(Up|Down)", None),
    ],
)
def test_actions_are_written_so_that_the_pattern_reads_them(action, pattern, text):
    assert as_answer(action, pattern) == text
    assert person(iter([action]).__next__, pattern)() == (text or action)


def test_the_task_has_a_readable_name(tiny_model, tokens):
    _, result, _ = played(config_of(tiny_model), Choices("scripted", split="val", seed=7, **tokens))
    assert result.trajectory.task == Task(id="val/Lake/seed-7", tag="Lake", split="val", seed=7)
    assert re.fullmatch(r"[0-9a-f]{16}:\d+", str(result.trajectory.turns[0].state_key))
