"""vLLM works here: greedy tokens and log-probs of its CPU build are those of a plain forward pass."""

from __future__ import annotations

import os
import tempfile

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}

import torch
import vllm
from common import toy_model, toy_tokens

NUM_NEW = 16
TOLERANCE = 1e-3


def main() -> None:
    model = toy_model()
    # Blocks of the prefix cache have 128 tokens: shorter prompts would never use it.
    prompts = toy_tokens(num_sequences=4, length=200).tolist()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = vllm.LLM(
            folder,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,
        )
        worst = 0.0
        for temperature in (0.0, 1.0, 1.0):  # The second and third time from the prefix cache.
            sampling = vllm.SamplingParams(
                temperature=temperature, max_tokens=NUM_NEW, logprobs=0, detokenize=False, ignore_eos=True
            )
            answers = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
            for ids, answer in zip(prompts, answers, strict=True):
                [out] = answer.outputs
                sampled = torch.tensor(out.token_ids)
                with torch.no_grad():
                    logits = model(torch.tensor([ids + list(out.token_ids)])).logits[0, len(ids) - 1 : -1]
                if temperature == 0.0:
                    assert torch.equal(logits.argmax(-1), sampled), "greedy tokens differ from those of a plain forward pass"
                    continue
                plain = torch.log_softmax(logits, -1).gather(-1, sampled[:, None])[:, 0]
                theirs = torch.tensor([entry[token].logprob for entry, token in zip(out.logprobs, out.token_ids, strict=True)])
                worst = max(worst, float((theirs - plain).abs().max()))
    assert worst <= TOLERANCE, f"log-probs are {worst:.2e} off those of a plain forward pass"
    print(f"vllm {vllm.__version__}: greedy tokens as in a plain forward pass, log-probs {worst:.1e} off at most")


if __name__ == "__main__":
    main()
