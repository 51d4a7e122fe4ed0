"""What we ask of SGLang and read from it stands in its published wheel, whose source is read: it doesn't
import on a CPU."""

from __future__ import annotations

import ast
import asyncio
import base64
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_fake import REQUEST, SAMPLING
from weight_ranks import Ranks

from turnwise.cluster.engine_senders import SendingEngines
from turnwise.cluster.weight_senders import SendingRanks
from turnwise.inference import sglang_server, sglang_transfer
from turnwise.inference.sglang_transfer import (
    announce,
    announce_end,
    bucket_requests,
    copy_requests,
    joining_request,
)
from turnwise.transfer import staging
from turnwise.transfer.live import manifest_of
from turnwise.transfer.sender import WeightSender
from turnwise.transfer.staging import DeviceCopies, DeviceWeights

sys.path.insert(0, str(Path(__file__).parent))
from environment import LackingError, engine_python

CLASSES = {
    "managers/io_struct.py": {
        "GenerateReqInput": REQUEST,
        "BatchStrOutput": {"output_token_sampling_mask", "weight_versions"},
        "UpdateWeightFromDiskReqInput": {"model_path", "load_format", "flush_cache"},
        "UpdateWeightVersionReqInput": {"new_version", "abort_all_requests"},
        "PauseGenerationReqInput": {"mode"},
        "ReleaseMemoryOccupationReqInput": {"tags"},
        "ResumeMemoryOccupationReqInput": {"tags"},
        "BaseReq": {"rid"},
        "InitWeightsUpdateGroupReqInput": {
            "master_address",
            "master_port",
            "rank_offset",
            "world_size",
            "group_name",
            "backend",
        },
        "DestroyWeightsUpdateGroupReqInput": {"group_name"},
        "UpdateWeightsFromDistributedReqInput": {
            "names",
            "dtypes",
            "shapes",
            "group_name",
            "flush_cache",
            "load_format",
        },
        "UpdateWeightsFromTensorReqInput": {"serialized_named_tensors", "flush_cache"},
    },
    "sampling/sampling_params.py": {"SamplingParams": SAMPLING},
}
"""The fields of requests, and of what engine processes answer."""
REPLY = {
    "output_ids",
    "meta_info",
    "finish_reason",
    "output_token_logprobs",
    "output_token_sampling_logprobs",
}
REPLY |= {"output_token_sampling_mask"}
"""The keys that the client reads in the answer to `/generate`, beside those of a span of
`weight_versions`."""


@pytest.fixture(scope="module")
def source() -> Path:
    try:
        python = engine_python("sglang")
    except LackingError as error:
        pytest.skip(str(error))
    [folder] = python.parents[1].glob("lib/python*/site-packages/sglang")
    return folder / "srt"


def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def named(tree: ast.AST, name: str) -> ast.AST:
    """The class or function of this name."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    [found] = [node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == name]
    return found


def keys_of(tree: ast.AST) -> set[str]:
    """The texts that are keys of written mappings or of assignments, such as `meta_info["id"] = …`."""
    nodes = list(ast.walk(tree))
    keys = [key for node in nodes if isinstance(node, ast.Dict) for key in node.keys]
    keys += [
        node.slice for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    ]
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


@pytest.mark.parametrize("file", CLASSES)
def test_the_fields_are_those_of_the_published_classes(file: str, source: Path) -> None:
    tree = tree_of(source / file)
    for name, asked in CLASSES[file].items():
        body = getattr(named(tree, name), "body", [])
        assert (
            asked
            - {n.target.id for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
            == set()
        )


def test_the_answer_has_the_keys_that_the_client_reads(source: Path) -> None:
    manager = named(tree_of(source / "managers/tokenizer_manager.py"), "TokenizerManager")
    assert REPLY - keys_of(manager) == set()
    spans = named(tree_of(source / "utils/weight_versions.py"), "add_weight_versions_to_meta_info")
    assert keys_of(spans) >= {"weight_versions", "version", "start", "end"}


def test_a_log_prob_comes_first_in_its_triple_and_is_of_the_sampled_token(source: Path) -> None:
    manager = tree_of(source / "managers/tokenizer_manager.py")
    triples = [
        node
        for node in ast.walk(named(manager, "detokenize_logprob_tokens"))
        if isinstance(node, ast.ListComp)
    ]
    assert "(logprob, token_id, None)" in [ast.unparse(node.elt) for node in triples]
    # Only a mode that we don't ask for gives a list for each token.
    assert "support_logprobs=state.obj.sampling_logprobs_mode == 'support'" in ast.unparse(manager)


def test_the_reasons_of_an_end_are_those_that_the_client_knows(source: Path) -> None:
    tree = tree_of(source / "managers/schedule_batch.py")
    written = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "to_json"
    ]
    told = [node for function in written for node in ast.walk(function) if isinstance(node, ast.Dict)]
    pairs = [pair for node in told for pair in zip(node.keys, node.values, strict=True)]
    types = {
        ast.literal_eval(value)
        for key, value in pairs
        if isinstance(key, ast.Constant) and key.value == "type"
    }
    assert types == set(sglang_server.REASONS)


def test_server_info_tells_the_version_and_the_configuration(source: Path) -> None:
    info = named(tree_of(source / "entrypoints/http_server.py"), "server_info")
    assert "version" in keys_of(info) and "**build_server_info(server_args" in ast.unparse(info)
    assert "server_args.resolved_dict()" in ast.unparse(
        named(tree_of(source / "utils/common.py"), "build_server_info")
    )
    fields = ast.walk(tree_of(source / "arg_groups/field_order.py"))
    assert {"max_running_requests", "enable_memory_saver"} <= {
        n.value for n in fields if isinstance(n, ast.Constant)
    }


def asked_routes() -> Iterator[tuple[str, str]]:
    """Each path that the client asks, with its method: a GET has no body."""
    yield "/update_weights_from_distributed", "POST"
    yield "/update_weights_from_tensor", "POST"
    for node in ast.walk(tree_of(Path(sglang_server.__file__))):
        match node:
            case ast.Call(args=[ast.Constant(value=str(path)), *body]) if path.startswith("/"):
                yield path, "POST" if body else "GET"


def test_each_route_that_the_client_asks_is_published(source: Path) -> None:
    published: set[tuple[str, str]] = set()
    for node in ast.walk(tree_of(source / "entrypoints/http_server.py")):
        match node:
            case ast.Call(
                ast.Attribute(ast.Name("app"), "get" | "post" as method), [ast.Constant(value=path), *_]
            ):
                published.add((path, method.upper()))
            case ast.Call(
                ast.Attribute(ast.Name("app"), "api_route"), [ast.Constant(value=path), *_], keywords
            ):
                [methods] = [
                    ast.literal_eval(keyword.value) for keyword in keywords if keyword.arg == "methods"
                ]
                published |= {(path, method) for method in methods}
    asked = set(asked_routes())
    assert {("/generate", "POST"), ("/server_info", "GET")} <= asked and len(asked) == 17
    assert asked - published == set()


def own_group(source: Path) -> Callable[..., Any]:
    """SGLang's `init_custom_process_group`, out of its module, which doesn't import on a CPU."""
    function = named(tree_of(source / "utils/common.py"), "init_custom_process_group")
    names: dict[str, Any] = {"torch_release": (2, 11)}
    exec(ast.unparse(function), names)
    make: Callable[..., Any] = names["init_custom_process_group"]
    return make


def own_bucket(source: Path, name: str = "tensor_bucket") -> Any:
    """SGLang's `FlattenedTensorBucket`, out of its module under this name."""
    spec = spec_from_file_location(name, source / "weight_sync/tensor_bucket.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FlattenedTensorBucket


def test_sglang_s_own_group_and_buckets_receive_what_the_trainer_sends(source: Path) -> None:
    tensors = [("a", torch.rand(300, 7)), ("b", torch.rand(5).bfloat16()), ("c", torch.rand(3))]
    ranks: Any = Ranks(WeightSender(lambda: tensors, is_shared=True))
    replicas: Any = SimpleNamespace(servers=[SimpleNamespace(replica=0)])
    sending = SendingEngines(SendingRanks(ranks), replicas, "127.0.0.1", 1, timeout_s=60.0)
    make, bucket_class = own_group(source), own_bucket(source)

    def receive(weights: Any) -> dict[str, torch.Tensor]:
        announce(weights, 0)
        request = joining_request(weights, 0)
        group = make(
            backend=request["backend"],
            init_method=f"tcp://{request['master_address']}:{request['master_port']}",
            world_size=request["world_size"],
            rank=request["rank_offset"],
            group_name=request["group_name"],
        )
        received: dict[str, torch.Tensor] = {}
        for body in bucket_requests(weights):
            bucket = bucket_class.empty(body["names"], body["dtypes"], body["shapes"], "cpu")
            group.broadcast(bucket.get_flattened_tensor(), 0).wait()
            received.update(bucket.reconstruct_tensors())
        announce_end(weights, 0)
        return received

    async def main() -> dict[str, torch.Tensor]:
        return await asyncio.to_thread(receive, await sending.publish())

    received = asyncio.run(main())
    assert all(torch.equal(received[name], tensor) for name, tensor in tensors)


def test_a_pickled_copy_is_what_sglang_unpickles(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own classes, and only by names that its unpickler allows."""
    for name in ("sglang", "sglang.srt", "sglang.srt.weight_sync"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    name = "sglang.srt.weight_sync.tensor_bucket"
    bucket_class = own_bucket(source, name)
    monkeypatch.setitem(sys.modules, name, sys.modules[name])
    monkeypatch.setattr(sglang_transfer, "device_id", lambda device: f"GPU of {device}")
    tensors = [("a", torch.rand(300, 7)), ("b", torch.rand(5).bfloat16())]
    manifest = manifest_of(tensors)
    handle = reduce_like_cuda(sum(tensor.nbytes for _, tensor in tensors))
    copies = DeviceCopies(manifest, {"here": {"GPU of cuda:1": DeviceWeights(manifest, (handle,))}})
    [request] = copy_requests(copies, ["cuda:1"])
    [payload] = request["serialized_named_tensors"]
    pickled = base64.b64decode(payload)
    rows = named(tree_of(source / "utils/common.py"), "SafeUnpickler")
    allowed = {
        tuple(ast.literal_eval(node))
        for node in ast.walk(rows)
        if isinstance(node, ast.Tuple) and all(isinstance(part, ast.Constant) for part in node.elts)
    }
    data = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in tensors])

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            assert (module, name) in allowed, (module, name)
            if name == "rebuild_cuda_tensor":
                return lambda *arguments: data
            return super().find_class(module, name)

    read = Unpickler(io.BytesIO(pickled)).load()
    bucket = bucket_class(flattened_tensor=read["flattened_tensor"], metadata=read["metadata"])
    received = dict(bucket.reconstruct_tensors())
    assert all(torch.equal(received[name], tensor) for name, tensor in tensors)
    places = [
        ast.unparse(node)
        for node in ast.walk(tree_of(source / "utils/patch_torch.py"))
        if isinstance(node, ast.Assign)
    ]
    assert f"_REDUCE_TENSOR_ARG_DEVICE_INDEX = {staging._DEVICE_INDEX}" in places


def reduce_like_cuda(num_bytes: int) -> tuple[Any, ...]:
    """Arguments of `rebuild_cuda_tensor` as torch makes them of bytes on a GPU."""
    handle: tuple[Any, ...] = (torch.Tensor, torch.Size([num_bytes]), (1,), 0, torch.storage.TypedStorage)
    handle += (torch.uint8, "GPU of cuda:1", b"handle", num_bytes, 0, False, b"counter", 0, b"event", True)
    return handle
