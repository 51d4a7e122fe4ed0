"""verl's names of a run, `trainer.project_name` and `trainer.experiment_name`, in our vocabulary."""

from typing import Any

from turnwise.spec import TRACKERS

_PROJECTS = {"mlflow": "experiment_name", "wandb": "project", "swanlab": "project"}
"""Tracker → its argument for the project."""


def answer_trainer(raw: dict[str, Any], notes: list[str]) -> None:
    """Hands the name of verl's project to the trackers in use that keep projects. Its experiment names the
    run, in place of `exp_name`, which every config has: the name of its file, if no other. Changes `raw`, a
    config as yet unvalidated, and adds to `notes`."""
    trainer = raw.get("trainer")
    if not isinstance(trainer, dict):
        return
    if isinstance(trainer.get("experiment_name"), str):
        raw["exp_name"] = trainer.pop("experiment_name")
    if isinstance(trainer.get("project_name"), str):
        _answer_project(raw, trainer.pop("project_name"), notes)
    if not trainer:
        del raw["trainer"]


def _answer_project(raw: dict[str, Any], project: str, notes: list[str]) -> None:
    trackers = raw.get("track_with") or ()
    takers = [name for name in _PROJECTS if name in trackers]
    for name in takers:
        _set_project(raw, name, project)
    if not takers:
        notes.append(
            f"trainer.project_name {project}: no tracker of track_with keeps projects; exp_name names the runs"
        )


def _set_project(raw: dict[str, Any], tracker: str, project: str) -> None:
    arguments = raw.setdefault("tracker_kwargs", {})
    if not isinstance(arguments, dict):
        return
    is_by_name = not arguments or any(name in arguments for name in TRACKERS)
    if is_by_name:
        arguments = arguments.setdefault(tracker, {})
    if isinstance(arguments, dict):
        arguments.setdefault(_PROJECTS[tracker], project)
