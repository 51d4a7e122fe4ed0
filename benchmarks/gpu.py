"""What one GPU does: decoding, training, and a whole step of GRPO. `make gpu` runs it after the tests.

    python benchmarks/gpu.py [--size SIZE] [--out FILE]

At the shape of Qwen2.5-0.5B with random weights, in bf16:

- *decode*: sampled tokens/s of the embedded server, of one `generate` call, and of vLLM where it is installed
(without its
  prefix cache), at 64 and 256 prompts of 200 tokens with 128 new tokens each. They run by turns; ratios are
  medians of pairs.
- *train*: tokens/s and model FLOPs utilisation on 4,096 packed tokens a micro-batch, all of them trained on.
FLOPs are 6 times
  the parameters a token, plus attention's 6·layers·hidden·length (causal). The peak is the card's dense bf16
  rate.
- *step*: the seconds of one step of GRPO over a toy environment, by phase, in fp32.

`--toy` (or `--size toy`) runs the same code at a size that a CPU manages in seconds: its figures mean
nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe_machine
from toy import parse_arguments
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from turnwise.batching.pack import pack
from turnwise.batching.plan import denominators
from turnwise.inference.embedded.server import EmbeddedServer
from turnwise.models.make import make_model
from turnwise.models.packed_attention import PACKED_ATTENTION
from turnwise.runtime.rank import RankContext
from turnwise.training.cross_entropy import CrossEntropy
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.settings import StrategySettings
from turnwise.training.torch_strategy import TorchStrategy
from turnwise.types import Sample, SamplingParams, TurnSpan

HERE = Path(__file__).parent
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "L40S": 362.0, "4090": 165.0, "L4": 121.0}
"""Dense bf16 rates of the makers' data sheets, by a part of the card's name."""


@dataclass(frozen=True)
class Size:
    """Shape of the model and of the work."""

    shape: dict[str, int]
    conversations: tuple[int, ...]
    prompt: int
    response: int
    train_tokens: int
    sample: int


QWEN = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
TOY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SIZES = {
    "qwen2.5-0.5b": Size(QWEN, (64, 256), 200, 128, 4096, 1024),
    "toy": Size(TOY, (4, 8), 20, 8, 256, 64),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="qwen2.5-0.5b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="default: results/gpu-<the card>.json")
    options = parse_arguments(parser, size="toy", rounds=1, out=os.devnull)
    has_gpu, size = torch.cuda.is_available(), SIZES[options.size]
    if not has_gpu and options.size != "toy":
        sys.exit("error: torch sees no GPU; --toy runs the same code on a CPU")
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    card = torch.cuda.get_device_name(0) if has_gpu else "cpu"
    result: dict[str, Any] = {"card": card, "size": options.size, "machine": describe_machine()}
    parts: dict[str, Callable[[], Any]] = {
        "decode": lambda: decode(size, device, options.rounds),
        "train": lambda: train(size, device, card, options.rounds),
        "step": lambda: grpo_step(size, device),
    }
    out = Path(options.out or HERE / "results" / f"gpu-{card.lower().replace(' ', '-')}.json")
    for name, part in parts.items():
        result[name] = part()
        print(json.dumps({name: result[name]}, indent=2), flush=True)
        out.write_text(
            json.dumps(result, indent=2) + "\n"
        )  # after each part: a machine that is lent may end before the last
    print(f"written: {out}")


def random_model(size: Size, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    config = AutoConfig.for_model(
        "qwen2",
        **size.shape,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation=PACKED_ATTENTION, dtype=dtype
    )
    return model.to(device).eval()


def decode(size: Size, device: torch.device, rounds: int) -> dict[str, Any]:
    """Sampled tokens/s by the number of conversations."""
    model = random_model(size, device, torch.bfloat16)
    rows: dict[str, Any] = {}
    with ExitStack() as ended:
        try:
            engine = vllm_engine(model, size, ended)
        # boundary: an engine that isn't there, or that this machine can't hold, costs its figures alone
        except Exception as error:
            engine, rows["without vllm"] = None, f"{type(error).__name__}: {error}"
        return rows | decoded(size, device, rounds, model, engine)


def decoded(
    size: Size, device: torch.device, rounds: int, model: PreTrainedModel, engine: Any
) -> dict[str, Any]:
    rows = {}
    for count in size.conversations:
        prompts = np.random.default_rng(0).integers(1, size.shape["vocab_size"], (count, size.prompt))
        contenders = {"embedded": embedded(model, prompts, size), "generate": generate(model, prompts, size)}
        if engine is not None:
            contenders["vllm"] = answers(engine, prompts, size)
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(rounds + 1):
            for name, run in contenders.items():
                seconds, num_tokens = timed(run, device)
                if number:
                    rates[name].append(num_tokens / seconds)
        medians = {name: round(statistics.median(values)) for name, values in rates.items()}
        rows[str(count)] = {"tokens_per_s": medians}
        for other in list(contenders)[1:]:
            ratios = [a / b for a, b in zip(rates["embedded"], rates[other], strict=True)]
            rows[str(count)][f"embedded / {other}"] = round(statistics.median(ratios), 2)
    return rows


def vllm_engine(model: PreTrainedModel, size: Size, ended: ExitStack) -> Any:
    """vLLM with the model's weights, until `ended`."""
    from vllm import LLM

    folder = ended.enter_context(tempfile.TemporaryDirectory())
    model.save_pretrained(folder)
    engine = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=size.prompt + size.response,
        max_num_seqs=max(size.conversations),
        enable_prefix_caching=False,
        gpu_memory_utilization=0.4,
    )
    ended.callback(engine.llm_engine.engine_core.shutdown)
    return engine


def answers(engine: Any, prompts: np.ndarray, size: Size) -> Callable[[], int]:
    from vllm import SamplingParams as Asked

    asked = Asked(max_tokens=size.response, temperature=1.0, ignore_eos=True, detokenize=False)
    contexts = [{"prompt_token_ids": ids.tolist()} for ids in prompts]
    return lambda: sum(
        len(found.outputs[0].token_ids) for found in engine.generate(contexts, asked, use_tqdm=False)
    )


def embedded(model: PreTrainedModel, prompts: np.ndarray, size: Size) -> Callable[[], int]:
    sampling = SamplingParams(size.response, temperature=1.0)

    async def play() -> int:
        server = EmbeddedServer(model, max_length=size.prompt + size.response, max_concurrency=len(prompts))
        requests = [
            server.generate(ids.tolist(), sampling, str(number)) for number, ids in enumerate(prompts)
        ]
        completions = await asyncio.gather(*requests)
        await server.close()
        return sum(len(completion.token_ids) for completion in completions)

    return lambda: asyncio.run(play())


def generate(model: PreTrainedModel, prompts: np.ndarray, size: Size) -> Callable[[], int]:
    def run() -> int:
        ids = torch.tensor(prompts, device=model.device)
        length = {"max_new_tokens": size.response, "min_new_tokens": size.response}
        answers = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, pad_token_id=0, **length
        )
        return int(answers[:, ids.shape[1] :].numel())

    return run


def timed(run: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Seconds of a run, the device's work included, and its result."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    result = run()
    wait()
    return time.perf_counter() - started, result


def train(size: Size, device: torch.device, card: str, rounds: int) -> dict[str, Any]:
    """Tokens/s of an optimiser step of eight packed micro-batches, and the utilisation where the card's peak
    is known."""
    strategy = TorchStrategy(
        random_model(size, device, torch.float32),
        StrategySettings(OptimizerSettings(1e-5), dtype=torch.bfloat16),
        rank=RankContext(device=str(device)),
    )
    per_batch = size.train_tokens // size.sample
    samples = [random_sample(size, seed) for seed in range(8 * per_batch)]
    divisors = denominators(samples, size.sample)
    batches = [
        pack(samples[start : start + per_batch], divisors) for start in range(0, len(samples), per_batch)
    ]
    seconds = [
        timed(lambda: strategy.train_step(batches, CrossEntropy()), device)[0] for _ in range(rounds + 1)
    ][1:]
    rate = sum(sample.num_tokens for sample in samples) / statistics.median(seconds)
    num_parameters = sum(parameter.numel() for parameter in strategy.model.parameters())
    attention = 6 * size.shape["num_hidden_layers"] * size.shape["hidden_size"] * size.sample
    flops = rate * (6 * num_parameters + attention)
    peak = next((tera * 1e12 for part, tera in PEAK_TFLOPS.items() if part in card), None)
    used = (
        {"mfu": round(flops / peak, 3)} if peak else {"mfu": None, "why": f"the peak of {card} isn't listed"}
    )
    memory = {"peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1)} if device.type == "cuda" else {}
    return {
        "parameters": num_parameters,
        "tokens_per_s": round(rate),
        "tflops": round(flops / 1e12, 2),
        **used,
        **memory,
    }


def random_sample(size: Size, seed: int) -> Sample:
    ids = np.random.default_rng(seed).integers(1, size.shape["vocab_size"], size.sample)
    mask = np.arange(size.sample) > 0
    return Sample(ids, mask, np.zeros(size.sample, np.float32), (TurnSpan(0, 1, size.sample),))


def grpo_step(size: Size, device: torch.device) -> dict[str, Any]:
    """Seconds of the third step of a small run of the size's model, by phase."""
    sys.path.insert(0, str(HERE.parent / "tests" / "support"))
    from small_runs import run_small, small_config

    from turnwise.tracking.jsonl import read_metrics

    with tempfile.TemporaryDirectory() as folder:
        made = make_model(
            "qwen2.5-0.5b", Path(folder) / "model", ["P _ G O Left Right Up Down"], overrides=size.shape
        )
        config = small_config(made.folder, folder, max_steps=3, save_steps=0)
        row = read_metrics(run_small(config).folder.metrics)[2]
    times = {name: round(value, 3) for name, value in row.items() if name.startswith("time/")}
    return {"device": str(device), "parameters": made.num_parameters, **times}


if __name__ == "__main__":
    main()
