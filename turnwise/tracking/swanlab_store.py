"""Keeps runs in SwanLab."""

from collections.abc import Mapping
from typing import Any

from turnwise.tracking.store import TrackedRun


class SwanlabStore:
    """A SwanLab run, kept in turnwise's run folder until it is sent. `api_key` replaces the variable
    SWANLAB_API_KEY. The mapping `login_kwargs` may hold `api_key` and `host` instead. Further arguments go to
    `swanlab.init`."""

    def __init__(
        self,
        run: TrackedRun,
        api_key: str | None = None,
        login_kwargs: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        import swanlab

        login = {"api_key": api_key, **(login_kwargs or {})}
        credentials = {"api_key": login.get("api_key"), "api_host": login.get("host")}
        # Asks nobody for a login, and doesn't capture what is printed.
        settings = swanlab.Settings(
            interactive=False,
            terminal={"proxy_type": "none"},
            **{name: value for name, value in credentials.items() if value},
        )
        defaults: dict[str, Any] = {"project": run.project, "config": dict(run.settings or {})}
        if "name" not in arguments and "experiment_name" not in arguments:
            defaults["name"] = run.name
        if "logdir" not in arguments and "log_dir" not in arguments:
            defaults["log_dir"] = str(run.folder / "swanlab")
        self._text = swanlab.Text
        self._run = swanlab.init(**(defaults | arguments), settings=settings)
        self.place = f"{self._run.dir}; `swanlab sync` sends it"
        if self._run.mode == "online":
            self.place = self._run.url

    def write(
        self,
        step: int,
        metrics: Mapping[str, float],
        text: str,
    ) -> None:
        content: dict[str, Any] = dict(metrics)
        if text:
            content["samples"] = self._text(text)
        self._run.log(content, step=step)

    def close(self) -> None:
        self._run.finish()
