"""The episodes that clients talk to, each by its own key: what the run grants of a client's wishes, limits,
and counts."""

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from turnwise.chat.message_content import num_characters_of
from turnwise.chat.message_keys import read_history, read_tools
from turnwise.chat.sampler import NoRoom
from turnwise.chat.template import ChatTemplate
from turnwise.chat.tree import Answer, ConversationTree
from turnwise.errors import ChatTemplateError, ConfigError, DeadlineError, ReplicasDeadError, RequestError
from turnwise.gateway.dialect import Choice, GatewayError, ModelRequest, TokenLogprob
from turnwise.gateway.rules import Notices, SessionRules
from turnwise.model_files.token_pieces import bytes_of_piece
from turnwise.types import Turn

logger = logging.getLogger(__name__)

_KEY_BYTES = 16
_MAX_ENDED = 100_000
_REASONS = ("first", "tools", "changed", "template", "repeat")
_METRICS = (
    *(f"gateway/contexts/{reason}" for reason in _REASONS),
    *(f"gateway/{name}" for name in ("requests", "delivered", "undelivered", "replayed", "lost")),
    *(f"gateway/{name}" for name in ("ignored", "unenforced", "refused")),
)
"""The metrics that every episode has."""


class Answered(NamedTuple):
    """The answers to one request. They count once they are given to `Session.deliver`."""

    choices: Sequence[Choice]
    answers: Sequence[Answer]
    name: str
    """Made of the first answer; unique in its session."""


class Session(Protocol):
    """What a key stands for: an episode, or everything that a served model was asked."""

    @property
    def models(self) -> Sequence[str]:
        """The names that `/v1/models` lists."""

    async def answer(self, request: ModelRequest, is_retry: bool) -> Answered:
        """Answers a request. `is_retry`: whether the client says that it sends it again. Raises
        GatewayError."""

    def deliver(self, answered: Answered) -> None:
        """Notes that the last byte of the answers was written."""

    def drop(self, answered: Answered) -> None:
        """Notes that the client was lost before that."""

    def num_prompt_tokens(self, request: ModelRequest) -> int:
        """Number of tokens of a request's prompt. It isn't answered. Raises GatewayError."""

    def note_refusal(self, error: GatewayError) -> None:
        """Notes that a request was refused or failed."""


class FindsSessions(Protocol):
    """Finds the session of a key."""

    def find(self, key: str) -> Session:
        """Raises GatewayError if no session has this key, or its session has ended."""


class EpisodeSession:
    """One episode's session, over its tree of conversations."""

    def __init__(
        self, key: str, label: str, tree: ConversationTree, rules: SessionRules, notices: Notices
    ) -> None:
        self.key = key
        self.label = label
        self.tree = tree
        self.counts: Counter[str] = Counter()
        """Numbers of answers delivered and lost, of ignored and unenforced fields, and of refused
        requests."""
        self.last_delivered: int | None = None
        """Index of the turn that was delivered last."""
        self.limit_error: GatewayError | None = None
        """The newest error, if it was a limit of the episode."""
        self.fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the error that ends the whole run, if a request meets one."""
        self._rules = rules
        self._notices = notices
        self._num_requests = 0
        self._num_choices = 0
        self._num_prompt_tokens = 0
        self._num_reused = 0
        self._is_ended = False

    @property
    def models(self) -> Sequence[str]:
        return self._rules.names

    @property
    def _num_lost(self) -> int:
        """Number of answers that are sampled for clients that were lost."""
        return max(self.tree.num_running - self._num_choices, 0)

    async def answer(self, request: ModelRequest, is_retry: bool) -> Answered:
        self._check_open()
        is_trained = self._rules.is_trained(request.model)
        request = self._granted(request)
        if self._num_requests + self._num_lost >= self._rules.max_requests:
            raise GatewayError(
                f"{self.label} has {self._rules.max_requests} requests at once; gateway.max_requests allows "
                "no more: wait for one of them",
                "rate_limited",
                headers={"Retry-After": "1"},
            )
        self._num_requests += 1
        self._num_choices += request.num_choices
        try:
            answers = await self._answers(request, is_retry, is_trained)
        finally:
            self._num_requests -= 1
            self._num_choices -= request.num_choices
        self.limit_error = None
        choices = [self._choice(answer, request.has_logprobs) for answer in answers]
        return Answered(choices, answers, f"turn-{answers[0].node}")

    def deliver(self, answered: Answered) -> None:
        for answer in answered.answers:
            self.tree.deliver(answer)
            self.last_delivered = answer.node
        self.counts["delivered"] += len(answered.answers)
        for choice in answered.choices:
            self._num_prompt_tokens += choice.usage.prompt
            self._num_reused += choice.usage.reused

    def drop(self, answered: Answered) -> None:
        for answer in answered.answers:
            self.tree.drop(answer)
        self.counts["lost"] += len(answered.answers)

    def num_prompt_tokens(self, request: ModelRequest) -> int:
        self._check_open()
        self._rules.is_trained(request.model)
        return num_prompt_tokens(self.tree, request)

    def note_refusal(self, error: GatewayError) -> None:
        self.counts["refused"] += 1
        self._notices.say(
            f"{error.code} {error.param}",
            "%s: a request was refused (%d): %s",
            self.label,
            error.status,
            error,
        )

    def metrics(self) -> dict[str, float]:
        """The counts of the session and its tree, by the names of metrics, and the share of prompt tokens
        that no earlier response of their context had."""
        counts = Counter({f"gateway/{name}": count for name, count in self.tree.counts.items()})
        for name, count in self.counts.items():
            kind = name.partition("/")[0]
            counts[f"gateway/{kind}"] += count
        metrics = {name: float(counts[name]) for name in (*_METRICS, *counts)}
        if self._num_prompt_tokens:
            num_new = self._num_prompt_tokens - self._num_reused
            metrics["gateway/new_prompt_tokens"] = num_new / self._num_prompt_tokens
        return metrics

    async def end(self) -> None:
        """Ends the session: requests that run are aborted, and new ones are told that it has ended."""
        self._is_ended = True
        self.fault.cancel()
        await self.tree.close()

    async def _answers(self, request: ModelRequest, is_retry: bool, is_trained: bool) -> list[Answer]:
        asking = [
            asyncio.ensure_future(
                self.tree.answer(
                    request.messages,
                    request.options,
                    request.tools,
                    is_retry=is_retry,
                    is_trained=is_trained,
                    choice=choice,
                )
            )
            for choice in range(request.num_choices)
        ]
        answers: list[Answer] = []
        try:
            answers += await asyncio.gather(*asking)
            return answers
        except RequestError as fault:
            error = as_gateway_error(fault)
            if error.code in ("context_length_exceeded", "turn_limit"):
                self.limit_error = error
            raise error from fault
        except (ConfigError, DeadlineError, ReplicasDeadError) as fault:
            # The client's error wouldn't end the run.
            if not self.fault.done():
                self.fault.set_exception(fault)
            raise
        finally:
            if not answers:
                await self._drop_all(asking)

    async def _drop_all(self, asking: Sequence["asyncio.Future[Answer]"]) -> None:
        """Drops the answers that have come, since another one of the request failed, or its client is
        lost."""
        for task in asking:
            task.cancel()
        for result in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(result, Answer):
                self.tree.drop(result)

    def _check_open(self) -> None:
        if self._is_ended:
            raise ended_error()

    def _granted(self, request: ModelRequest) -> ModelRequest:
        """The request with what the run grants of it. Says once a run what is left out, and counts it."""
        if request.num_choices > self._rules.max_choices:
            raise GatewayError(
                f"`n` is {request.num_choices}; gateway.max_n allows {self._rules.max_choices}", param="n"
            )
        if request.unenforced and self._rules.is_strict:
            raise GatewayError(
                f"{request.unenforced[0]} can't be enforced, and gateway.strict refuses what can't be",
                param=request.unenforced[0].split()[0],
            )
        ignored = list(request.ignored)
        if request.options.temperature is not None and not self._rules.takes_temperature:
            ignored.append("temperature")
            request = replace(request, options=replace(request.options, temperature=None))
        for name in ignored:
            self._note(f"ignored/{name}", "the client's %s is ignored: sampling is the run's", name)
        for name in request.unenforced:
            self._note(f"unenforced/{name}", "%s can't be enforced: requests are served without it", name)
        for name in request.removed:
            self._note(f"removed/{name}", "%s changes with each request: it is cut from the prompt", name)
        return request

    def _note(self, kind: str, sentence: str, name: str) -> None:
        self.counts[kind] += 1
        self._notices.say(kind, sentence, name)

    def _choice(self, answer: Answer, has_logprobs: bool) -> Choice:
        logprobs = None
        if has_logprobs:
            logprobs = token_logprobs(self.tree, answer.turn)
        return Choice(answer.message, answer.finish_reason, answer.usage, logprobs)


class Sessions:
    """The sessions of the episodes that play, by key."""

    def __init__(self) -> None:
        self._notices = Notices()
        self._by_digest: dict[bytes, EpisodeSession] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()

    def open(self, tree: ConversationTree, rules: SessionRules, label: str) -> EpisodeSession:
        """Opens a session with a new random key. `label` names the episode, for messages."""
        key = secrets.token_hex(_KEY_BYTES)
        session = EpisodeSession(key, label, tree, rules, self._notices)
        self._by_digest[_digest(key)] = session
        return session

    async def end(self, session: EpisodeSession) -> None:
        """Ends a session. Its key is remembered, so that late clients are told."""
        digest = _digest(session.key)
        if self._by_digest.pop(digest, None) is None:
            return
        self._ended[digest] = None
        while len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
        await session.end()

    def find(self, key: str) -> EpisodeSession:
        # Keys are looked up by their digest, so that the time of a look-up says nothing about a key.
        digest = _digest(key)
        session = self._by_digest.get(digest)
        if session is not None and hmac.compare_digest(session.key.encode(), key.encode()):
            return session
        if digest in self._ended:
            raise ended_error()
        raise GatewayError(
            "no session has this key: use the key that the episode was given, as `Authorization: Bearer`, "
            "`x-api-key`, or in the base URL",
            "invalid_api_key",
        )

    def __len__(self) -> int:
        return len(self._by_digest)


_NO_CHARACTER = "\ufffd"


def ended_error() -> GatewayError:
    """What a client is told whose session has ended."""
    return GatewayError("this session has ended: its episode takes no more requests", "session_ended")


def as_gateway_error(fault: RequestError) -> GatewayError:
    """The fault as a client gets it."""
    if isinstance(fault, GatewayError):
        return fault
    param = "messages"
    if str(fault).startswith("tools"):
        param = "tools"
    return GatewayError(str(fault), fault.code, param=param)


def num_prompt_tokens(tree: ConversationTree, request: ModelRequest) -> int:
    """Number of tokens of a prompt that starts a context. Raises GatewayError if it can't be rendered."""
    try:
        history = read_history(request.messages)
        num_characters = num_characters_of(request.messages)
        # Encoding takes minutes for megabytes, and everybody would wait.
        if num_characters > tree.template.max_characters(tree.max_length):
            raise NoRoom(num_characters, None).refusal(tree.max_length)
        token_ids = tree.template.start(history.messages(), read_tools(request.tools))
    except RequestError as fault:
        raise as_gateway_error(fault) from fault
    except ChatTemplateError as fault:
        raise GatewayError(str(fault), param="messages") from fault
    return len(token_ids)


def token_logprobs(tree: ConversationTree, turn: Turn) -> tuple[TokenLogprob, ...]:
    """The sampled tokens of a turn with their log-probs, without a stop token at its end."""
    token_ids = turn.response_ids.tolist()
    stop_token_ids = turn.sampling.stop_token_ids if turn.sampling else ()
    if token_ids and token_ids[-1] in stop_token_ids:
        token_ids.pop()
    return tuple(
        _token_logprob(tree.template, token_id, logprob)
        for token_id, logprob in zip(token_ids, turn.logprobs.tolist(), strict=False)
    )


def _token_logprob(template: ChatTemplate, token_id: int, logprob: float) -> TokenLogprob:
    text = template.decode([token_id], skips_turn_tokens=False)
    content: bytes | None = text.encode()
    if _NO_CHARACTER in text:
        # A part of a character: its piece says the bytes that its text has lost.
        content = bytes_of_piece(template.tokenizer.convert_ids_to_tokens(token_id))
    return TokenLogprob(text, logprob, None if content is None else tuple(content))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()
