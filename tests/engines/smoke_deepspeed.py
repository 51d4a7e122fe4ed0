"""DeepSpeed works here: on two processes, ZeRO 1, 2 and 3 move the weights as plain AdamW in one process
does."""

from __future__ import annotations

import os
import sys
import warnings

import torch
from common import EPS, flat, loss, run_ranks, toy_model, toy_tokens, trained_by_torch

os.environ["DS_ACCELERATOR"] = "cpu"
warnings.filterwarnings("ignore", category=FutureWarning)
NUM_STEPS, LR = 3, 1e-3
TOLERANCE = 1e-3


def run_rank() -> None:
    import deepspeed
    import deepspeed.comm

    deepspeed.init_distributed("gloo", verbose=False)
    rank, tokens = int(os.environ["RANK"]), toy_tokens()
    expected = trained_by_torch(tokens, NUM_STEPS, LR)
    for stage in (1, 2, 3):
        model = toy_model()
        before = flat(model)
        settings = {
            "train_micro_batch_size_per_gpu": len(tokens) // 2,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": LR, "eps": EPS, "weight_decay": 0.0, "torch_adam": True},
            },
            "gradient_clipping": 0.0,  # Its default has become 1.
            "zero_optimization": {"stage": stage},
            "steps_per_print": 10**9,
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
        for _ in range(NUM_STEPS):
            mine = tokens.chunk(2)[rank]
            # DeepSpeed averages over the ranks; the loss is a sum over the global denominator.
            engine.backward(2 * loss(engine(mine).logits, mine, tokens.numel()))
            engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters())) if stage == 3 else torch.no_grad():
            moved = flat(model) - before
        difference = float((moved - expected).norm() / expected.norm())
        assert difference <= TOLERANCE, (
            f"ZeRO {stage}: the weights went {difference:.2e} off the way of plain AdamW"
        )
        if rank == 0:
            print(
                f"deepspeed {deepspeed.__version__}, ZeRO {stage}: {difference:.1e} off the way of plain "
                "AdamW in one process"
            )
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    run_rank() if sys.argv[1:] == ["rank"] else run_ranks(__file__, num_ranks=2)
