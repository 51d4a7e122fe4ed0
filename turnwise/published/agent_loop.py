"""Agent loops in the published form: `run(sampling_params, **row)` asks for responses to token ids, and
writes down which ids of its context were sampled. Source: verl,
`verl/experimental/agent_loop/agent_loop.py`, versions 0.5 to 0.7 and 0.10."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from turnwise.chat.template import ChatTemplate
from turnwise.chat.token_requests import TokenRequests
from turnwise.errors import NotAvailableError
from turnwise.types import CallOptions, Message

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class AgentLoopMetrics:
    """Seconds of an episode, as the loop measured them."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


@dataclass(kw_only=True)
class AgentLoopOutput:
    """What an agent loop returns of an episode, or of one of its contexts.

    `response_ids` [R] are all ids after the prompt, and `response_mask` [R] is 1 where the model sampled
    them. Log-probs and policy versions of what the server sampled are the server's; `response_logprobs` [R]
    count for other ids. Ids of mask 1 that no server sampled, and that have no log-probs, are context."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    response_mask: Sequence[int]
    response_logprobs: Sequence[float] | None = None
    routed_experts: Any = None
    multi_modal_data: Mapping[str, Any] | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None
    reward_score: float | None = None
    """A reward of the episode, beside those of the run."""
    num_turns: int = 0
    metrics: AgentLoopMetrics | Mapping[str, Any] | None = None
    extra_fields: Mapping[str, Any] = field(default_factory=dict)
    """Numbers in it become metrics of the episode."""


class TokenOutput(list[int]):
    """The ids of a response, and beside them what the server says of it. Loops of version 0.5 read it as a
    list of ids."""

    def __init__(self, token_ids: Sequence[int], log_probs: Sequence[float], stop_reason: str) -> None:
        super().__init__(token_ids)
        self.log_probs: list[float] | None = list(log_probs)
        self.stop_reason = stop_reason
        """`stop` or `length`."""
        self.routed_experts = None
        self.num_preempted: int | None = None
        self.extra_fields: dict[str, Any] = {}

    @property
    def token_ids(self) -> list[int]:
        return list(self)


class ServerClient:
    """The `server_manager` of an agent loop: samples responses to token ids, and keeps what it sampled."""

    def __init__(self, requests: TokenRequests, max_new_tokens: int) -> None:
        self._requests = requests
        self._max_new_tokens = max_new_tokens

    @property
    def template(self) -> ChatTemplate:
        """The policy's chat template."""
        return self._requests.template

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        **kwargs: Any,
    ) -> TokenOutput:
        """Samples a response. Of `sampling_params`, `temperature`, `max_tokens` (or `max_new_tokens`) and
        `stop` count; all others are the run's."""
        _require_text(image_data, video_data)
        max_tokens = sampling_params.get("max_tokens") or sampling_params.get("max_new_tokens")
        stop = sampling_params.get("stop")
        if isinstance(stop, str):
            stop = [stop]
        options = CallOptions(
            max_new_tokens=min(int(max_tokens or self._max_new_tokens), self._max_new_tokens),
            temperature=sampling_params.get("temperature"),
            stop=tuple(stop) if stop else None,
        )
        completion = await self._requests.generate(prompt_ids, options, request_id)
        return TokenOutput(
            completion.token_ids.tolist(), list(map(float, completion.logprobs)), completion.finish_reason
        )


@dataclass(frozen=True)
class DictConfigWrap:
    """A config that a constructor gets as an object."""

    config: Any


class AgentLoopBase(ABC):
    """The base of users' agent loops in the published form. One is made an episode."""

    _class_initialized: ClassVar[bool] = False

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any = None, **kwargs: Any) -> None:
        """Called once, before the first loop of the class is made."""
        cls._class_initialized = True

    def __init__(
        self,
        trainer_config: DictConfigWrap,
        server_manager: ServerClient,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: DictConfigWrap | None = None,
        hf_model_type: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.data_config = self.config.data
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.loop = asyncio.get_running_loop()

    @abstractmethod
    async def run(
        self, sampling_params: dict[str, Any], **kwargs: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Plays a row. `sampling_params` has `temperature`, `top_p`, `top_k`, `repetition_penalty` and
        `logprobs`. The keyword arguments are the columns of the row, and `raw_prompt`, its messages."""

    async def apply_chat_template(
        self,
        messages: list[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """The ids of a whole prompt; with `remove_system_prompt`, the ids that follow a response: what ends
        its turn, the new messages, and the beginning of the next response."""
        _require_text(images, videos)
        template = self.server_manager.template
        if not remove_system_prompt:
            return template.start(messages, tools or ())
        ended = [template.stop_token_ids[0]]
        return template.without_special_tokens.extend(ended, messages, tools or ())

    async def ct_build_initial_tokens(
        self,
        messages: list[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Any = None,
        videos: Any = None,
        audios: Any = None,
    ) -> list[int]:
        """The ids of a whole prompt."""
        return await self.apply_chat_template(messages, tools, images, videos or audios)

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: Sequence[int],
        assistant_token_ids: Sequence[int],
        response_mask: Sequence[int],
        response_logprobs: Sequence[float] | None = None,
        assistant_logprobs: Sequence[float] | None = None,
    ) -> tuple["MergeResult", list[int], list[float] | None]:
        """The context with a sampled response, its mask and its log-probs."""
        merged = MergeResult([*runtime_token_ids, *assistant_token_ids], len(assistant_token_ids))
        logprobs = None
        if response_logprobs is not None and assistant_logprobs is not None:
            logprobs = [*response_logprobs, *assistant_logprobs]
        return merged, [*response_mask, *[1] * len(assistant_token_ids)], logprobs

    async def ct_merge_non_assistant_msg(
        self,
        previous_messages: Sequence[Message],
        updated_messages: Sequence[Message],
        runtime_token_ids: Sequence[int],
        response_mask: Sequence[int],
        response_logprobs: Sequence[float] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple["MergeResult", list[int], list[float] | None]:
        """The context with the messages that are new in `updated_messages`, its mask and its log-probs."""
        new_messages = list(updated_messages[len(previous_messages) :])
        length = 0
        while length < len(response_mask) and response_mask[-1 - length]:
            length += 1
        response_ids = list(runtime_token_ids)[len(runtime_token_ids) - length :]
        template = self.server_manager.template.without_special_tokens
        added = template.extend(response_ids, new_messages, tools or ())
        logprobs = None
        if response_logprobs is not None:
            logprobs = [*response_logprobs, *[0.0] * len(added)]
        merged = MergeResult([*runtime_token_ids, *added], len(added))
        return merged, [*response_mask, *[0] * len(added)], logprobs


@dataclass
class MergeResult:
    """The ids of a context to which some were added."""

    token_ids: list[int]
    appended_token_count: int


def _require_text(*media: Any) -> None:
    """Raises NotAvailableError if there are images or videos."""
    if any(media):
        raise NotAvailableError("images and videos in a published agent loop aren't supported yet")


class AgentLoopManager:
    """The published name of what plays a batch with agent loops; here a run plays by itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def generate_sequences(self, prompts: Any) -> Any:
        raise NotAvailableError(
            "AgentLoopManager.generate_sequences isn't for calling here: a run plays its rows by itself. "
            "`turnwise rollout CONFIG --out rollouts.jsonl` plays and writes them without training"
        )


def register(name: str) -> Callable[[C], C]:
    """Marks a class as the agent loop `name`. Rows find it by its entry `{name, _target_}` in the file
    `agent.agent_config_path`."""

    def named(loop: C) -> C:
        return loop

    return named


def rollout_trace_op(function: F) -> F:
    """The method itself: calls of the model and of tools are traced wherever they are made
    (`trace.backend`)."""
    return function


@contextmanager
def simple_timer(name: str, seconds: MutableMapping[str, float]) -> Iterator[None]:
    """Adds the seconds of its body to `seconds[name]`."""
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
