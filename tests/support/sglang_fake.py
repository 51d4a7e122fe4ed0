"""A server with SGLang's routes, requests and replies, as far as `SGLangServer` uses them, over a plain
Hugging Face model.

The fields are those of `GenerateReqInput`, `SamplingParams`, `UpdateWeightFromDiskReqInput`,
`PauseGenerationReqInput` and `AbortReq` in the wheel of SGLang 0.5.23 (`srt/managers/io_struct.py`,
`srt/sampling/sampling_params.py`). Others are refused. It keeps what it has computed under (`extra_key`,
context) until the cache is flushed, as the radix cache does.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from sglang_weights import WeightRoutes
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

VERSION = os.environ.get("SGLANG_FAKE_VERSION", "0.5.23")
REQUEST = {"rid", "input_ids", "extra_key", "return_logprob", "return_sampling_mask", "sampling_params"}
SAMPLING = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "no_stop_trim",
}
SAMPLING |= {"sampling_seed", "skip_special_tokens"}
STEP_S = 0.01
"""Seconds of a token of a long request, which tests meet in the middle."""
LONG = 40


class SGLangFake(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def __init__(
        self, model: PreTrainedModel, decode: Callable[[Sequence[int]], str] | None = None, port: int = 0
    ) -> None:
        self.model = model.eval()
        self.decode = decode
        self.weights = WeightRoutes(self.model)
        self.version = "default"
        self.num_sampled = 0
        self._lock = threading.Lock()
        self._logits: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._running: dict[str, bool] = {}
        """Request → whether it is to be aborted."""
        self._may_run = threading.Event()
        self._may_run.set()
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def start(self) -> SGLangFake:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """The status and content of an answer."""
        routes = {
            "/health": lambda: "",
            "/server_info": lambda: {
                "version": VERSION,
                "max_running_requests": 64,
                "enable_memory_saver": False,
            },
            "/generate": lambda: self.generate(**body),
            "/abort_request": lambda: self.abort(body["rid"]),
            "/pause_generation": lambda: self.pause(body["mode"]),
            "/continue_generation": self._may_run.set,
            "/flush_cache": self.flush,
            "/update_weights_from_disk": lambda: self.update(**body),
            "/init_weights_update_group": lambda: self.weights.join(**body),
            "/begin_weight_update": self.weights.begin,
            "/update_weights_from_distributed": lambda: self.weights.receive(**body),
            "/end_weight_update": self.weights.end,
            "/destroy_weights_update_group": lambda: self.weights.leave(**body),
            "/update_weight_version": lambda: setattr(self, "version", body["new_version"]),
        }
        try:
            return 200, routes[path]()
        except (ValueError, TypeError) as error:
            return 400, {"error": {"message": str(error)}}

    def generate(self, **request: Any) -> dict[str, Any]:
        sampling = request["sampling_params"]
        if wrong := (set(request) - REQUEST) | (set(sampling) - SAMPLING):
            raise ValueError(f"unknown fields {wrong}")
        rid, context, ids = request["rid"], list(request["input_ids"]), []
        logprobs, kept, masks, spans, reason = (
            [],
            [],
            [],
            [],
            {"type": "length", "length": sampling["max_new_tokens"]},
        )
        self._running[rid], own = False, DynamicCache()
        while len(ids) < sampling["max_new_tokens"]:
            self._may_run.wait()
            if self._running[rid]:
                reason = {"type": "abort", "message": "aborted"}
                break
            if sampling["max_new_tokens"] >= LONG:
                time.sleep(STEP_S)
            with self._lock:
                if not self._may_run.is_set():  # A pause came since.
                    continue
                token, full, truncated, mask = self._sample(request["extra_key"], context, sampling, own)
                self.num_sampled += 1
                if not spans or spans[-1]["version"] != self.version:
                    spans.append({"version": self.version, "start": len(ids), "end": len(ids)})
            context.append(token)
            ids.append(token)
            spans[-1]["end"] = len(ids)
            logprobs.append([full, token, None])
            kept.append(truncated)
            masks.append(mask)
            if token in sampling["stop_token_ids"]:
                reason = {"type": "stop", "matched": token}
                break
            if self.decode and any(stop in self.decode(ids) for stop in sampling["stop"]):
                reason = {"type": "stop", "matched": "a string"}
                break
        del self._running[rid]
        found = {
            "id": rid,
            "finish_reason": reason,
            "weight_version": self.version,
            "completion_tokens": len(ids),
        }
        found |= {"output_token_logprobs": logprobs, "weight_versions": spans}
        if request["return_sampling_mask"]:
            found |= {"output_token_sampling_logprobs": kept, "output_token_sampling_mask": masks}
        return {"text": "", "output_ids": ids, "meta_info": found}

    def _sample(
        self, key: str, context: list[int], sampling: dict[str, Any], own: DynamicCache
    ) -> tuple[int, float, float, list[int]]:
        """A token, its log-prob at the temperature over the whole vocabulary, over what can be drawn, and the
        ids of that. `own` are the keys and values of the request."""
        at = key, tuple(context)
        if at not in self._logits:
            with torch.no_grad():
                new = torch.tensor([context[own.get_seq_length() :]])
                self._logits[at] = self.model(new, past_key_values=own, use_cache=True).logits[0, -1].double()
        logits = self._logits[at]
        if sampling["temperature"] == 0:
            return int(logits.argmax()), 0.0, 0.0, [int(logits.argmax())]
        full = torch.log_softmax(logits / sampling["temperature"], -1)
        order = full.argsort(descending=True)
        if sampling["top_k"] > 0:
            order = order[: sampling["top_k"]]
        probs = torch.softmax(full[order], -1)
        order = order[(probs.cumsum(-1) - probs) < sampling["top_p"]]
        order = order[full[order].exp() >= sampling["min_p"] * full.max().exp()]
        drawn = torch.log_softmax(full[order], -1)
        generator = torch.Generator().manual_seed(hash((sampling["sampling_seed"], len(context))) % 2**63)
        index = int(torch.multinomial(drawn.exp(), 1, generator=generator))
        return int(order[index]), float(full[order[index]]), float(drawn[index]), order.tolist()

    def abort(self, rid: str) -> None:
        if rid in self._running:
            self._running[rid] = True

    def pause(self, mode: str) -> None:
        assert mode == "in_place"
        self._may_run.clear()
        with self._lock:
            pass

    def flush(self) -> None:
        if self._running:
            raise ValueError("Flush cache failed.")
        self._logits.clear()

    def update(self, model_path: str, load_format: str, flush_cache: bool) -> dict[str, Any]:
        assert load_format == "safetensors"
        weights = {
            name: value
            for file in Path(model_path).glob("*.safetensors")
            for name, value in load_file(file).items()
        }
        with self._lock:
            self.model.load_state_dict(weights, strict=False)
            if flush_cache:
                self.flush()
        return {"success": True, "message": "", "num_paused_requests": 0}


class _Handler(BaseHTTPRequestHandler):
    server: SGLangFake

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: dict[str, Any]) -> None:
        status, content = self.server.answer(self.path, body)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b"Done.\n" if content is None else json.dumps(content).encode())

    def log_message(self, *_: object) -> None:
        """Writes nothing to stderr."""


def main() -> None:
    """`python -m sglang.launch_server`, for tests that put a package of that name on the path."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path")
    parser.add_argument("--port", type=int)
    options, others = parser.parse_known_args()
    print("told:", " ".join(others), flush=True)
    SGLangFake(AutoModelForCausalLM.from_pretrained(options.model_path), port=options.port).serve_forever()
