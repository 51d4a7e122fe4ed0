"""`grpo.yaml` in Python: rows and the reward are objects.

python examples/arithmetic/sums.py && python examples/arithmetic/train.py [--out DIR] [--steps N]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from turnwise import Trainer
from turnwise.cli.main import exit_status

sys.path.append(str(Path(__file__).parent))
from sums import correct, digits, sums


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/arithmetic"))
    parser.add_argument("--steps", type=int, default=650)
    options = parser.parse_args()
    train_rows, held_out = sums(seed=42)
    trainer = Trainer(
        model=options.out / "sft_model",
        train_dataset=train_rows,
        eval_dataset=held_out,
        reward_funcs=[correct, digits],
        reward_weights=[1.0, 0.5],
        max_steps=options.steps,
        output_dir=str(options.out),
        save_steps=0,
        rollout_batch_size=512,
        val_batch_size=len(held_out),
        sequence_length=48,
        actor_infer={"generating_args": {"max_new_tokens": 6}},
        actor_train={
            "training_args": {
                "learning_rate": 4e-4,
                "per_device_train_batch_size": 512,
                "lr_scheduler_type": "linear",
                "warmup_steps": 10,
            }
        },
        train_env_manager={"num_env_groups": 64, "group_size": 8},
        val_env_manager={"num_env_groups": 128},
    )
    trainer.train()
    print(trainer.evaluate())
    trainer.save(options.out / "trained")


if __name__ == "__main__":
    sys.exit(exit_status(main))
