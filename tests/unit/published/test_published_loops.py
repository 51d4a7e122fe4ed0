"""Users' agent loops in the published form run unchanged: what they sample is trained on as it was
sampled."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_configs import config_of

from turnwise.agents.single_turn_agent import RowAgentSettings
from turnwise.assemble.published_settings import published_settings
from turnwise.batching.samples import build_samples
from turnwise.chat.contexts import TokenContexts
from turnwise.chat.template import ChatTemplate
from turnwise.errors import ConfigError, EnvironmentFault, NotAvailableError, RequestError
from turnwise.examine.agents import row_agent_class
from turnwise.published import (
    AgentLoopBase,
    AgentLoopManager,
    AgentLoopOutput,
    AsyncLLMServerManager,
    AsyncServer,
    ReactAgentLoop,
    RectAgentLoop,
    SingleTurnAgentLoop,
    ToolAgentLoop,
    register,
)
from turnwise.published.played_loop import PlayedLoop
from turnwise.runtime.entry_points import load_class
from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
from turnwise.types import SamplingParams, Task, Trajectory

TEMPLATE = ChatTemplate(byte_tokenizer())
TASK = Task(
    id="train/data/0", tag="data", split="train", seed=0, payload={"prompt": "go", "answer": 7}, row=3
)
CONFIG = published_settings(config_of(**{"agent.max_parallel_calls": 2}), "train")


def play(
    loop: type[AgentLoopBase],
    responses: Iterable[str],
    max_length: int = 256,
    cut: int = 64,
    **arguments: Any,
) -> Trajectory:
    server = ScriptedServer([TEMPLATE.respond(response) for response in responses])
    contexts = TokenContexts(TEMPLATE, server, max_length, "episode")
    settings = RowAgentSettings(max_new_tokens=cut)
    played = PlayedLoop(loop, arguments, settings, CONFIG, TEMPLATE.tokenizer)

    async def episode() -> list[Trajectory]:
        try:
            return await played.run(TASK, 1, contexts, SamplingParams(max_new_tokens=cut, seed=5))
        finally:
            contexts.verify()
            await contexts.close()

    [trajectory] = asyncio.run(episode())
    return trajectory


@register("two_turns")
class TwoTurns(AgentLoopBase):
    """Asks, adds a text, and asks again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.response_length = self.config.actor_rollout_ref.rollout.response_length

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        assert kwargs["answer"] == 7 and kwargs["index"] == 3
        assert sampling_params["temperature"] == 1.0
        prompt_ids = await self.loop.run_in_executor(
            None,
            lambda: self.tokenizer.apply_chat_template(
                kwargs["raw_prompt"], add_generation_prompt=True, tokenize=True, return_dict=False
            ),
        )
        first = await self.server_manager.generate(
            request_id="r", prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        added = self.tokenizer.encode("more", add_special_tokens=False)
        second = await self.server_manager.generate(
            request_id="r", prompt_ids=prompt_ids + first.token_ids + added, sampling_params=sampling_params
        )
        return self.output(prompt_ids, list(first), added, second.token_ids)

    def output(self, prompt_ids: list[int], first: list[int], added: list[int], second: list[int]) -> Any:
        response_ids = first + added + second
        mask = [1] * len(first) + [0] * len(added) + [1] * len(second)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids[: self.response_length],
            response_mask=mask[: self.response_length],
            num_turns=4,
            metrics={"tool_calls": 0.5},
        )


def test_what_the_server_sampled_is_trained_with_its_log_probs_and_versions() -> None:
    trajectory = play(TwoTurns, ["left", "right"])
    [sample] = build_samples(trajectory)
    assert [turn.text for turn in trajectory.turns] == ["left", "right"]
    assert [(turn.starts_context, turn.parent) for turn in trajectory.turns] == [(True, None), (False, 0)]
    assert sample.num_trained == sum(len(turn.response_ids) for turn in trajectory.turns)
    assert TEMPLATE.decode(sample.token_ids.tolist(), False).endswith("left<|im_end|>moreright<|im_end|>")
    assert all(turn.logprobs.all() and turn.versions for turn in trajectory.turns)
    assert trajectory.metrics["num_turns"] == 4 and trajectory.metrics["tool_calls"] == 0.5
    assert (trajectory.status, trajectory.answer_turn) == ("finished", 1)


class OfVersion05(TwoTurns):
    """The constructor of version 0.5, and a cut at the maximum."""

    def __init__(self, trainer_config: Any, server_manager: Any, tokenizer: Any) -> None:
        super().__init__(trainer_config, server_manager, tokenizer)
        self.response_length = 8


def test_a_cut_response_is_trained_as_far_as_it_is_written_down() -> None:
    trajectory = play(OfVersion05, ["left", "right"])
    assert [len(turn.response_ids) for turn in trajectory.turns] == [5]  # the cut falls into what was added
    OfVersion05.__init__.__defaults__ = None
    trajectory = play(Cut, ["left", "right"])
    assert [len(turn.response_ids) for turn in trajectory.turns] == [5, 2]
    assert trajectory.turns[1].finish_reason == "length"
    assert (trajectory.status, trajectory.limit) == ("truncated", "max_new_tokens")


class Cut(TwoTurns):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.response_length = 11


class MadeUp(TwoTurns):
    """Writes a text of its own down as sampled."""

    logprobs = False

    def output(self, prompt_ids: list[int], first: list[int], added: list[int], second: list[int]) -> Any:
        response_ids = first + added + second
        logprobs = [0.0] * len(first) + [-0.5] * len(added) + [0.0] * len(second)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            response_mask=[1] * len(response_ids),
            response_logprobs=logprobs if self.logprobs else None,
            reward_score=0.5,
        )


class MadeUpWithLogProbs(MadeUp):
    logprobs = True


def test_ids_that_nobody_sampled_are_context_unless_they_have_log_probs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trajectory = play(MadeUp, ["left", "right"])
    assert [turn.text for turn in trajectory.turns] == ["left"]
    assert "sampled" in caplog.text and trajectory.outcome_rewards == {"reward_score": 0.5}
    known = play(MadeUpWithLogProbs, ["left", "right"])
    assert known.turns[1].logprobs[0] == np.float32(-0.5)


class Branching(TwoTurns):
    """Two outputs that share the first response."""

    def output(self, prompt_ids: list[int], first: list[int], added: list[int], second: list[int]) -> Any:
        whole = super().output(prompt_ids, first, added, second)
        mask = [1] * len(first)
        return [AgentLoopOutput(prompt_ids=prompt_ids, response_ids=first, response_mask=mask), whole]


def test_outputs_that_share_a_response_train_it_once() -> None:
    trajectory = play(Branching, ["left", "right"])
    assert len(trajectory.turns) == 2 and trajectory.weight == 1.0
    assert sum(sample.num_trained for sample in build_samples(trajectory)) == 11


class Merging(AgentLoopBase):
    """Extends its context by the helpers of version 0.10, or of 0.7."""

    is_old = False

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        messages = kwargs["raw_prompt"]
        ids = prompt_ids = await self.ct_build_initial_tokens(messages)
        mask: list[int] = []
        for text in ("more", None):
            output = await self.server_manager.generate(
                request_id="r", prompt_ids=ids, sampling_params=sampling_params
            )
            merged, mask, _ = await self.ct_merge_assistant_token(ids, output.token_ids, mask)
            if text is None:
                break
            updated = [*messages, {"role": "user", "content": text}]
            if self.is_old:
                added = await self.apply_chat_template(updated[-1:], remove_system_prompt=True)
                ids, mask = merged.token_ids + added, mask + [0] * len(added)
            else:
                merged, mask, _ = await self.ct_merge_non_assistant_msg(
                    messages, updated, merged.token_ids, mask
                )
                ids = merged.token_ids
        response_ids = merged.token_ids[len(prompt_ids) :]
        return AgentLoopOutput(prompt_ids=prompt_ids, response_ids=response_ids, response_mask=mask)


class OldMerging(Merging):
    is_old = True


@pytest.mark.parametrize("loop", [Merging, OldMerging])
def test_contexts_are_extended_exactly(loop: type[AgentLoopBase]) -> None:
    [sample] = build_samples(play(loop, ["left", "right"]))
    user = "<|im_start|>user\n"
    assert TEMPLATE.decode(sample.token_ids.tolist(), False) == (
        f"{user}go<|im_end|>\n<|im_start|>assistant\nleft<|im_end|>\n{user}more<|im_end|>\n"
        "<|im_start|>assistant\nright<|im_end|>"
    )


class Wrong(TwoTurns):
    returned: Any = None

    def output(self, prompt_ids: list[int], first: list[int], added: list[int], second: list[int]) -> Any:
        return self.returned


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("left", "AgentLoopOutput"),
        ([], "AgentLoopOutput"),
        (AgentLoopOutput(prompt_ids=[1], response_ids=[1, 2], response_mask=[1]), "response_mask"),
        (AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[0]), "no response"),
    ],
)
def test_what_is_no_output_fails_the_episode(returned: Any, words: str) -> None:
    with pytest.raises(EnvironmentFault, match=words):
        play(type("Loop", (Wrong,), {"returned": returned}), ["left", "right"])


def test_a_prompt_without_room_is_refused() -> None:
    with pytest.raises(RequestError, match="sequence_length"):
        play(TwoTurns, ["left"], max_length=16)


def test_files_that_import_published_modules_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "published_loop.py").write_text(
        "from recipe.langgraph_agent.react_agent_loop import ReactAgentLoop\n"
        "from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register\n"
        "from verl.utils.profiler import simple_timer\n"
        "class MathLoop(ReactAgentLoop):\n"
        "    @classmethod\n"
        "    def init_class(cls, config, tokenizer, **kwargs):\n"
        "        cls.tools = [config.actor_rollout_ref.rollout.multi_turn.max_parallel_calls]\n"
        "        super().init_class(config, tokenizer)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    loop = load_class("published_loop:MathLoop", "the agent", ConfigError)
    assert issubclass(loop, ReactAgentLoop)
    loop.init_class(CONFIG, None)
    assert loop.tools == [2] and ReactAgentLoop.tools == ()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("recipe", "verl")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("verl")


def test_a_class_of_the_published_form_becomes_an_agent() -> None:
    kind = row_agent_class(config_of(), {}, f"{__name__}:TwoTurns") if __name__ in sys.modules else None
    if kind is not None:
        assert kind.offered == ("settings", "published_config", "tokenizer")


def test_published_names_are_ours_or_say_what_is() -> None:
    assert RectAgentLoop is ReactAgentLoop
    assert ToolAgentLoop.__name__ == "ToolAgent" and SingleTurnAgentLoop.__name__ == "SingleTurnAgent"
    assert AsyncLLMServerManager.__name__ == "LLMServerManager" and AsyncServer.__name__ == "InferenceServer"
    with pytest.raises(NotAvailableError, match="turnwise rollout"):
        AgentLoopManager(None).generate_sequences(None)


class OwnBudget(AgentLoopBase):
    """Samples with a maximum of its own."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        prompt_ids = await self.apply_chat_template([{"role": "user", "content": "go"}])
        parameters = {**sampling_params, "max_tokens": kwargs["answer"] * 1}
        output = await self.server_manager.generate("r", prompt_ids=prompt_ids, sampling_params=parameters)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
        )


@pytest.mark.parametrize(
    ("cut", "max_length", "num_tokens", "limit"),
    [(64, 256, 7, "max_new_tokens"), (5, 256, 5, "max_new_tokens")],
)
def test_a_loop_s_own_budget_is_held_and_named(
    cut: int, max_length: int, num_tokens: int, limit: str
) -> None:
    trajectory = play(OwnBudget, ["x" * 50], max_length, cut)
    assert len(trajectory.turns[0].response_ids) == num_tokens
    assert (trajectory.status, trajectory.limit) == ("truncated", limit)
    assert not {"num_preempted", "num_turns", "compute_score"} & trajectory.metrics.keys()


class AsksTwice(AgentLoopBase):
    """Samples the same prompt with a small budget and then with a large one, and keeps the second."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        prompt_ids = await self.apply_chat_template([{"role": "user", "content": "go"}])
        for budget in (2, 64):
            parameters = {**sampling_params, "max_tokens": budget}
            output = await self.server_manager.generate(
                "r", prompt_ids=prompt_ids, sampling_params=parameters
            )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
        )


def test_the_longest_of_two_samples_that_begin_alike_is_the_turn() -> None:
    [turn] = play(AsksTwice, ["abcdef", "abcdef"]).turns
    assert turn.text == "abcdef" and turn.finish_reason == "stop"
