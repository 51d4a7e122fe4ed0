"""What an environment shows at one turn. `turnwise.types` exports these too."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Media:
    """One image of an observation, as a uint8 array [H, W, 3]."""

    kind: Literal["image"]
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Observation:
    """An environment's output at one turn: a text, and images if it renders them."""

    text: str
    media: tuple[Media, ...] = ()
