"""Mode `step`: each turn has its own prompt, in its own context, which ends with the response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from turnwise.agents.env_agent import EnvAgent, EnvAgentSettings
from turnwise.agents.prompts import EnvPrompt
from turnwise.batching.samples import build_samples
from turnwise.chat.contexts import TokenContexts
from turnwise.chat.demonstration import encode_demonstration
from turnwise.chat.template import ChatTemplate
from turnwise.envs.frozen_lake.env import FrozenLakeEnv
from turnwise.envs.players import ExpertPlayer, Player
from turnwise.errors import ConfigError, RolloutError
from turnwise.play.demonstrations import demonstrations
from turnwise.protocols import Env
from turnwise.spec import DEFAULT_STEP_TEMPLATE, STEP_PLACEHOLDERS
from turnwise.testing.fakes import ScriptedServer, SeenRequest, byte_tokenizer
from turnwise.types import Observation, SamplingParams, Task, Turn

TASK = Task(id="train/Lake/0", tag="Lake", split="train", seed=7)
SAMPLING = SamplingParams(max_new_tokens=64, seed=3)
TEMPLATE = ChatTemplate(byte_tokenizer())
STEP: dict[str, Any] = {"mode": "step", "turn_template": DEFAULT_STEP_TEMPLATE}


def lake(task: Task) -> FrozenLakeEnv:
    return FrozenLakeEnv(
        map_rows=["SFF", "FHF", "FFG"], is_slippery=False, observation="coordinates", env_instruction="Walk."
    )


def answers(*actions: str) -> list[str]:
    return [f"<answer>{action}</answer>" for action in actions]


class Played:
    """An episode over TokenContexts, and the requests that the server got."""

    def __init__(
        self,
        texts: Iterable[str],
        make_env: Callable[[Task], Env] = lake,
        max_length: int = 4096,
        **settings: Any,
    ) -> None:
        responses = [TEMPLATE.respond(text) for text in texts]
        self.num_released: list[int] = []

        def respond(request: SeenRequest) -> list[int]:
            self.num_released.append(len(self.server.released))
            return responses[len(self.num_released) - 1]

        self.server = ScriptedServer(respond)
        self.contexts = TokenContexts(TEMPLATE, self.server, max_length, "episode")
        agent = EnvAgent(make_env, EnvAgentSettings(tag="Lake", **(STEP | settings)))
        [self.trajectory] = asyncio.run(agent.run(TASK, 2, self.contexts, SAMPLING))
        self.contexts.verify()

    @property
    def prompts(self) -> list[str]:
        return [TEMPLATE.tokenizer.decode(request.prompt_ids) for request in self.server.requests]


def test_every_turn_has_system_message_rules_and_the_last_turns_before_it() -> None:
    template = "{step_count}/{history_length}/{current_step}\n{history}\n=> {current_observation}"
    texts = [*answers("Right"), "hm", *answers("Down", "Down")]
    played = Played(texts, system_template="Be brief.", turn_template=template, history_length=2)
    users = [
        prompt.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0] for prompt in played.prompts
    ]
    assert all(prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>") for prompt in played.prompts)
    start, right = (f"P{at} G2,2 O1,1" for at in ("0,0", "0,1"))
    unread = "No action could be read from the answer."
    assert users == [
        f"Walk.\n0/0/1\n\n=> {start}",
        f"Walk.\n1/1/2\nStep 1:\n{start}\nAction: Right\n=> {right}",
        f"Walk.\n2/2/3\nStep 1:\n{start}\nAction: Right\nStep 2:\n{right}\n{unread}\n=> {right}",
    ]
    assert (played.trajectory.status, played.trajectory.score) == ("finished", 0.0)


def test_each_turn_is_a_context_with_a_seed_and_a_sample_of_its_own_that_servers_may_forget_at_once() -> None:
    played = Played(answers("Right", "Right", "Down"), max_steps=3)
    trajectory, requests = played.trajectory, played.server.requests
    assert [turn.starts_context for turn in trajectory.turns] == [True] * 3
    assert (
        len({request.request_id for request in requests})
        == len({request.sampling.seed for request in requests})
        == 3
    )
    assert played.num_released == [0, 1, 2], "nothing is kept for the steps before"
    samples = build_samples(trajectory)
    for index, (sample, request, turn) in enumerate(zip(samples, requests, trajectory.turns, strict=True)):
        assert sample.token_ids.tolist() == [*request.prompt_ids, *turn.response_ids]
        assert [span.turn for span in sample.turn_spans] == [index]
        np.testing.assert_array_equal(np.flatnonzero(sample.response_mask) >= len(request.prompt_ids), True)
    asyncio.run(played.contexts.close())
    assert sorted(played.server.released) == sorted(request.request_id for request in requests), "each once"


def test_the_states_of_a_step_are_those_before_its_action() -> None:
    played = Played(answers("Right", "Right"), max_steps=2)
    assert [str(turn.state_key).split(":")[1] for turn in played.trajectory.turns] == ["0", "1"]


def test_history_0_shows_none_and_unset_shows_all() -> None:
    for history_length, num_shown in ((0, 0), (1, 1), (None, 3), (9, 3)):
        played = Played(
            answers("Up", "Up", "Up", "Up"),
            max_steps=4,
            turn_template="{history}",
            history_length=history_length,
        )
        assert played.prompts[-1].count("Action: Up") == num_shown


def test_a_later_prompt_without_room_cuts_the_episode_and_a_first_one_fails_it() -> None:
    long = len(Played(answers("Up"), max_steps=1).server.requests[0].prompt_ids)
    played = Played(answers("Up", "Up", "Up", "Up"), max_length=long + 50)
    trajectory = played.trajectory
    assert (trajectory.status, trajectory.limit, trajectory.bootstraps) == (
        "truncated",
        "sequence_length",
        False,
    )
    assert 1 <= len(trajectory.turns) < 4 and len(played.server.requests) == len(trajectory.turns)
    with pytest.raises(RolloutError, match=r"the first prompt of 'episode/0'.*raise sequence_length"):
        Played(answers("Up"), max_length=long)


def test_what_a_demonstration_shows_is_what_the_agent_sees() -> None:
    settings = EnvAgentSettings("Lake", system_template="Be brief.", history_length=1, **STEP)

    def player(env: Any, task: Task) -> Player:
        return ExpertPlayer(env)

    rows = list(demonstrations(lake, settings, player, [TASK]))
    assert [[message["role"] for message in row] for row in rows] == [["system", "user", "assistant"]] * 4
    said = [row[-1]["content"] for row in rows]
    played = Played(said, system_template="Be brief.", history_length=1)
    assert played.trajectory.score == 1.0
    for sample, row in zip(build_samples(played.trajectory), rows, strict=True):
        demonstration = encode_demonstration(TEMPLATE, row)
        np.testing.assert_array_equal(sample.token_ids, demonstration.token_ids)
        np.testing.assert_array_equal(sample.response_mask, demonstration.response_mask)


def test_the_default_template_shows_every_placeholder_but_the_rules() -> None:
    turns = [Turn([], [], [], observation="_ P G", action="Left")]
    prompt = EnvPrompt("", DEFAULT_STEP_TEMPLATE, "step")
    [user] = prompt.messages(
        Observation("P _ G"),
        turn_idx=2,
        actions_left=3,
        max_response_length=9,
        suffix="Hurry. ",
        earlier=turns,
    )
    text = str(user["content"])
    assert (
        "(1 of 1)" in text
        and "Step 1:\n_ P G\nAction: Left\n\nStep 2:\nP _ G\nHurry. You have 3 actions left" in text
    )
    assert all(f"{{{name}}}" in DEFAULT_STEP_TEMPLATE for name in STEP_PLACEHOLDERS)


def test_unknown_placeholders_are_refused_with_those_of_the_mode() -> None:
    with pytest.raises(ConfigError, match=r"current_observation.*Did you mean 'history'"):
        EnvPrompt("", "{histoy}", "step")


def test_what_was_seen_is_never_read_as_a_template() -> None:
    turns = [Turn([], [], [], observation="{history} {0}", action="}{")]
    [user] = EnvPrompt("", "{history}", "step").messages(
        Observation(""), turn_idx=2, actions_left=1, max_response_length=1, earlier=turns
    )
    assert user["content"] == "Step 1:\n{history} {0}\nAction: }{"


def test_trajectory_mode_keeps_its_one_context() -> None:
    played = Played(answers("Right", "Down"), mode="trajectory", turn_template="{observation}", max_steps=2)
    assert [turn.starts_context for turn in played.trajectory.turns] == [True, False]
    assert (
        len({request.request_id for request in played.server.requests}) == 1 and played.server.released == []
    )
