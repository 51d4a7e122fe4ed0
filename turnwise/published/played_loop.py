"""Plays a published agent loop as an agent of ours."""

import dataclasses
import inspect
import logging
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from turnwise.agents.single_turn_agent import RowAgentSettings
from turnwise.chat.contexts import opens_tokens
from turnwise.chat.token_requests import MaskedIds, TokenRequests
from turnwise.data.prompts import prompt_of
from turnwise.errors import EnvironmentFault, counted
from turnwise.protocols import OpenConversation
from turnwise.published.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    DictConfigWrap,
    ServerClient,
)
from turnwise.types import SamplingParams, Task, Trajectory

logger = logging.getLogger(__name__)


class PlayedLoop:
    """Plays rows with a loop of a class in the published form, made anew for each episode. `arguments` are
    those of its entry in `agent.agent_config_path`."""

    def __init__(
        self,
        loop_class: type[AgentLoopBase],
        arguments: Mapping[str, Any],
        settings: RowAgentSettings,
        published_config: Any,
        tokenizer: Any,
    ) -> None:
        self._class = loop_class
        self._arguments = arguments
        self._settings = settings
        self._config = published_config
        self._tokenizer = tokenizer
        self._has_warned = False

    async def run(
        self,
        task: Task,
        sibling: int,
        open_conversation: OpenConversation,
        sampling: SamplingParams,
    ) -> list[Trajectory]:
        """One trajectory, whose contexts are the outputs of the loop."""
        name = self._class.__name__
        requests = opens_tokens(open_conversation, name).open_tokens(sampling)
        loop = self._made(requests, sampling)
        outputs = await loop.run(_sampling_params(sampling), **self._row(task, sibling))
        if isinstance(outputs, AgentLoopOutput):
            outputs = [outputs]
        _check(outputs, name)
        turns, num_unsampled, cut_by = requests.turns_of([_context(output, name) for output in outputs])
        if num_unsampled and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s says of %s that they were sampled, but no server has sampled them and there are no "
                "log-probs: they are read as context, and not trained on",
                name,
                counted(num_unsampled, "token"),
            )
        if not turns:
            raise EnvironmentFault(
                f"{name} returned no response that the model sampled: `response_mask` is 1 where ids are "
                "those that server_manager.generate returned"
            )
        trajectory = Trajectory(task, sibling, turns, answer_turn=len(turns) - 1)
        trajectory.limit = cut_by
        if trajectory.limit is not None:
            trajectory.status = "truncated"
        rewards = [output.reward_score for output in outputs if output.reward_score is not None]
        if rewards:
            trajectory.outcome_rewards["reward_score"] = float(rewards[-1])
        for output in outputs:
            trajectory.metrics |= _metrics(output)
        return [trajectory]

    def _made(self, requests: TokenRequests, sampling: SamplingParams) -> AgentLoopBase:
        """The loop of an episode. Constructors of older versions lack some of the parameters."""
        max_new_tokens = min(self._settings.max_new_tokens, sampling.max_new_tokens)
        offered = {
            "trainer_config": DictConfigWrap(self._config),
            "server_manager": ServerClient(requests, max_new_tokens),
            "tokenizer": self._tokenizer,
            "processor": None,
            "dataset_cls": None,
            "data_config": DictConfigWrap(self._config.data),
        }
        parameters = inspect.signature(self._class).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            names = {parameter.name for parameter in parameters}
            offered = {key: value for key, value in offered.items() if key in names}
        return self._class(**offered, **self._arguments)

    def _row(self, task: Task, sibling: int) -> dict[str, Any]:
        """The columns of a row, and the names under which published loops find its prompt and itself."""
        row = {key: value for key, value in task.payload.items() if key != "agent_name"}
        extra = row.get("extra_info")
        extra = extra if isinstance(extra, Mapping) else {}
        row["raw_prompt"] = prompt_of(task.payload, self._settings.prompt_key)
        row.setdefault("index", extra.get("index", task.row))
        row.setdefault("tools_kwargs", extra.get("tools_kwargs") or {})
        row.setdefault("interaction_kwargs", extra.get("interaction_kwargs") or {})
        row.setdefault("extra_info", extra)
        row.setdefault("uid", task.id)
        row.setdefault("session_id", sibling)
        return row


def _sampling_params(sampling: SamplingParams) -> dict[str, Any]:
    return {
        "temperature": 0.0 if sampling.is_greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": True,
    }


def _check(outputs: Any, name: str) -> None:
    is_list = isinstance(outputs, Sequence) and not isinstance(outputs, str) and len(outputs) > 0
    if not is_list or not all(isinstance(output, AgentLoopOutput) for output in outputs):
        raise EnvironmentFault(
            f"{name}.run returned {str(outputs)[:80]!r}; it returns an AgentLoopOutput, or a list of them"
        )


def _context(output: AgentLoopOutput, name: str) -> MaskedIds:
    num_prompt = len(output.prompt_ids)
    num_response = len(output.response_ids)
    lengths = {"response_mask": output.response_mask, "response_logprobs": output.response_logprobs}
    for field, values in lengths.items():
        if values is not None and len(values) != num_response:
            raise EnvironmentFault(
                f"{name} returned {num_response} response_ids and {len(values)} entries of {field}"
            )
    logprobs = None
    if output.response_logprobs is not None:
        logprobs = [0.0] * num_prompt + list(output.response_logprobs)
    ids = [*output.prompt_ids, *output.response_ids]
    return MaskedIds(ids, [0] * num_prompt + list(output.response_mask), logprobs)


def _metrics(output: AgentLoopOutput) -> dict[str, float]:
    """What a loop has measured: a default says that it hasn't."""
    measured: Mapping[str, Any] = {}
    if isinstance(output.metrics, AgentLoopMetrics):
        defaults = dataclasses.asdict(AgentLoopMetrics())
        filled = dataclasses.asdict(output.metrics)
        measured = {key: value for key, value in filled.items() if value != defaults[key]}
    elif output.metrics:
        measured = output.metrics
    numbers = {**measured, **output.extra_fields}
    if output.num_turns:
        numbers["num_turns"] = output.num_turns
    return {key: float(value) for key, value in numbers.items() if isinstance(value, Real)}
