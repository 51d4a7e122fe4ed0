"""Generalised advantage estimation over the steps of trajectories, and discounted sums.

Arrays [R] hold the steps of T trajectories one after another; `lengths` [T] counts each one's steps. A step is a response token
or a turn. Observations, template and padding are not in the arrays, so no credit runs through them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Lengths = NDArray[np.int64]


def discounted_sums(x: Array, lengths: Lengths, discount: float) -> Array:
    """y_t = x_t + discount·y_{t+1} in each trajectory, y = 0 after its end.

    >>> discounted_sums(np.array([0.0, 0, 1, 0, 0, 2]), np.array([6]), 0.5).tolist()
    [0.3125, 0.625, 1.25, 0.5, 1.0, 2.0]
    """
    trajectory = np.repeat(np.arange(len(lengths)), lengths)
    step = np.arange(len(x)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    table = np.zeros((lengths.max(initial=0) + 1, len(lengths)))
    table[step, trajectory] = x
    for row in range(len(table) - 2, -1, -1):
        table[row] += discount * table[row + 1]
    return table[step, trajectory]


def gae(
    rewards: Array, values: Array, lengths: Lengths, gamma: float, lambd: float, last_values: Array | None = None
) -> tuple[Array, Array]:
    """Advantages and returns [R] (Schulman et al. 2016, arXiv:1506.02438, eq. 16):

    δ_t = r_t + γV_{t+1} − V_t,  A_t = δ_t + γλA_{t+1},  returns = A + V.

    V_{t+1} after the last step is 0 where the episode ended, and `last_values` [T] where it was cut from outside.

    >>> rewards, values = np.array([0.0, 1, 0, 2]), np.array([0.2, 0.3, 0.5, 0.6])
    >>> advantages, returns = gae(rewards, values, np.array([4]), gamma=1.0, lambd=0.95)
    >>> advantages.round(6).tolist(), returns.round(6).tolist()
    ([2.530575, 2.5585, 1.43, 1.4], [2.730575, 2.8585, 1.93, 2.0])
    """
    ends = np.cumsum(lengths)[lengths > 0] - 1
    following = np.zeros_like(values)
    following[:-1] = values[1:]
    following[ends] = 0.0 if last_values is None else last_values[lengths > 0]
    advantages = discounted_sums(rewards + gamma * following - values, lengths, gamma * lambd)
    return advantages, advantages + values
