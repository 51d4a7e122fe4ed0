"""Hand-written fakes: a tokenizer made in memory, and an inference server whose responses are given."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from turnwise.errors import ServerError
from turnwise.protocols import MemoryKind, Suspension, WeightSource
from turnwise.runtime.info import LoadedModel, ServerInfo
from turnwise.transfer.manifest import WeightManifest
from turnwise.types import Completion, FinishReason, Media, SamplingParams, VersionRun

CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(
    special_tokens: Sequence[str] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    chat_template: str | None = CHATML_TEMPLATE,
    *,
    eos_token: str | None = None,
    bos_token: str | None = None,
    training_texts: Iterable[str] = (),
    vocab_size: int = 512,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer. Ids 0-255 are the bytes, in the order of their symbols; special tokens come
    last.

    From `training_texts` it learns merges, up to `vocab_size` tokens besides the special ones; then many
    token sequences decode to a text that encodes differently. `eos_token` defaults to the last special token.
    `bos_token`, one of the special tokens, is put before every text that is encoded with
    `add_special_tokens`, as in Llama.

    >>> tokenizer = byte_tokenizer()
    >>> len(tokenizer("hi<|im_end|>")["input_ids"])
    3
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    texts = list(training_texts)
    if texts:
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
        backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special_tokens]
    )
    if bos_token is not None:
        bos = (bos_token, backend.token_to_id(bos_token))
        backend.post_processor = processors.TemplateProcessing(single=f"{bos_token} $A", special_tokens=[bos])
    if not eos_token and special_tokens:
        eos_token = special_tokens[-1]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=eos_token or None,
        bos_token=bos_token,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """The arguments of one call of `ScriptedServer.generate`."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    request_id: str
    media: tuple[Media, ...] = ()


Script = Callable[[SeenRequest], Sequence[int]]


class ScriptedServer:
    """An InferenceServer whose responses are given: a list of token lists, in order, or a function of the
    request.

    A response ends with its first stop token (finish reason `stop`), or after `max_new_tokens` (`length`). A
    scripted response that is shorter and has no stop token is returned whole, with `length`. `requests`
    records the requests, `released` the ids given to `release`. A suspended server holds requests back until
    `resume`; those that `abort` names then end without tokens.

    >>> import asyncio
    >>> server = ScriptedServer([[7, 8, 9, 10]])
    >>> sampling = SamplingParams(max_new_tokens=8, stop_token_ids=(9,))
    >>> completion = asyncio.run(server.generate([1, 2], sampling, "a"))
    >>> completion.token_ids.tolist(), completion.finish_reason
    ([7, 8, 9], 'stop')
    """

    def __init__(self, script: Iterable[Sequence[int]] | Script, *, version: int = 0) -> None:
        self._script = script if callable(script) else _from_list(script)
        self._running = asyncio.Event()
        self._running.set()
        self._aborted: set[str] = set()
        self.version = version
        self.requests: list[SeenRequest] = []
        self.released: list[str] = []
        self.asleep: set[MemoryKind] = set()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        media: Sequence[Media] = (),
    ) -> Completion:
        """The next scripted response. Raises ServerError if the script has none left, or `max_new_tokens`
        isn't positive."""
        request = SeenRequest(tuple(prompt_ids), sampling, request_id, tuple(media))
        self.requests.append(request)
        if sampling.max_new_tokens < 1:
            raise ServerError(
                f"max_new_tokens is {sampling.max_new_tokens}: a request needs a budget of at least 1"
            )
        await self._running.wait()
        if request_id in self._aborted:
            self._aborted.discard(request_id)
            return self._completion([], "aborted")
        return self._respond(request)

    def _respond(self, request: SeenRequest) -> Completion:
        sampling = request.sampling
        token_ids = list(self._script(request))
        stops = [index for index, token_id in enumerate(token_ids) if token_id in sampling.stop_token_ids]
        if stops and stops[0] < sampling.max_new_tokens:
            return self._completion(token_ids[: stops[0] + 1], "stop")
        return self._completion(token_ids[: sampling.max_new_tokens], "length")

    def _completion(self, token_ids: list[int], finish_reason: FinishReason) -> Completion:
        num_tokens = len(token_ids)
        runs = [VersionRun(self.version, num_tokens)] if num_tokens else []
        return Completion(
            token_ids=np.array(token_ids, dtype=np.int64),
            logprobs=np.full(num_tokens, -0.5, dtype=np.float32),
            finish_reason=finish_reason,
            versions=tuple(runs),
        )

    async def abort(self, request_id: str) -> None:
        if not self._running.is_set():
            self._aborted.add(request_id)

    async def release(self, request_id: str) -> None:
        self.released.append(request_id)

    async def suspend(self, suspension: Suspension = "finish") -> None:
        self._running.clear()

    async def begin_update(self, manifest: WeightManifest) -> None: ...

    async def receive(self, weights: WeightSource) -> int:
        return 0

    async def resume(self, version: int) -> None:
        self.version = version
        self._running.set()

    async def sleep(self, kinds: Iterable[MemoryKind]) -> None:
        self.asleep |= set(kinds)

    async def wake(self, kinds: Iterable[MemoryKind]) -> None:
        self.asleep -= set(kinds)

    async def close(self) -> None:
        self._running.set()

    def info(self) -> ServerInfo:
        return ServerInfo(
            LoadedModel("none", 0, 0, "none", "none", "none", (0, 0)),
            "a script",
            0,
            0,
            needs_weights=False,
        )


def _from_list(responses: Iterable[Sequence[int]]) -> Script:
    remaining = iter(responses)

    def next_response(request: SeenRequest) -> Sequence[int]:
        response = next(remaining, None)
        if response is None:
            raise ServerError(f"the script has no response left for request {request.request_id!r}")
        return response

    return next_response
