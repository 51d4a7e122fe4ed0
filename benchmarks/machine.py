"""What a result was measured on; written beside every figure."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path


def describe_machine() -> dict[str, str | int]:
    """Processor, cores, memory and library versions."""
    import torch

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def gemm_gflops(size: int = 2048, runs: int = 20, dtype: str = "float32") -> float:
    """The fastest of `runs` products of square matrices, in 10⁹ floating-point operations a second."""
    import torch

    a, b = torch.randn(2, size, size).to(getattr(torch, dtype))
    return 2 * size**3 / min(_times(lambda: torch.mm(a, b), runs)) / 1e9


def read_gbytes(num_bytes: int = 2**29, runs: int = 10) -> float:
    """The fastest of `runs` sums over memory much larger than any cache, in 10⁹ bytes a second."""
    import torch

    numbers = torch.ones(num_bytes // 4)
    return num_bytes / min(_times(numbers.sum, runs)) / 1e9


def _times(call: Callable[[], object], runs: int) -> list[float]:
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return times
