"""How far prefill and decoding of the embedded engine are from what the machine could do."""

from __future__ import annotations

import statistics
import time

import numpy as np
from machine import gemm_gflops, read_gbytes
from transformers import PreTrainedModel

from turnwise.inference.embedded.engine import Engine
from turnwise.inference.embedded.server import make_runner
from turnwise.inference.request import Request
from turnwise.types import SamplingParams


def measure_limits(
    model: PreTrainedModel, num_rows: int, prompt_tokens: int, new_tokens: int, gemm_size: int
) -> dict[str, float]:
    """Tokens/s of prefill and of decoding alone, and the least time that the machine could take as a share of
    the time taken.

    Operations count at the GEMM rate of the model's dtype; bytes of weights and cache at the rate of reading
    memory. A step takes at least the longer of the two. Both rates are measured now, in the same process.
    """
    gflops, gbytes = gemm_gflops(gemm_size, dtype=str(model.dtype).removeprefix("torch.")), read_gbytes()
    max_length = prompt_tokens + new_tokens
    engine = Engine(
        make_runner(model, max_length=max_length, kv_cache_bytes=2**30),
        max_length=max_length,
        max_concurrency=num_rows,
        max_step_tokens=num_rows * prompt_tokens,
    )
    rng = np.random.default_rng(0)
    prefill_times, decode_times = [], []
    for number in range(5):
        for index in range(num_rows):
            prompt = rng.integers(0, model.config.vocab_size, prompt_tokens)
            engine.add(Request(f"{number}/{index}", prompt, SamplingParams(new_tokens, seed=index)))
        prefill_times.append(_step_s(engine))
        while engine.has_work:
            decode_times.append(_step_s(engine))
        for index in range(num_rows):
            engine.release(f"{number}/{index}")
    prefill_s, decode_s = statistics.median(prefill_times), statistics.median(decode_times)

    prefill_flop, _ = _work(model, num_rows, prompt_tokens, prompt_tokens / 2)
    decode_flop, decode_bytes = _work(model, num_rows, 1, prompt_tokens + new_tokens / 2)
    least_s = max(decode_flop / gflops, decode_bytes / gbytes) / 1e9
    return {
        "gemm_gflops": round(gflops),
        "read_gbytes": round(gbytes, 1),
        "prefill_tokens_per_s": round(num_rows * prompt_tokens / prefill_s),
        "prefill_share": round(prefill_flop / gflops / 1e9 / prefill_s, 3),
        "decode_tokens_per_s": round(num_rows / decode_s),
        "decode_step_ms": round(decode_s * 1e3, 2),
        "decode_share": round(least_s / decode_s, 3),
    }


def _step_s(engine: Engine) -> float:
    started = time.perf_counter()
    engine.step()
    return time.perf_counter() - started


def _work(model: PreTrainedModel, num_rows: int, num_tokens: int, num_keys: float) -> tuple[float, float]:
    """Operations and bytes of a step over `num_tokens` new tokens a row, which see `num_keys` keys on
    average.

    Two operations for each weight that multiplies a token, and four for each number of a key that a query
    head sees; the head, and of the last layer all but its keys and values, for the last token alone. Weights
    are read once, and each row's keys and values once.
    """
    config = model.config
    layers = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2)
    head = config.vocab_size * config.hidden_size
    key_values = 2 * config.num_key_value_heads * config.head_dim
    attention = 4 * config.num_attention_heads * config.head_dim * num_keys
    last = layers / config.num_hidden_layers - key_values * config.hidden_size
    of_all = 2 * (layers - last) + attention * (config.num_hidden_layers - 1)
    flop = num_rows * (num_tokens * of_all + 2 * (last + head) + attention)
    numbers = layers + head + num_rows * num_keys * key_values * config.num_hidden_layers
    return flop, numbers * model.dtype.itemsize
