"""Attention over branches and their paths: numbers and gradients of scaled_dot_product_attention, sequence by
sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from turnwise.models import packed_attention
from turnwise.models.cpu.attention import BranchAttention, attention_kernels
from turnwise.models.cpu.build import load_kernels
from turnwise.models.cpu.prefix_tree import merge_prefixes
from turnwise.models.packed_attention import PackedSequences

kernels = load_kernels()
pytestmark = pytest.mark.skipif(kernels is None, reason="no C compiler")
CPU = torch.device("cpu")


def shared_prefixes() -> PackedSequences:
    """Siblings that part at several places, and one by itself."""
    rng = np.random.default_rng(0)
    prompt, other = rng.integers(0, 9, 20), rng.integers(0, 9, 7)
    siblings = [
        np.concatenate((prompt[:n], rng.integers(10, 20, m)))
        for n, m in ((20, 9), (20, 1), (13, 17), (20, 30))
    ]
    sequences = [*siblings, other]
    tree = merge_prefixes(torch.from_numpy(np.concatenate(sequences)), [len(s) for s in sequences])
    assert tree is not None
    return PackedSequences.along(tree)


LAYOUTS = {
    "tree": shared_prefixes(),
    "sequences": PackedSequences.of([5, 1, 16, 33], CPU),
    "one": PackedSequences.of([1], CPU),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 2, 8), (3, 1, 32), (2, 2, 64), (2, 1, 128), (5, 1, 24)]
)
def test_numbers_and_gradients(layout: str, heads: int, kv_heads: int, size: int) -> None:
    sequences, num_tokens = LAYOUTS[layout], sum(LAYOUTS[layout].lengths)
    generator = torch.Generator().manual_seed(0)

    def normal(num_heads: int) -> Tensor:
        return torch.randn(num_tokens, num_heads, size, generator=generator).requires_grad_()

    inputs = normal(heads), normal(kv_heads), normal(kv_heads)
    slopes = torch.randn(num_tokens, heads, size, generator=generator)
    own = BranchAttention.apply(*inputs, sequences.branches, 0.4, kernels)
    right = packed_attention._each_sequence(
        *(x.transpose(0, 1)[None] for x in inputs), sequences, 0.0, 0.4, None
    )[0]
    torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-5)
    gradients = (torch.autograd.grad(output, inputs, slopes) for output in (own, right))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


def test_gradients_do_not_depend_on_the_number_of_threads() -> None:
    sequences, before = LAYOUTS["tree"], torch.get_num_threads()
    num_tokens = sum(sequences.lengths)
    q, k, v = (torch.randn(num_tokens, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    found = []
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        out = BranchAttention.apply(q, k, v, sequences.branches, 0.3, kernels)
        found.append((out.detach(), *torch.autograd.grad(out.sin().sum(), (q, k, v))))
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_long_paths_and_other_dtypes_are_left_to_torch() -> None:
    short, long = PackedSequences.of([30], CPU).branches, PackedSequences.of([30, 5000], CPU).branches
    queries = torch.zeros(1, 2, 30, 32)
    assert attention_kernels((queries, queries), short) is not None
    assert attention_kernels((queries, queries), long) is None
    assert attention_kernels((queries, queries.bfloat16()), short) is None
    assert attention_kernels((torch.zeros(1, 2, 30, 12),), short) is None
    assert attention_kernels((queries, queries, torch.zeros(1, 2, 30, 16)), short) is None
    assert attention_kernels((queries, torch.zeros(1, 3, 30, 32)), short) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert attention_kernels((queries, queries), short) is None
