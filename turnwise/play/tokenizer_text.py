"""Texts of FrozenLake episodes and of files, to train the tokenizer of a new small model on."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args

from turnwise.agents.env_agent import EnvAgentSettings
from turnwise.envs.frozen_lake.env import FrozenLakeEnv, ObservationKind
from turnwise.envs.players import RandomPlayer
from turnwise.errors import DataError
from turnwise.play.demonstrations import demonstrations
from turnwise.runtime.jsonl import not_utf8
from turnwise.spec import DEFAULT_SYSTEM_TEMPLATE, DEFAULT_TURN_TEMPLATE
from turnwise.types import Message, Task, derive_seed

_NUM_EPISODES = 200


def environment_text() -> Iterator[str]:
    """The texts of FrozenLake episodes of a random player, in each form of observations."""
    settings = EnvAgentSettings(
        tag="FrozenLake",
        system_template=DEFAULT_SYSTEM_TEMPLATE,
        turn_template=DEFAULT_TURN_TEMPLATE,
        max_steps=10,
    )
    for kind in get_args(ObservationKind):
        tasks = [_corpus_task(kind, index) for index in range(_NUM_EPISODES)]

        def make_env(task: Task, kind: ObservationKind = kind) -> FrozenLakeEnv:
            return FrozenLakeEnv(observation=kind, split=task.split)

        yield from message_text(
            demonstrations(
                make_env,
                settings,
                lambda env, task: RandomPlayer(env, task.seed),
                tasks,
            )
        )


def _corpus_task(kind: str, index: int) -> Task:
    return Task(
        id=f"corpus/{kind}/{index}",
        tag="FrozenLake",
        split="train",
        seed=derive_seed("corpus", kind, index),
    )


def message_text(rows: Iterable[Sequence[Message]]) -> Iterator[str]:
    """One text per row: the contents of its messages, joined by line breaks."""
    for messages in rows:
        yield "\n".join(str(message["content"]) for message in messages)


def file_text(paths: list[str]) -> Iterator[str]:
    """The lines of UTF-8 text files. Raises DataError if a path is anything else."""
    for path in map(Path, paths):
        if not path.is_file():
            fault = "is a folder" if path.is_dir() else "no such file"
            raise DataError(f"{path}: {fault}; --text takes text files for the tokenizer")
        try:
            yield from path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}{not_utf8(error)}; --text takes text files") from error
