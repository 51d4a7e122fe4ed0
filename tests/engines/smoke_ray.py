"""Ray works here: two actors, each with half of the samples, give the gradient of the whole batch in one
process."""

from __future__ import annotations

import ray
import torch
from common import gradient, toy_model, toy_tokens

TOLERANCE = 1e-5


@ray.remote(num_cpus=1)
class Worker:
    """One data-parallel rank with its own copy of the model."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = toy_model()

    def gradient(self, tokens: torch.Tensor, num_tokens: int) -> torch.Tensor:
        return gradient(self.model, tokens, num_tokens)


def main() -> None:
    tokens = toy_tokens()
    whole = gradient(toy_model(), tokens, tokens.numel())
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False
    )
    try:
        workers = [Worker.remote() for _ in range(2)]
        parts = [
            worker.gradient.remote(half, tokens.numel())
            for worker, half in zip(workers, tokens.chunk(2), strict=True)
        ]
        summed = torch.stack(ray.get(parts, timeout=120)).sum(0)
    finally:
        ray.shutdown()
    difference = float((summed - whole).norm() / whole.norm())
    assert difference <= TOLERANCE, f"the actors' gradient is {difference:.2e} away from that of one process"
    print(
        f"ray {ray.__version__}: the summed gradient of two actors is {difference:.1e} away from that of one "
        "process"
    )


if __name__ == "__main__":
    main()
