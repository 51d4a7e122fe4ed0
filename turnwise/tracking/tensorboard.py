"""Metrics as TensorBoard scalars."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class TensorBoardTracker:
    """Writes scalars to `folder`; look at them with `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: Path) -> None:
        # Imported here: it takes most of a second, and only runs that track with it should pay.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
