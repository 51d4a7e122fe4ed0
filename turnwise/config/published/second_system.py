"""Translates the keys of the second published system, verl, that are translated at all."""

from typing import Any, Protocol

from turnwise.spec import TRACKERS

SERVER = ("actor_infer", "strategy_args", "strategy_name")
_ROLLOUT = ("actor_rollout_ref", "rollout")
_MULTI_TURN = (*_ROLLOUT, "multi_turn")
_AGENT = (*_ROLLOUT, "agent")
_TRACE = (*_ROLLOUT, "trace")
_SAME_NAMES = (
    "tool_config_path",
    "interaction_config_path",
    "function_tool_path",
    "max_assistant_turns",
    "max_user_turns",
    "max_parallel_calls",
    "max_tool_response_length",
    "tool_response_truncate_side",
)
"""Keys of `multi_turn` that `agent` has too."""
_KEYS = (
    (("rollout_name",), SERVER),
    ((*_ROLLOUT, "name"), SERVER),
    *(((*_MULTI_TURN, name), ("agent", name)) for name in _SAME_NAMES),
    ((*_MULTI_TURN, "format"), ("agent", "tool_parser")),
    ((*_AGENT, "agent_loop_config_path"), ("agent", "agent_config_path")),
    ((*_AGENT, "default_agent_loop"), ("data", "default_agent")),
    ((*_TRACE, "backend"), ("trace", "backend")),
    ((*_TRACE, "token2text"), ("trace", "token2text")),
    ((*_TRACE, "max_samples_per_step_per_worker"), ("trace", "max_samples_per_step")),
)
"""`(verl's key, our key)`."""

_PROJECTS = {"mlflow": "experiment_name", "wandb": "project", "swanlab": "project"}
"""Tracker → its argument for the project."""


class Translated(Protocol):
    """A config that is being translated."""

    raw: dict[str, Any]
    notes: list[str]

    def section(self, *path: str) -> dict[str, Any]: ...

    def move(self, source: tuple[str, ...], target: tuple[str, ...], value: Any = None) -> None: ...


def answer_second_system(translation: Translated) -> None:
    """Moves verl's keys to ours, and drops those that say what is always so here."""
    data = translation.section("data")
    if data.get("return_raw_chat") is True:
        del data["return_raw_chat"]
        translation.notes.append("data.return_raw_chat: always so here")
    rollout = translation.section(*_ROLLOUT)
    if rollout.get("mode") == "async":
        translation.notes.append("actor_rollout_ref.rollout.mode: always async here")
        del rollout["mode"]
    multi_turn = translation.section(*_MULTI_TURN)
    if multi_turn.get("format") == "gpt-oss":
        multi_turn["format"] = "gpt_oss"
    for source, target in _KEYS:
        *sections, key = source
        if isinstance(translation.section(*sections).get(key), str | int):
            translation.move(source, target)
    _answer_trainer(translation.raw, translation.notes)
    for name in ("multi_turn", "agent", "trace"):
        if rollout.get(name) == {}:
            del rollout[name]
    actor = translation.raw.get("actor_rollout_ref")
    if isinstance(actor, dict) and not rollout and set(actor) <= {"rollout"}:
        del translation.raw["actor_rollout_ref"]


def _answer_trainer(raw: dict[str, Any], notes: list[str]) -> None:
    """Hands the name of verl's project to the trackers in use that keep projects, and to MLflow if it keeps
    traces. Its experiment names the
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
    trace = raw.get("trace")
    has_traces = isinstance(trace, dict) and trace.get("backend") == "mlflow"
    takers = [name for name in _PROJECTS if name in trackers or (name == "mlflow" and has_traces)]
    for name in takers:
        _set_project(raw, name, project)
    if not takers:
        notes.append(
            f"trainer.project_name {project}: no tracker of track_with keeps projects; exp_name names runs"
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
