"""Finds the prefixes that sequences of a packed batch share, and leaves out last tokens whose hidden states
nobody reads. Siblings of a group begin with the same prompt and often with the same turns. With causal
attention, equal prefixes have equal hidden states. So the model runs over distinct tokens only, and an index
gives the state of each token of the batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from turnwise.types import IntArray

_SHORT = 512
_LONGEST = 4096
"""Sequence lengths in tokens. A shared prefix needs a mask, with which SDPA doesn't skip future keys. Up to
`_SHORT` the mask is free (CPU, torch 2.13), so short prefixes are shared; above, only long ones; above
`_LONGEST` (a mask over 64 MiB), none."""


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The U distinct tokens among the N of a batch, branch after branch. A branch is the part of a sequence
    after the prefix that it shares with an earlier branch. Its path is all distinct tokens from the root to
    its end; `path_lengths[i] − branch_lengths[i]` of them come before the branch."""

    tokens: Tensor  # int64 [U]: a position of each distinct token in the batch
    nodes: Tensor  # int64 [N]: the index of each token of the batch among the U
    branch_lengths: tuple[int, ...]
    paths: Tensor  # int64 [Σ path lengths]: distinct tokens, path after path
    path_lengths: tuple[int, ...]


def merge_prefixes(token_ids: Tensor, lengths: Sequence[int], reads_last: bool = True) -> PrefixTree | None:
    """The tree of sequences with these `lengths` in `token_ids` [N]; None if no token can be left out.

    Unless `reads_last`, each sequence's last token, to which no other token attends, gets the node of the
    token before it.

    >>> tree = merge_prefixes(torch.tensor([5, 6, 7, 5, 6, 8, 9, 5, 6, 7]), [3, 4, 3])
    >>> tree.tokens.tolist(), tree.nodes.tolist()
    ([0, 1, 2, 5, 6], [0, 1, 2, 0, 1, 3, 4, 0, 1, 2])
    >>> tree.branch_lengths, tree.path_lengths, tree.paths.tolist()
    ((3, 2), (3, 4), [0, 1, 2, 0, 1, 3, 4])
    >>> merge_prefixes(torch.tensor([5, 6, 7, 5, 6, 8, 9]), [3, 4], reads_last=False).nodes.tolist()
    [0, 1, 1, 0, 1, 2, 2]
    """
    sequences = [sequence.numpy() for sequence in token_ids.cpu().split(list(lengths))]
    starts = np.cumsum([0, *lengths[:-1]])
    # Sorted by bytes, each sequence comes right after an earlier one with which it shares the longest prefix.
    order = sorted(range(len(sequences)), key=lambda index: sequences[index].tobytes())
    nodes = np.empty(len(token_ids), np.int64)
    if not reads_last:
        sequences = [sequence[: max(1, len(sequence) - 1)] for sequence in sequences]
    branches: list[IntArray] = []
    paths: list[IntArray] = []
    num_nodes = 0
    previous = path = np.empty(0, np.int64)
    for index in order:
        sequence = sequences[index]
        start = starts[index]
        shared = _num_shared(previous, sequence)
        branch = np.arange(start + shared, start + len(sequence))
        new_nodes = np.arange(num_nodes, num_nodes + len(branch))
        path = np.concatenate([path[:shared], new_nodes])
        path_end = start + len(path)
        nodes[start:path_end] = path
        nodes[path_end : start + lengths[index]] = path[-1]
        if len(branch):
            branches.append(branch)
            paths.append(path)
        num_nodes += len(branch)
        previous = sequence
    if num_nodes == len(token_ids):
        return None
    return PrefixTree(
        tokens=torch.from_numpy(np.concatenate(branches)).to(token_ids.device),
        nodes=torch.from_numpy(nodes).to(token_ids.device),
        branch_lengths=tuple(map(len, branches)),
        paths=torch.from_numpy(np.concatenate(paths)).to(token_ids.device),
        path_lengths=tuple(map(len, paths)),
    )


def _num_shared(previous: IntArray, sequence: IntArray) -> int:
    length = min(len(previous), len(sequence))
    different = (previous[:length] != sequence[:length]).nonzero()[0]
    shared = int(different[0]) if len(different) else length
    # Below these shares, gathering keys and values, or a full rectangle of scores, costs more than sharing
    # saves.
    smallest = len(sequence) / (16 if len(sequence) <= _SHORT else 2)
    if shared < smallest or len(sequence) > _LONGEST:
        return 0
    return shared
