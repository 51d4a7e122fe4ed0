"""turnwise: reinforcement learning of language-model agents, turn by turn.

`Trainer` trains from Python; `RLTrainingTool` is told dicts, `AgenticRLPipeline` a file. They are imported when they are
first asked for, so that `import turnwise` takes no time."""

import os

TYPE_CHECKING = False  # importing typing would be half of a command's start in which Ctrl-C isn't heard yet
if TYPE_CHECKING:
    from turnwise.rl_tool.pipeline import AgenticRLPipeline as AgenticRLPipeline
    from turnwise.rl_tool.tool import RLTrainingTool as RLTrainingTool
    from turnwise.trainer.trainer import Trainer as Trainer

__version__ = "0.1.0"

# GNU OpenMP reads it once, when torch is imported. By default a thread that waits for another one keeps its core busy for
# milliseconds: beside other work on the same cores steps took six times as long. On idle cores steps take 1.02 times as long.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


_LATER = {"Trainer": "trainer.trainer", "RLTrainingTool": "rl_tool.tool", "AgenticRLPipeline": "rl_tool.pipeline"}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return vars(import_module(f"{__name__}.{_LATER[name]}"))[name]
