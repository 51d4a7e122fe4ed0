"""turnwise: reinforcement learning of language-model agents, turn by turn. `Trainer` trains from Python,
`RLTrainingTool` runs actions given as dicts, `AgenticRLPipeline` runs a file's stages. Each is imported when
used, so `import turnwise` is fast."""

import os

TYPE_CHECKING = (
    False  # importing typing would double the time at a command's start in which Ctrl-C isn't handled yet
)
if TYPE_CHECKING:
    from turnwise.rl_tool.pipeline import AgenticRLPipeline as AgenticRLPipeline
    from turnwise.rl_tool.tool import RLTrainingTool as RLTrainingTool
    from turnwise.trainer.trainer import Trainer as Trainer

__version__ = "0.1.0"

# GNU OpenMP reads this once, when torch is imported. By default, waiting threads keep cores busy for
# milliseconds: beside two other programs, steps took 3 times as long as with 10000. On idle cores both are
# equally fast; 1000 is 15% slower there.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

_LATER = {
    "Trainer": "trainer.trainer",
    "RLTrainingTool": "rl_tool.tool",
    "AgenticRLPipeline": "rl_tool.pipeline",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return vars(import_module(f"{__name__}.{_LATER[name]}"))[name]
