"""turnwise: reinforcement learning of language-model agents, turn by turn.

`Trainer` trains from Python; it is imported when it is first asked for, so that `import turnwise` takes no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turnwise.trainer.trainer import Trainer as Trainer

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "Trainer":
        from turnwise.trainer.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
