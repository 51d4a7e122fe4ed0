"""Tasks are a pure function of their index, and no two share their randomness."""

from __future__ import annotations

from turnwise.rollout.seeds import TaskSource, sibling_sampling
from turnwise.types import SamplingParams


def source(split="train", run_seed=3):
    return TaskSource(run_seed=run_seed, split=split, tags=("A", "B"), partition=(3, 1))


def test_partition_is_kept_in_every_round():
    assert [source().task(i).tag for i in range(8)] == ["A", "A", "B", "A"] * 2


def test_a_short_batch_meets_every_tag():
    even = TaskSource(run_seed=0, split="val", tags=("A", "B", "C"), partition=(256, 256, 256))
    tags = [even.task(i).tag for i in range(6)]
    assert sorted(tags) == ["A", "A", "B", "B", "C", "C"]


def test_seeds_differ_between_tasks_splits_and_runs():
    seeds = {source(split, seed).task(i).seed for split in ("train", "val") for seed in (3, 4) for i in range(500)}
    assert len(seeds) == 2000


def test_siblings_have_their_own_token_seeds_and_keep_the_rest():
    sampling = SamplingParams(max_new_tokens=7, temperature=0.5, stop_strings=("x",))
    task = source().task(0)
    made = [sibling_sampling(sampling, task, s) for s in range(8)]
    assert len({m.seed for m in made}) == 8
    assert {(m.max_new_tokens, m.temperature, m.stop_strings) for m in made} == {(7, 0.5, ("x",))}
