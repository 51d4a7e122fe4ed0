"""Metrics, settings and sample texts for TensorBoard."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.tracking.store import TrackedRun


class TensorBoardStore:
    """Scalars (one event per step), settings as hyperparameters, and texts, in the folder `log_dir` [the
    run's `tensorboard`]; look at them with `tensorboard --logdir FOLDER`. A resumed run replaces the earlier
    events from its first step on."""

    def __init__(self, run: TrackedRun, log_dir: str | None = None) -> None:
        # Torch's SummaryWriter makes an event of every scalar, which takes ten times as long.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = Event
        self._summary = Summary
        self._text = text_pb
        folder = Path(log_dir or run.folder / "tensorboard")
        self.place = str(folder.absolute())
        self._writer = EventFileWriter(self.place)
        if run.first_step:
            # TensorBoard drops the events of older files from this step on.
            self._add(run.first_step + 1, session_log=SessionLog(status=SessionLog.START))
        if run.settings:
            settings = {}
            for name, value in run.settings.items():
                settings[name] = value if isinstance(value, (int, float)) else str(value)
            self._add(0, summary=hparams_pb(settings, trial_id=""))

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(
            self._event(
                wall_time=time.time(),
                step=step,
                **content,
            )
        )

    def write(
        self,
        step: int,
        metrics: Mapping[str, float],
        text: str,
    ) -> None:
        make_value = self._summary.Value
        values = [make_value(tag=name, simple_value=value) for name, value in metrics.items()]
        if text:
            # Indented, so that what the model wrote isn't read as Markdown.
            lines = [f"    {line}" for line in text.splitlines()]
            values += self._text("samples", "\n".join(lines)).value
        self._add(step, summary=self._summary(value=values))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
