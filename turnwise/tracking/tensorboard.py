"""Metrics as TensorBoard scalars."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path


class TensorBoardTracker:
    """Writes scalars to `folder`, one event a step; look at them with `tensorboard --logdir FOLDER`.

    A run that goes on at `first_step` takes back what an earlier one wrote of that step and later ones.
    """

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        # Imported here, so that only runs that track with it pay. Torch's SummaryWriter makes an event of every scalar, which
        # takes ten times as long.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))
        if first_step:
            # TensorBoard drops the events of older files from this step on.
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=first_step, session_log=start))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
