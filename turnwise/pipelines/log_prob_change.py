"""Measures how far an update moved the policy, on a few of the tokens that it was trained on."""

from collections.abc import Sequence

import numpy as np

from turnwise.pipelines.model_role import ModelRole
from turnwise.types import FloatArray, Metric, Sample

NUM_STEPS = 2
"""The first steps in which a role is trained that are measured."""
MAX_TRAINED = 256
"""Maximum number of trained tokens that are measured."""
SHARE = 1 / 16
"""Maximum share of the step's tokens that pass the model once more. A token that was sampled and trained on
costs ten forward passes or more, so this takes less than 1% of a step's time."""
MIN_TOKENS = 256
"""Tokens that may pass the model once more in a step so small that its share would hold no prompt: a few
milliseconds."""


def log_prob_change(role: ModelRole, samples: Sequence[Sample], step: int) -> list[Metric]:
    """`log_prob_change`: the mean absolute change of the log-probs of at most `MAX_TRAINED` trained tokens,
    in nats, by the update of pipeline step `step`. [] after the first `NUM_STEPS` steps that train `role`, or
    if no sample fits."""
    if not 0 <= step - role.plan.first_step < NUM_STEPS:
        return []
    prefixes = _prefixes(samples)
    if not prefixes:
        return []
    changes = []
    for prefix, new_logprobs in zip(prefixes, role.forward(prefixes, "logprobs"), strict=True):
        difference = np.abs(new_logprobs - _old_logprobs(prefix))
        changes.append(difference[prefix.response_mask])
    change = float(np.concatenate(changes).mean())
    return [Metric(f"{role.name.removesuffix('_train')}/log_prob_change", change)]


def _prefixes(samples: Sequence[Sample]) -> list[Sample]:
    """Beginnings of samples with their first trained tokens, the shortest prompts first, within the limits
    above. A beginning suffices, since the log-prob of a token depends on the tokens before it only."""
    trained = [sample for sample in samples if sample.num_trained and not sample.media]
    remaining = max(MIN_TOKENS, int(SHARE * sum(sample.num_tokens for sample in samples)))
    num_trained = MAX_TRAINED
    prefixes: list[Sample] = []
    for sample in sorted(trained, key=_first_trained):
        places = np.flatnonzero(sample.response_mask)
        places = places[places < remaining][:num_trained]
        if not places.size:
            break
        length = int(places[-1]) + 1
        prefixes.append(_prefix(sample, length))
        remaining -= length
        num_trained -= len(places)
        if not num_trained:
            break
    return prefixes


def _first_trained(sample: Sample) -> int:
    return int(np.argmax(sample.response_mask))


def _old_logprobs(sample: Sample) -> FloatArray:
    if sample.old_logprobs is None:
        return sample.rollout_logprobs
    return sample.old_logprobs


def _prefix(sample: Sample, length: int) -> Sample:
    """The first `length` tokens of a sample, with what a forward pass needs."""
    prefix = Sample(
        token_ids=sample.token_ids[:length],
        response_mask=sample.response_mask[:length],
        rollout_logprobs=sample.rollout_logprobs[:length],
        turn_spans=(),
    )
    if sample.kept_offsets is not None:
        prefix.kept_offsets = sample.kept_offsets[: length + 1]
        if sample.kept_ids is not None:
            prefix.kept_ids = sample.kept_ids[: prefix.kept_offsets[-1]]
    if sample.temperatures is not None:
        prefix.temperatures = sample.temperatures[:length]
    if sample.old_logprobs is not None:
        prefix.old_logprobs = sample.old_logprobs[:length]
    return prefix
