"""Keeps runs in Weights & Biases."""

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.tracking.store import TrackedRun


class WandbStore:
    """A wandb run, kept in `log_dir` (None = the run's folder) until it is sent. `api_key` replaces the
    variable WANDB_API_KEY; further arguments go to `wandb.init`."""

    def __init__(
        self,
        run: TrackedRun,
        api_key: str | None = None,
        log_dir: str | None = None,
        **arguments: Any,
    ) -> None:
        import wandb

        # A silent wandb asks nobody for a login; one that captures what is printed would draw over the live
        # view.
        quiet = {"silent": True, "console": "off"}
        wandb.setup(wandb.Settings(**quiet))
        settings = {**quiet, "api_key": api_key, **arguments.pop("settings", {})}
        defaults = {
            "project": run.project,
            "name": run.name,
            "dir": log_dir or run.folder,
            "config": dict(run.settings or {}),
        }
        self._html = wandb.Html
        self._run = wandb.init(**(defaults | arguments), settings=wandb.Settings(**settings))
        self.place = self._run.url or f"{Path(self._run.dir).parent}; `wandb sync` sends it"

    def write(
        self,
        step: int,
        metrics: Mapping[str, float],
        text: str,
    ) -> None:
        content: dict[str, Any] = dict(metrics)
        if text:
            content["samples"] = self._html(f"<pre>{html.escape(text)}</pre>")
        self._run.log(content, step=step)

    def close(self) -> None:
        self._run.finish()
