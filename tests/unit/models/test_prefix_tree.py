from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from toy_model import VOCAB_SIZE, toy_batches, toy_model, toy_samples

from turnwise.models.cpu.prefix_tree import merge_prefixes
from turnwise.models.forward import make_forward
from turnwise.types import Media, Sample

OUTPUTS = frozenset({"logprobs", "entropy"})
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8)


def family() -> list[Sample]:
    """Two prompts; of each, samples that part ways early, late and never."""
    samples = []
    for index, original in enumerate(toy_samples(2, seed=3)):
        rng = np.random.default_rng(index)
        samples.append(original)
        for shared in (3, 8, original.num_tokens - 1, original.num_tokens):
            other = rng.integers(0, VOCAB_SIZE, original.num_tokens - shared)
            samples.append(
                replace(original, token_ids=np.concatenate([original.token_ids[:shared], other]), weight=0.5)
            )
    return [samples[i] for i in np.random.default_rng(9).permutation(len(samples))]


@given(SEQUENCES)
def test_every_distinct_prefix_is_one_node_and_paths_lead_from_the_root(sequences: list[list[int]]) -> None:
    flat = torch.tensor([token for sequence in sequences for token in sequence])
    lengths = [len(sequence) for sequence in sequences]
    prefixes = [tuple(s[:i]) for s in sequences for i in range(1, len(s) + 1)]
    tree = merge_prefixes(flat, lengths)
    if tree is None:
        assert len(set(prefixes)) == len(prefixes)
        return
    assert len(tree.tokens) == sum(tree.branch_lengths) == len(set(prefixes))
    node_of = dict(zip(prefixes, tree.nodes.tolist(), strict=True))
    assert all(node_of[prefix] == node for prefix, node in zip(prefixes, tree.nodes.tolist(), strict=True))
    assert torch.equal(flat[tree.tokens][tree.nodes], flat)
    prefix_of = {node: prefix for prefix, node in node_of.items()}
    start = 0
    for branch, path in zip(tree.branch_lengths, tree.paths.split(tree.path_lengths), strict=True):
        assert [len(prefix_of[node]) for node in path.tolist()] == list(range(1, len(path) + 1))
        assert path[-branch:].tolist() == list(range(start, start + branch))
        start += branch


@pytest.mark.parametrize(
    ("length", "num_shared", "is_merged"),
    [
        (32, 1, False),
        (32, 2, True),
        (512, 32, True),
        (513, 256, False),
        (513, 257, True),
        (4096, 4096, True),
        (4097, 4097, False),
    ],
)
def test_prefixes_are_merged_only_where_that_saves_time_and_memory(
    length: int, num_shared: int, is_merged: bool
) -> None:
    sequences = torch.arange(2 * length).view(2, length)
    sequences[1, :num_shared] = sequences[0, :num_shared]
    tree = merge_prefixes(sequences.flatten(), [length, length])
    assert (tree is not None) == is_merged
    assert tree is None or len(tree.tokens) == 2 * length - num_shared


@pytest.mark.parametrize(
    "settings",
    [{}, {"model_type": "qwen2"}, {"model_type": "mistral", "sliding_window": 6}, {"model_type": "cohere"}],
)
def test_merged_prefixes_change_neither_outputs_nor_gradients(settings: dict[str, Any]) -> None:
    batch = toy_batches(family())[0].map(torch.as_tensor)
    results = []
    for attention in ("eager", None):
        model = toy_model(**settings, **({"attn_implementation": attention} if attention else {}))
        outputs = make_forward(model, temperature=0.8)(batch, OUTPUTS)
        probe = torch.randn(2, batch.num_tokens, generator=torch.Generator().manual_seed(0))
        (probe * torch.stack([outputs.logprobs, outputs.entropy])).sum().backward()
        results.append(
            (outputs.logprobs.detach(), outputs.entropy.detach(), [p.grad for p in model.parameters()])
        )
    (expected, expected_entropy, expected_gradients), (logprobs, entropy, gradients) = results
    for value, reference in ((logprobs, expected), (entropy, expected_entropy)):
        assert (value - reference).abs().mean() <= 1e-6 and (value - reference).abs().max() <= 1e-4
    for value, reference in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("media", "num_seen"), [((), "distinct"), ((Media("image", np.zeros((1, 1, 3), np.uint8)),), "all")]
)
def test_the_model_sees_each_prefix_once_but_never_merges_images(
    media: tuple[Media, ...], num_seen: str
) -> None:
    batch = replace(toy_batches(family())[0].map(torch.as_tensor), media=media)
    tree = merge_prefixes(batch.token_ids, batch.lengths, reads_last=False)
    assert tree is not None and len(tree.tokens) < 0.6 * batch.num_tokens
    model, seen = toy_model(), []
    model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0].numel())
    )
    forward = make_forward(model)
    assert forward.has_plain_head
    seen.clear()
    forward(batch, OUTPUTS)
    assert seen == [len(tree.tokens) if num_seen == "distinct" else batch.num_tokens]
