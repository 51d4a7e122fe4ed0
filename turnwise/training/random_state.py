"""A process's global random generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class GlobalRandomState:
    """The generators of `random`, `numpy.random` and torch (on the CPU), which a user's own code may draw from."""

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        return {
            "python": [version, list(words), gauss],
            "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
            "torch": torch.get_rng_state().numpy().tobytes().hex(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
