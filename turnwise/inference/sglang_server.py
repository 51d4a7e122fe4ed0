"""SGLang's HTTP server behind `protocols.InferenceServer`: started here, or running elsewhere at a URL.
`sglang/srt/managers/io_struct.py` of SGLang 0.5.23 defines requests and answers."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from turnwise.errors import ConfigError, LostWeightsError, ModelError, ServerError
from turnwise.inference.engine_server import REASONS, EngineServer, Sampled, engine_folder, require_version
from turnwise.inference.http_json import HttpJson, NoAnswerError
from turnwise.inference.request import Request
from turnwise.inference.sglang_transfer import (
    announce,
    announce_end,
    bucket_requests,
    copy_requests,
    joining_request,
)
from turnwise.inference.visible_devices import only_visible
from turnwise.models.load import parse_dtype
from turnwise.protocols import MemoryKind, WeightSource
from turnwise.runtime.info import PolicyInfo
from turnwise.runtime.rank import RankContext
from turnwise.spec import OWN_TRANSFER
from turnwise.transfer.group import GroupWeights
from turnwise.transfer.staging import DeviceCopies

logger = logging.getLogger(__name__)

VERSION = "0.5.23"
"""The version of SGLang that this module works with."""
_LOOK_S = 0.2  # seconds between two checks whether SGLang is ready
_END_S = 20.0  # seconds that SGLang's process has to end
_NUM_LINES = 5  # lines of SGLang's log that an error shows

_SECTION = "actor_infer.strategy_args.strategy_config"

_SGLangProcess = tuple[subprocess.Popen[bytes], Path]


class SGLangServer(EngineServer):
    """Samples with the server behind `http`. `process` is the server's process and log file, if it was
    started here. The server uses each request's seed only if `enable_deterministic_inference` is on; then an
    interruption doesn't change the random draws. Raises NotAvailableError if SGLang has another version than
    `VERSION`; ServerError if it doesn't answer."""

    name = "SGLang"

    def __init__(
        self,
        rank: RankContext,
        policy: PolicyInfo,
        http: HttpJson,
        process: _SGLangProcess | None = None,
    ) -> None:
        super().__init__(rank, policy)
        self._http = http
        self._process = process
        self.replica = rank.rank
        self._devices = rank.all_devices
        info = http.ask_now("/server_info")
        require_version("SGLang", info["version"], VERSION)
        self._describe(
            f"SGLang {info['version']}",
            max_concurrency=info.get("max_running_requests") or 0,
            cache_bytes=0,
            sleeps=bool(info.get("enable_memory_saver")),
            sampling_mask=True,
        )
        self._num_processes: int = info.get("tp_size", 1)
        # A server that another run used may have prefixes of other weights under our marks, and that run's
        # label.
        http.ask_now("/flush_cache", {}, is_read=False)
        http.ask_now("/update_weight_version", _new_label("0"), is_read=False)

    @classmethod
    def for_policy(cls, rank: RankContext, policy: PolicyInfo, **options: Any) -> Self:
        """A `protocols.ServerFactory`. `options` are those of `sglang.launch_server`, or the `url` of a
        running server. Raises ConfigError if the server doesn't start, its port is in use, or `url` comes
        with other options."""
        if "url" in options:
            url = options.pop("url")
            options.pop(OWN_TRANSFER, None)
            if options:
                raise ConfigError(
                    f"{_SECTION}: the server at {url} has its options already; remove {', '.join(options)}"
                )
            return cls(rank, policy, HttpJson(url))
        options.pop(OWN_TRANSFER, None)  # SGLang takes any way, and needs no option for it
        port = _free_port(options.pop("port", 0))
        fixed = {
            "model_path": engine_folder(policy, "SGLang"),
            "dtype": str(parse_dtype(policy.dtype)).removeprefix("torch."),
            "context_length": policy.max_context,
            "trust_remote_code": policy.trust.remote_code,
            "port": port,
        }
        defaults = {"log_level": "warning", "device": rank.device.partition(":")[0], "base_gpu_id": 0}
        with only_visible(rank.all_devices, _num_devices(options)):
            process, log = _launch(defaults | options | fixed)
        http = HttpJson(f"http://127.0.0.1:{port}")
        with ExitStack() as on_error:
            on_error.callback(_kill, process)
            while True:
                if process.poll() is not None:
                    raise ConfigError(f"SGLang didn't start (exit status {process.returncode}): {_tail(log)}")
                with suppress(ServerError):
                    http.ask_now("/health", is_read=False)
                    break
                time.sleep(_LOOK_S)
            server = cls(rank, policy, http, (process, log))
            on_error.pop_all()
        return server

    async def sleep(self, kinds: Iterable[MemoryKind]) -> None:
        """Drops the cache and, with `enable_memory_saver`, frees the GPU memory of `kinds`."""
        await self._ask("/flush_cache", {})
        if self._sleeps:
            await self._ask("/release_memory_occupation", {"tags": list(kinds)})

    async def wake(self, kinds: Iterable[MemoryKind]) -> None:
        if self._sleeps:
            await self._ask("/resume_memory_occupation", {"tags": list(kinds)})

    async def _sample(self, engine_id: str, request: Request) -> Sampled:
        sampling = request.sampling
        num_partial = len(request.partial_ids)
        if sampling.repetition_penalty != 1.0:
            raise ServerError(
                "SGLang's repetition_penalty ignores the prompt, unlike every other server's; set it to 1"
            )
        room = self._policy.max_context - len(request.context_ids)
        is_truncated = sampling.is_truncated and not sampling.is_greedy
        answer = await self._ask(
            "/generate",
            {
                "rid": engine_id,
                "input_ids": request.context_ids.tolist(),
                "extra_key": self._mark,
                "return_logprob": True,
                # SGLang's other log-probs are over the whole vocabulary, even if sampling is cut.
                "return_sampling_mask": is_truncated,
                "sampling_params": {
                    "temperature": 0.0 if sampling.is_greedy else sampling.temperature,
                    "top_p": sampling.top_p,
                    "top_k": sampling.top_k or -1,
                    "min_p": sampling.min_p,
                    "max_new_tokens": min(sampling.max_new_tokens - num_partial, room),
                    "stop": list(sampling.stop_strings),
                    "skip_special_tokens": False,  # a stop string may be one
                    "stop_token_ids": list(sampling.stop_token_ids),
                    "ignore_eos": True,
                    "no_stop_trim": True,
                    "sampling_seed": sampling.seed % 2**63,
                },
            },
        )
        try:
            facts = answer["meta_info"]
            if is_truncated:
                logprobs = facts.get("output_token_sampling_logprobs", [])
            else:
                logprobs = [logprob for logprob, *_ in facts.get("output_token_logprobs", [])]
            spans = facts.get("weight_versions", [])
            return Sampled(
                answer["output_ids"],
                logprobs,
                REASONS[facts["finish_reason"]["type"]],
                versions=[(span["version"], span["end"] - span["start"]) for span in spans],
                kept_ids=facts.get("output_token_sampling_mask", []) if sampling.keeps_ids else [],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(
                f"{self._http.url} answered something else than SGLang {VERSION} does: {error!r}"
            ) from error

    async def _abort(self, engine_id: str) -> None:
        await self._ask("/abort_request", {"rid": engine_id})

    async def _freeze(self) -> None:
        await self._ask("/pause_generation", {"mode": "in_place"})

    async def _thaw(self) -> None:
        await self._ask("/continue_generation", {})

    async def receive(self, weights: WeightSource) -> int:
        if isinstance(weights, GroupWeights):
            await self._join(weights)
            await self._update("/update_weights_from_distributed", bucket_requests(weights))
            self._num_updates += 1
            await self._leave(weights)
        elif isinstance(weights, DeviceCopies):
            requests = await asyncio.to_thread(copy_requests, weights, self._devices)
            await self._update("/update_weights_from_tensor", requests)
            self._num_updates += 1
        else:
            return await super().receive(weights)
        return weights.manifest.num_bytes

    async def _join(self, weights: GroupWeights) -> None:
        """Makes SGLang's processes members of the group."""
        if self._num_processes != weights.num_processes:
            raise ModelError(
                f"{self._http.url} has {self._num_processes} processes, and weights are sent to "
                f"{weights.num_processes}; let the run start SGLang, or remove {_SECTION}.{OWN_TRANSFER}"
            )
        await asyncio.to_thread(announce, weights, self.replica)
        try:
            await self._ask("/init_weights_update_group", joining_request(weights, self.replica))
        except ServerError as error:
            raise LostWeightsError(
                f"SGLang's processes didn't join those who receive weights: {error}"
            ) from error

    async def _leave(self, weights: GroupWeights) -> None:
        """The end of a transfer: SGLang has all."""
        await asyncio.to_thread(announce_end, weights, self.replica)
        try:
            await self._ask("/destroy_weights_update_group", {"group_name": weights.name})
        except ServerError as error:
            logger.warning("SGLang keeps a group by which weights came: %s", error)

    async def _update(self, path: str, requests: Iterable[Mapping[str, Any]]) -> None:
        """Lets SGLang receive all tensors. They have been checked, so an error is one of those that send or
        receive, after which some may have come: this replica leaves."""
        with suppress(ServerError):  # a run that broke off in the middle has left its session open
            await self._ask("/end_weight_update", {})
        try:
            await self._ask("/begin_weight_update", {})
            for request in requests:
                await self._ask(path, request)
            await self._ask("/end_weight_update", {})
        except ServerError as error:
            raise ConnectionError(f"SGLang didn't receive the weights: {error}") from error

    async def _load(self, folder: Path) -> None:
        # The cache can't be dropped while paused requests use it. No new request reads its prefixes anyway:
        # they are marked.
        body = {"model_path": str(folder), "load_format": "safetensors", "flush_cache": not self._running}
        try:
            await self._ask("/update_weights_from_disk", body)
        except ServerError as error:
            raise ModelError(f"SGLang can't use the trainer's weights: {error}") from error

    async def _label(self, version: str) -> None:
        await self._ask("/update_weight_version", _new_label(version))

    async def _end(self) -> None:
        if self._process is not None:
            _kill(self._process[0])

    async def _ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """POSTs `body`. Returns only `/generate`'s answer. Raises ConnectionError if none comes, ServerError
        for a refusal."""
        try:
            return await self._http.ask(path, body, is_read=path == "/generate")  # no other answer is needed
        except NoAnswerError as error:
            if self._process is None:
                raise ConnectionError(str(error)) from error
            raise ConnectionError(f"SGLang has ended; its last words: {_tail(self._process[1])}") from error


def _num_devices(options: Mapping[str, Any]) -> int:
    """Number of devices of one copy of the model."""
    tensor = options.get("tp_size", options.get("tensor_parallel_size", 1))
    pipeline = options.get("pp_size", options.get("pipeline_parallel_size", 1))
    return int(tensor) * int(pipeline)


def _free_port(port: int) -> int:
    """The port, or any free one for 0. Raises ConfigError if it is in use."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(f"{_SECTION}.port: {port} is in use; name another, or remove it") from error
        return int(probe.getsockname()[1])


def _new_label(version: str) -> dict[str, Any]:
    return {"new_version": version, "abort_all_requests": False}


def _launch(options: Mapping[str, Any]) -> _SGLangProcess:
    arguments: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            arguments.append(flag)
        elif value not in (False, None):
            arguments += [flag, str(value)]
    number, name = tempfile.mkstemp(prefix="turnwise-sglang-", suffix=".log")
    command = [sys.executable, "-m", "sglang.launch_server", *arguments]
    with open(number, "wb") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            start_new_session=True,
        ), Path(name)


def _kill(process: subprocess.Popen[bytes]) -> None:
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, sent)
            process.wait(_END_S)


def _tail(log: Path) -> str:
    with open(log, errors="replace") as file:
        lines = [line.strip() for line in deque(file, _NUM_LINES)]
    shown = " | ".join(lines) or "none"
    return f"{shown} (all of them: {log})"
