"""GIFs of the first episodes of a validation, for `render_save_dir`."""

import logging
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from turnwise.envs.recording import View, Views, observed
from turnwise.protocols import AgentLoop, EpisodeObserver, MakeEnv
from turnwise.report.gif import Frame, write_gif
from turnwise.rollout.observed import ObservedLoop
from turnwise.types import Group, Task, Trajectory

logger = logging.getLogger(__name__)

NUM_RECORDED = 4
"""Number of validation tasks whose first sibling is recorded."""


class Pictures:
    """Records the first sibling's episode of some tasks, and writes GIFs below `folder`. Recording only calls
    the environment's `render()`, and changes nothing in an episode."""

    def __init__(self, folder: Path, task_ids: Collection[str]) -> None:
        self.folder = folder
        self._task_ids = frozenset(task_ids)
        self._recordings: dict[str, Views] = {}

    def recorded(
        self, build: Callable[[MakeEnv], AgentLoop], make_env: MakeEnv, make_shown: MakeEnv | None = None
    ) -> AgentLoop:
        """An agent that plays like `build(make_env)` and also records the first sibling of each chosen task,
        in environments of `make_shown` (default: `make_env`)."""
        shown = make_shown or make_env

        def heard_loop(observer: EpisodeObserver) -> AgentLoop:
            return build(lambda task: observed(shown(task), observer))

        return ObservedLoop(build(make_env), self._observer, heard_loop)

    def write(self, name: str, groups: Sequence[Group]) -> list[Path]:
        """Writes a GIF into `folder/name` for each recorded episode that didn't fail:
        `{tag}-{group}-{score}.gif`. Returns the paths. A file that can't be written is only logged."""
        written: list[Path] = []
        for group in groups:
            recording = self._recordings.pop(group.task.id, None)
            trajectory = group.trajectories[0]
            if recording is None or trajectory.status == "failed":
                continue
            views = recording.views
            if len(views) != len(trajectory.turns) + 1:
                logger.warning(
                    "%s: its environment isn't played turn by turn, so there is no picture of it",
                    group.task.id,
                )
                continue
            tag = re.sub(r"[^\w.-]", "_", group.task.tag)
            path = self.folder / name / f"{tag}-{group.index}-{trajectory.score:.2f}.gif"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                written.append(write_gif(path, frames(trajectory, views)))
            except OSError as fault:
                logger.warning("no picture of %s: %s; see render_save_dir", group.task.id, fault)
        if written:
            logger.info("pictures of %d episodes: %s", len(written), written[0].parent)
        return written

    def _observer(self, task: Task, sibling: int) -> Views | None:
        """The observer that collects an episode's views, shared by its retries; None if the episode isn't
        recorded."""
        if sibling or task.id not in self._task_ids:
            return None
        return self._recordings.setdefault(task.id, Views())


def frames(trajectory: Trajectory, views: Sequence[View]) -> list[Frame]:
    """One frame of the start and one after each turn. A turn's caption tells what the model saw, said and
    did."""
    turns = trajectory.turns
    task_id = trajectory.task.id
    result = [Frame(views[0].picture, f"{task_id}\nbefore turn 1 of {len(turns)}", ())]
    score = 0.0
    for number, (turn, view) in enumerate(zip(turns, views[1:], strict=True), start=1):
        score += turn.reward
        title = f"{task_id}\nturn {number} of {len(turns)}"
        parent = trajectory.branched_off(number - 1)
        if parent is not None:
            title += f", off turn {parent + 1}"
        if number == len(turns):
            title += f": {trajectory.status}"
            if trajectory.limit:
                title += f" by {trajectory.limit}"
        action = turn.action
        if action is None:
            action = "nothing that could be parsed"
        caption = (
            ("saw", turn.observation),
            ("said", turn.text),
            ("did", action),
            ("reward", f"{turn.reward:g}, {score:g} so far"),
        )
        result.append(Frame(view.picture, title, caption))
    return result
