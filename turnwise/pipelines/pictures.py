"""Animated pictures of the first episodes of a validation, for `render_save_dir`."""

import logging
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from turnwise.envs.recording import EpisodeRecording, RecordingEnv
from turnwise.protocols import AgentLoop, Env, OpenConversation
from turnwise.report.gif import Frame, write_gif
from turnwise.types import Group, SamplingParams, Task, Trajectory

logger = logging.getLogger(__name__)

NUM_RECORDED = 4
"""Number of validation tasks whose first sibling is recorded."""

MakeEnv = Callable[[Task], Env]


class Pictures:
    """Records the episodes of some tasks while they are played, and writes them as GIFs below `folder`.

    Nothing else of an episode changes: its environment is only looked at, by `render()`."""

    def __init__(self, folder: Path, task_ids: Collection[str]) -> None:
        self.folder = folder
        self._task_ids = frozenset(task_ids)
        self._recordings: dict[str, EpisodeRecording] = {}

    def recorded(self, build: Callable[[MakeEnv], AgentLoop], make_env: MakeEnv) -> AgentLoop:
        """The agent that `build` makes for the environments of `make_env`, with a record of the episodes that are asked for."""
        return _RecordedAgent(build, make_env, self._start)

    def write(self, name: str, groups: Sequence[Group]) -> list[Path]:
        """One GIF in `folder/name` for each recorded episode that came to an end: `{tag}-{group}-{score}.gif`.

        A disk that is full or can't be written to costs the pictures, not the run."""
        written: list[Path] = []
        for group in groups:
            recording = self._recordings.pop(group.task.id, None)
            trajectory = group.trajectories[0]
            if recording is None or trajectory.status == "failed":
                continue
            if len(recording.views) != len(trajectory.turns) + 1:
                logger.warning("%s: its environment isn't played turn by turn, so there is no picture of it", group.task.id)
                continue
            tag = re.sub(r"[^\w.-]", "_", group.task.tag)
            path = self.folder / name / f"{tag}-{group.index}-{trajectory.score:.2f}.gif"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                written.append(write_gif(path, frames(trajectory, recording)))
            except OSError as fault:
                logger.warning("no picture of %s: %s; see render_save_dir", group.task.id, fault)
        if written:
            logger.info("pictures of %d episodes: %s", len(written), written[0].parent)
        return written

    def _start(self, task: Task, sibling: int) -> EpisodeRecording | None:
        """The record of an episode that begins, again where it is tried again; None for one that isn't asked for."""
        if sibling or task.id not in self._task_ids:
            return None
        return self._recordings.setdefault(task.id, EpisodeRecording())


class _RecordedAgent:
    """Plays like the agent that `build` makes; an episode to be recorded gets one of its own, with watched environments."""

    def __init__(
        self,
        build: Callable[[MakeEnv], AgentLoop],
        make_env: MakeEnv,
        start: Callable[[Task, int], EpisodeRecording | None],
    ) -> None:
        self._build = build
        self._make_env = make_env
        self._start = start
        self._agent = build(make_env)

    async def run(
        self, task: Task, sibling: int, open_conversation: OpenConversation, sampling: SamplingParams
    ) -> list[Trajectory]:
        recording = self._start(task, sibling)
        if recording is None:
            return await self._agent.run(task, sibling, open_conversation, sampling)
        agent = self._build(lambda task: RecordingEnv(self._make_env(task), recording))
        return await agent.run(task, sibling, open_conversation, sampling)


def frames(trajectory: Trajectory, recording: EpisodeRecording) -> list[Frame]:
    """The start, and the world after each turn beside what the model saw, said and did in it."""
    turns, task = trajectory.turns, trajectory.task
    result = [Frame(recording.views[0].picture, f"{task.id}\nbefore turn 1 of {len(turns)}", ())]
    score = 0.0
    for number, (turn, view) in enumerate(zip(turns, recording.views[1:], strict=True), start=1):
        score += turn.reward
        title = f"{task.id}\nturn {number} of {len(turns)}"
        if number == len(turns):
            title += f": {trajectory.status}{f' by {trajectory.limit}' if trajectory.limit else ''}"
        caption = (
            ("saw", turn.observation),
            ("said", turn.text),
            ("did", "nothing that could be parsed" if turn.action is None else turn.action),
            ("reward", f"{turn.reward:g}, {score:g} so far"),
        )
        result.append(Frame(view.picture, title, caption))
    return result
