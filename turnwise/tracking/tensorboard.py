"""Metrics, settings and sample texts for TensorBoard."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.tracking.store import TrackedRun


class TensorBoardStore:
    """Scalars (one event per step), settings as hyperparameters, and texts, in the folder `log_dir` [the run's `tensorboard`];
    look at them with `tensorboard --logdir FOLDER`. A resumed run replaces the earlier events from its first step on."""

    def __init__(self, run: TrackedRun, log_dir: str | None = None) -> None:
        # Torch's SummaryWriter makes an event of every scalar, which takes ten times as long.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self.place = str(Path(log_dir or run.folder / "tensorboard").absolute())
        self._writer = EventFileWriter(self.place)
        if run.first_step:
            # TensorBoard drops the events of older files from this step on.
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=run.first_step, session_log=start))
        if run.settings:
            self._add_settings(run.settings)

    def _add_settings(self, settings: Mapping[str, object]) -> None:
        from tensorboard.plugins.hparams import metadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

        start = SessionStartInfo(start_time_secs=time.time())
        for name, value in settings.items():
            if isinstance(value, bool):
                start.hparams[name].bool_value = value
            elif isinstance(value, (int, float)):
                start.hparams[name].number_value = value
            else:
                start.hparams[name].string_value = str(value)
        what = metadata.create_summary_metadata(HParamsPluginData(session_start_info=start))
        self._add([self._summary.Value(tag=metadata.SESSION_START_INFO_TAG, metadata=what, tensor=metadata.NULL_TENSOR)])

    def _text_value(self, text: str) -> Any:
        import numpy as np
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        # Indented, so that what the model wrote isn't read as Markdown.
        lines = "\n".join(f"    {line}" for line in text.splitlines())
        tensor = make_tensor_proto(np.array([lines.encode()], dtype=object))
        return self._summary.Value(tag="samples", metadata=create_summary_metadata("samples", ""), tensor=tensor)

    def _add(self, values: list[Any], step: int = 0) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def write(self, step: int, metrics: Mapping[str, float], text: str) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        if text:
            values.append(self._text_value(text))
        self._add(values, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
