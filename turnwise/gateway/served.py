"""A served model: one session for all clients, with a tree for each conversation. A tree is forgotten when
nobody has asked for it for an hour, or when all trees take too much memory."""

import asyncio
import hmac
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from turnwise.chat.message_content import num_characters_of
from turnwise.chat.message_keys import canonical, read_history, read_tools
from turnwise.chat.tree import ConversationTree
from turnwise.errors import RequestError
from turnwise.gateway.dialect import GatewayError, ModelRequest
from turnwise.gateway.rules import Notices, SessionRules
from turnwise.gateway.sessions import Answered, EpisodeSession, as_gateway_error, num_prompt_tokens
from turnwise.runtime.console import printable

MAX_IDLE_S = 3600.0
"""Seconds after its last request in which a conversation is remembered."""
MAX_BYTES = 10**9
"""Maximum bytes of all trees."""
_BYTES_PER_TOKEN = 32
"""A token of a turn: its id in the turn and in the ledger, its log-prob, its text."""
_MAX_SHOWN = 80
RULES = SessionRules(
    {"*": "untrained"}, max_requests=1024, max_choices=128, is_strict=False, takes_temperature=True
)
"""Every name of a model means the served one."""

OpenTree = Callable[[str], ConversationTree]
"""Opens a tree with this name."""


@dataclass(eq=False)
class _Conversation:
    """A tree with what is known of its use."""

    session: EpisodeSession
    used_at: float
    num_bytes: int = 0
    num_open: int = 0
    """Number of requests that are being answered or written."""


class _Open(NamedTuple):
    """An answer that is being written."""

    conversation: _Conversation
    model: str


class ServedModel:
    """The session of all clients, and the finder of it. `name` is the model's in `/v1/models`. `show` gets a
    line for each answer and each refusal; `clock` is in seconds."""

    def __init__(
        self,
        name: str,
        key: str,
        open_tree: OpenTree,
        show: Callable[[str], None],
        *,
        rules: SessionRules = RULES,
        max_idle_s: float = MAX_IDLE_S,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.models: Sequence[str] = (name,)
        self.num_answers = 0
        self.fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the error after which the server can't go on."""
        self._key = key
        self._open_tree = open_tree
        self._show = show
        self._max_idle_s = max_idle_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._rules = rules
        self._notices = Notices()
        self._conversations: OrderedDict[str, _Conversation] = OrderedDict()
        self._being_written: dict[str, _Open] = {}
        self._num_trees = 0
        self._counter = open_tree("counter")

    def find(self, key: str) -> "ServedModel":
        if not hmac.compare_digest(key.encode(errors="replace"), self._key.encode(errors="replace")):
            raise GatewayError("this isn't the server's key; `--api-key` sets it", "invalid_api_key")
        return self

    async def answer(self, request: ModelRequest, is_retry: bool) -> Answered:
        await self.forget()
        conversation = self._conversation_of(request)
        conversation.num_open += 1
        answered = None
        try:
            answered = await conversation.session.answer(request, is_retry)
        finally:
            if answered is None:  # the request failed, or its client was lost
                conversation.num_open -= 1
        self.num_answers += 1
        answered = answered._replace(name=f"{self.num_answers}")
        for answer in answered.answers:
            # Nothing is trained here, and these would take more memory than all else.
            answer.turn.kept_ids = None
            answer.turn.kept_offsets = None
        self._being_written[answered.name] = _Open(conversation, request.model)
        for choice in answered.choices:
            usage = choice.usage
            num_new = usage.prompt - usage.reused + usage.response
            conversation.num_bytes += num_new * _BYTES_PER_TOKEN
        return answered

    def deliver(self, answered: Answered) -> None:
        conversation, model = self._end_of(answered)
        conversation.session.deliver(answered)
        self._show(_line(model, answered, answered.choices[0].finish_reason))

    def drop(self, answered: Answered) -> None:
        conversation, model = self._end_of(answered)
        conversation.session.drop(answered)
        self._show(_line(model, answered, "lost client"))

    def num_prompt_tokens(self, request: ModelRequest) -> int:
        return num_prompt_tokens(self._counter, request)

    def note_refusal(self, error: GatewayError) -> None:
        self._show(f"{_now()}  refused ({error.status}): {error}")

    async def forget(self) -> None:
        """Forgets conversations that nobody has asked for in an hour, and as many others, longest unused
        first, as take more memory than all may take. Those with a running request are kept."""
        oldest = self._clock() - self._max_idle_s
        num_bytes = sum(conversation.num_bytes for conversation in self._conversations.values())
        for opening, conversation in list(self._conversations.items()):
            is_idle = conversation.num_open == 0 and conversation.session.tree.num_running == 0
            is_too_much = num_bytes > self._max_bytes
            # Another request may have forgotten it while the session of one before it ended.
            is_known = self._conversations.get(opening) is conversation
            if is_known and is_idle and (is_too_much or conversation.used_at < oldest):
                num_bytes -= conversation.num_bytes
                del self._conversations[opening]
                await conversation.session.end()

    async def close(self) -> None:
        """Ends all conversations: requests that run are aborted."""
        self.fault.cancel()
        while self._conversations:
            _, conversation = self._conversations.popitem()
            await conversation.session.end()

    def _conversation_of(self, request: ModelRequest) -> _Conversation:
        """The conversation with this request's tools and first messages, up to a user's."""
        opening = _opening(request)
        conversation = self._conversations.get(opening)
        if conversation is None:
            self._num_trees += 1
            name = f"conversation {self._num_trees}"
            session = EpisodeSession(
                self._key,
                name,
                self._open_tree(name),
                self._rules,
                self._notices,
            )
            session.fault.add_done_callback(self._note_fault)
            conversation = _Conversation(session, self._clock())
            self._conversations[opening] = conversation
        conversation.used_at = self._clock()
        conversation.num_bytes += num_characters_of(request.messages) + len(opening)
        self._conversations.move_to_end(opening)
        return conversation

    def _note_fault(self, fault: "asyncio.Future[None]") -> None:
        if fault.cancelled() or self.fault.done():
            return
        error = fault.exception()
        if error is not None:
            self.fault.set_exception(error)

    def _end_of(self, answered: Answered) -> _Open:
        entry = self._being_written.pop(answered.name)
        entry.conversation.num_open -= 1
        return entry


def _opening(request: ModelRequest) -> str:
    """What tells conversations apart. Raises GatewayError if the request can't be read."""
    try:
        keys = read_history(request.messages).keys
        tools = canonical(read_tools(request.tools), "tools")
    except RequestError as fault:
        raise as_gateway_error(fault) from fault
    first_user = next((number for number, key in enumerate(keys) if key.role == "user"), len(keys) - 1)
    texts = [f"{key.role}: {key.text}" for key in keys[: first_user + 1]]
    return "\n".join([tools, *texts])


def _line(model: str, answered: Answered, end: str) -> str:
    usages = [choice.usage for choice in answered.choices]
    num_response = sum(usage.response for usage in usages)
    seconds = max((answer.turn.generate_s for answer in answered.answers), default=0.0)
    speed = ""
    if seconds > 0:
        speed = f"{num_response / seconds:,.1f} tokens/s  "
    prompt = f"in {usages[0].prompt:,} (reused {usages[0].reused:,})"
    return f"{_now()}  {_name_shown(model)}  {prompt}  out {num_response:,}  {speed}{end}"


def _name_shown(model: str) -> str:
    """The name that a client gave the model, for a terminal."""
    return printable(model.replace("\n", " "))[:_MAX_SHOWN]


def _now() -> str:
    return time.strftime("%H:%M:%S")
