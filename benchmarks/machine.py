"""What a result was measured on; written beside every figure."""

from __future__ import annotations

import os
import platform
import time
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


def gemm_gflops(size: int = 2048, runs: int = 20) -> float:
    """The fastest of `runs` products of square fp32 matrices, in 10⁹ floating-point operations a second."""
    import torch

    a, b = torch.randn(size, size), torch.randn(size, size)
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - started)
    return 2 * size**3 / min(times) / 1e9
