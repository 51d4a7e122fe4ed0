"""vLLM's asynchronous engine behind `protocols.InferenceServer`. The engine runs in its own processes."""

import gc
import logging
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from turnwise.errors import (
    ConfigError,
    LostWeightsError,
    ModelError,
    NotAvailableError,
    ServerError,
    install_hint,
)
from turnwise.inference.engine_server import REASONS, EngineServer, Sampled, engine_folder, require_version
from turnwise.inference.request import Request
from turnwise.inference.visible_devices import only_visible
from turnwise.models.load import parse_dtype
from turnwise.protocols import MemoryKind, WeightSource
from turnwise.runtime.info import PolicyInfo
from turnwise.runtime.rank import RankContext
from turnwise.spec import KV_CACHE_BYTES, OWN_TRANSFER
from turnwise.transfer.files import read_folder
from turnwise.transfer.group import GroupWeights
from turnwise.transfer.manifest import WeightManifest
from turnwise.transfer.staging import DeviceCopies
from turnwise.types import derive_seed

VERSION = "0.32"
"""The version of vLLM that this module works with."""
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    # A fork of this process would inherit torch's threads, which don't survive it.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # By default vLLM binds its threads to cores, and leaves out one core for its scheduler.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Environment variables of vLLM, set unless the user has set them."""
ENGINES = {backend: f"turnwise_{backend}" for backend in ("gloo", "nccl", "ipc")}
"""Backend in `weight_transfer_config` → the name of the engine for it that `vllm_transfer` adds to vLLM."""
_STEP_TOKENS = 8192  # tokens per forward pass on a CPU
_HAS_ENDED = "vLLM's engine has ended; what it wrote above says why"
_SHUTDOWN_S = 60.0  # seconds that vLLM's processes have to end


class VLLMServer(EngineServer):
    """Samples with `engine`, an `AsyncLLM`. Log-probs are those of the distribution that tokens are drawn
    from. Each request has its own seed, and another seed after an interruption. Only responses of requests
    with stop strings are decoded."""

    name = "vLLM"

    def __init__(self, rank: RankContext, policy: PolicyInfo, engine: Any) -> None:
        super().__init__(rank, policy)
        self._engine = engine
        self.replica = rank.rank
        self._vllm = load_vllm()
        self._errors = self._vllm.v1.engine.exceptions
        config = engine.vllm_config
        self._describe(
            f"vLLM {self._vllm.__version__}",
            max_concurrency=config.scheduler_config.max_num_seqs,
            cache_bytes=config.cache_config.kv_cache_memory_bytes or 0,
            sleeps=bool(config.model_config.enable_sleep_mode),
            sampling_mask=bool(config.model_config.return_sampling_mask),
        )

    @classmethod
    def for_policy(cls, rank: RankContext, policy: PolicyInfo, **options: Any) -> Self:
        """A `protocols.ServerFactory`. `options` are those of `vllm.AsyncEngineArgs`. Raises ConfigError if
        an option is wrong or vLLM doesn't start; NotAvailableError if vLLM `VERSION` isn't installed, or the
        policy is an adapter."""
        vllm = load_vllm()
        from vllm.v1.engine.async_llm import AsyncLLM

        fixed: dict[str, Any] = {
            "model": engine_folder(policy, "vLLM"),
            "trust_remote_code": policy.trust.remote_code,
            "dtype": str(parse_dtype(policy.dtype)).removeprefix("torch."),
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": _worker_extension(options),
            "disable_log_stats": True,
        }
        length = options.get("max_model_len", policy.max_context)
        if length < policy.max_context:
            raise ConfigError(
                f"actor_infer.strategy_args.strategy_config.max_model_len: {length} is less than "
                f"sequence_length {policy.max_context}; remove it, or lower sequence_length"
            )
        defaults: dict[str, Any] = {"max_model_len": policy.max_context}
        if len(rank.all_devices) > 1:
            # In an actor of Ray, vLLM would ask Ray for further actors, beyond the placement of the run.
            defaults["distributed_executor_backend"] = "mp"
        if options.get(OWN_TRANSFER):
            fixed[OWN_TRANSFER] = {"backend": ENGINES[options[OWN_TRANSFER]["backend"]]}
        if rank.device == "cpu":
            defaults["enforce_eager"] = True
            defaults["kv_cache_memory_bytes"] = KV_CACHE_BYTES
            # On a CPU, chunked prefill rewinds a request's random generator, which ends the engine (vLLM
            # 0.32).
            fixed["enable_chunked_prefill"] = False
            step_tokens = options.get("max_num_batched_tokens", _STEP_TOKENS)
            fixed["max_num_batched_tokens"] = max(length, step_tokens)
        try:
            arguments = vllm.AsyncEngineArgs(**(defaults | options | fixed))
        except TypeError as error:
            raise ConfigError(
                f"actor_infer.strategy_args.strategy_config: vLLM {vllm.__version__} says: {error}"
            ) from error
        num_devices = arguments.tensor_parallel_size * arguments.pipeline_parallel_size
        try:
            with only_visible(rank.all_devices, num_devices):
                # No variable holds the engine: a module imported above keeps this frame, and so its
                # variables, alive.
                return cls(rank, policy, AsyncLLM.from_engine_args(arguments))
        except (ValueError, RuntimeError, OSError) as error:
            raise ConfigError(
                f"vLLM didn't start: {error}; what it wrote above says more. If memory is short, lower "
                "gpu_memory_utilization or kv_cache_memory_bytes "
                "(actor_infer.strategy_args.strategy_config), or sequence_length"
            ) from error

    async def sleep(self, kinds: Iterable[MemoryKind]) -> None:
        """With vLLM's `enable_sleep_mode`, frees the GPU memory of the cache, and of the weights if `kinds`
        contains `weights`. Without this option, it only drops cached prefixes."""
        if not self._sleeps:
            await self._engine.reset_prefix_cache()
        elif "weights" in kinds:
            await self._engine.sleep(level=1)
        else:
            await self._engine.release_kv_cache_memory()

    async def wake(self, kinds: Iterable[MemoryKind]) -> None:
        if self._sleeps:
            await self._engine.wake_up(tags=list(kinds))

    async def _sample(self, engine_id: str, request: Request) -> Sampled:
        sampling = request.sampling
        num_partial = len(request.partial_ids)
        room = self._policy.max_context - len(request.context_ids)
        try:
            parameters = self._vllm.SamplingParams(
                temperature=0.0 if sampling.is_greedy else sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                repetition_penalty=sampling.repetition_penalty,
                seed=derive_seed("response", sampling.seed, num_partial),
                max_tokens=min(sampling.max_new_tokens - num_partial, room),
                stop=list(sampling.stop_strings),
                stop_token_ids=list(sampling.stop_token_ids),
                ignore_eos=True,
                detokenize=bool(sampling.stop_strings),
                skip_special_tokens=False,  # a stop string may be a special token
                logprobs=0,
                output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
            )
            prompt_ids = request.context_ids.tolist()
            prompt = self._vllm.inputs.engine.tokens_input(prompt_ids, cache_salt=self._mark)
            [answer] = [answer async for answer in self._engine.generate(prompt, parameters, engine_id)]
        except self._errors.EngineDeadError as error:
            raise ConnectionError(_HAS_ENDED) from error
        except (ValueError, self._errors.EngineGenerateError) as error:
            raise ServerError(
                f"vLLM refuses the request of conversation {request.request_id!r}: {error}"
            ) from error
        [output] = answer.outputs
        tokens = zip(output.logprobs or (), output.token_ids, strict=True)
        return Sampled(
            output.token_ids,
            logprobs=[entry[token].logprob for entry, token in tokens],
            reason=REASONS[output.finish_reason],
            versions=[(span.version, span.end - span.start) for span in output.weight_versions or ()],
            kept_ids=output.sampling_mask.token_ids if output.sampling_mask and sampling.keeps_ids else (),
        )

    async def _abort(self, engine_id: str) -> None:
        await self._engine.abort(engine_id)

    async def _freeze(self) -> None:
        await self._engine.pause_generation(mode="keep", clear_cache=False)

    async def _thaw(self) -> None:
        await self._engine.resume_generation()

    async def receive(self, weights: WeightSource) -> int:
        joining: dict[str, Any] = {}
        received: WeightManifest | dict[str, WeightSource]
        if isinstance(weights, GroupWeights):
            joining = {
                "host": weights.meeting.host,
                "port": weights.meeting.port,
                "interface": weights.meeting.interface,
                "first_rank": weights.first_ranks[self.replica],
                "size": weights.size,
                "timeout_s": weights.timeout_s,
                "device_type": weights.device_type,
                "name": weights.name,
            }
            received = weights.manifest
        elif isinstance(weights, DeviceCopies):
            received = weights.by_device()
        else:
            return await super().receive(weights)
        try:
            await self._engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": joining})
        except self._errors.EngineDeadError as error:
            raise ConnectionError(_HAS_ENDED) from error
        except Exception as error:  # boundary: vLLM passes on errors of its processes in ones of its own
            raise LostWeightsError(f"vLLM's processes didn't join those who receive: {error}") from error
        update = {"pickled": pickle.dumps(received)}
        try:
            await self._engine.start_weight_update()
            await self._engine.collective_rpc("update_weights", kwargs={"update_info": update})
            await self._engine.finish_weight_update()
        except Exception as error:  # boundary: vLLM passes on errors of its processes in ones of its own
            # `begin_update` has checked the weights. A member of the group that ends fails all others, which
            # may have loaded some of them: this replica leaves.
            raise ConnectionError(f"vLLM's processes didn't receive the weights: {error}") from error
        self._num_updates += 1
        return weights.manifest.num_bytes

    async def _load(self, folder: Path) -> None:
        with self._loading():
            await self._engine.collective_rpc("read_weights", args=(str(folder),))

    @contextmanager
    def _loading(self) -> Iterator[None]:
        try:
            yield
        except self._errors.EngineDeadError as error:
            raise ConnectionError(_HAS_ENDED) from error
        except Exception as error:  # boundary: the engine's model may raise anything if weights don't fit
            raise ModelError(f"vLLM can't use the trainer's weights: {error}") from error

    async def _label(self, version: str) -> None:
        await self._engine.update_weight_version(version)

    async def _end(self) -> None:
        engine = self._engine
        self._engine = None
        engine.shutdown(_SHUTDOWN_S)
        del engine
        # Frees the engine now: at the interpreter's end its `__del__` would fail.
        gc.collect()


class WeightReader:
    """A mixin of vLLM's worker class (`worker_extension_cls`)."""

    def read_weights(self, folder: str) -> None:
        """Loads the weights of all safetensors files in a folder."""
        silence_reload()
        runner = self.model_runner  # type: ignore[attr-defined]
        runner.reload_weights(weights_iterator=read_folder(Path(folder)))
        pack_output_layers(runner.get_model())


def silence_reload() -> None:
    """Hides what vLLM warns of at each update: modules without weights. The server has checked the names."""
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


def pack_output_layers(model: Any) -> None:
    """On a CPU vLLM's output layer computes with a packed copy. Loading weights doesn't renew a tied layer's
    copy (0.32)."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _worker_extension(options: Mapping[str, Any]) -> str:
    """The qualified name of the mixin of vLLM's worker class. Its module is imported in vLLM's processes."""
    if options.get(OWN_TRANSFER):
        return "turnwise.inference.vllm_transfer.TransferWorker"
    return f"{WeightReader.__module__}.{WeightReader.__qualname__}"


def load_vllm() -> ModuleType:
    """Imports vLLM. Raises NotAvailableError if vLLM isn't installed, or has another version than
    `VERSION`."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
    except ImportError as error:
        raise NotAvailableError(f"vLLM can't be imported ({error}); {install_hint('vllm')}") from error
    require_version("vLLM", vllm.__version__, VERSION)
    return vllm
