"""The fingerprint of training samples: whether a run continues with those of its checkpoint."""

import hashlib
from collections.abc import Sequence
from typing import Any

from turnwise.errors import CheckpointError
from turnwise.types import Sample


class Fingerprint:
    """A hash of the training samples' tokens. A run continues from a checkpoint only if both have the same
    hash."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        digest = hashlib.sha256()
        for sample in samples:
            digest.update(sample.token_ids.tobytes() + b"/")
        self._value = digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return {"sha256": self._value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["sha256"] != self._value:
            raise CheckpointError(
                "the rows of train_files have changed since the checkpoint was saved, so its position is "
                "meaningless; restore them, or start a new run from the weights with pretrain"
            )
