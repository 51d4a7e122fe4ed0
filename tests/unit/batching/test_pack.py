from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from toy_model import toy_samples

from turnwise.batching.pack import pack, unpack
from turnwise.types import Denominators, Media

STEP = Denominators(10.0, 2.0, 64)


def test_every_array_lines_up_with_its_sample() -> None:
    samples = toy_samples(4)
    batch = pack(samples, STEP)
    assert batch.lengths == tuple(sample.num_tokens for sample in samples)
    for index, sample in enumerate(samples):
        rows = batch.sequence_id == index
        np.testing.assert_array_equal(batch.token_ids[rows], sample.token_ids)
        np.testing.assert_array_equal(batch.position_ids[rows], np.arange(sample.num_tokens))
        np.testing.assert_array_equal(batch.rollout_logprobs[rows], sample.rollout_logprobs)
        assert (batch.weights[rows] == np.float32(sample.weight)).all()
        for turn, span in enumerate(sample.turn_spans):
            assert (batch.turn_id[rows][span.start : span.stop] == turn).all()
    assert ((batch.turn_id == -1) == ~batch.response_mask).all()
    assert batch.weights.dtype == np.float32 and batch.old_logprobs is None and batch.denominators is STEP


def test_optional_arrays_come_along_when_all_samples_have_them() -> None:
    samples = [
        replace(s, old_logprobs=np.full(s.num_tokens, i, np.float32)) for i, s in enumerate(toy_samples(3))
    ]
    batch = pack(samples, STEP)
    np.testing.assert_array_equal(batch.old_logprobs, batch.sequence_id)
    parts = unpack(batch.old_logprobs, batch.lengths)
    assert [len(part) for part in parts] == list(batch.lengths) and all(
        (part == i).all() for i, part in enumerate(parts)
    )
    samples[1] = replace(samples[1], old_logprobs=None)
    with pytest.raises(ValueError, match="1 of 3 samples have no old_logprobs"):
        pack(samples, STEP)


def test_a_hole_in_a_turn_is_of_no_turn() -> None:
    sample = toy_samples(1)[0]
    sample.response_mask[5] = False
    assert pack([sample], STEP).turn_id[4:8].tolist() == [0, -1, 0, -1]


def test_media_positions_move_with_their_sample() -> None:
    image = Media("image", np.zeros((1, 1, 3), np.uint8))
    first, second = toy_samples(2)
    batch = pack([first, replace(second, media=(image,), media_positions=(2,))], STEP)
    assert batch.media == (image,) and batch.media_positions == (first.num_tokens + 2,)


def test_what_cannot_be_packed_is_refused() -> None:
    sample = toy_samples(1)[0]
    with pytest.raises(ValueError, match="at least one"):
        pack([], STEP)
    with pytest.raises(ValueError, match="first token"):
        pack([replace(sample, response_mask=np.ones(sample.num_tokens, np.bool_))], STEP)
    with pytest.raises(ValueError, match="array of 3"):
        unpack(np.zeros(3), (2, 2))
