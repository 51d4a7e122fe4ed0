"""Makes the Samples of a Trajectory: one for each context that the server saw."""

import numpy as np

from turnwise.errors import RolloutError
from turnwise.types import (
    EpisodeParts,
    FloatArray,
    IntArray,
    KeptIds,
    Media,
    Sample,
    Trajectory,
    Turn,
    TurnSpan,
    VersionRun,
    join_kept_ids,
)


def build_samples(trajectory: Trajectory, temperature: float | None = None) -> list[Sample]:
    """One Sample per context, in the order in which contexts end.

    A context is a chain of turns, from a turn that starts a context to a turn that no other continues. If
    several contexts share turns (history branched), the first one trains on them and the others only read
    them. A sample has a span for each turn that it trains on; greedy turns, turns that aren't `is_trained`
    and turns without sampled tokens are never trained on. A context that ends in turns that aren't
    `is_trained` is cut before them, and left out if nothing remains. If `contexts_are` parts, the samples of
    several contexts share their `episode`. Given the trainer's `temperature`, samples record the temperatures
    of turns that were sampled at another temperature. Raises RolloutError if a turn's parent isn't an earlier
    turn, or a context starts with a sampled token."""
    turns = trajectory.turns
    parents = [_parent(turns, index) for index in range(len(turns))]
    continued = {parent for parent in parents if parent is not None}
    trained: set[int] = set()
    samples = []
    for leaf in range(len(turns)):
        if leaf in continued:
            continue
        chain = _chain(parents, leaf)
        is_cut = not turns[leaf].is_trained
        while chain and not turns[chain[-1]].is_trained:
            chain.pop()
        if is_cut and trained.issuperset(chain):
            continue
        samples.append(_sample(turns, chain, trained, trajectory.weight, temperature))
        trained.update(chain)
    if trajectory.contexts_are == "parts" and len(samples) > 1:
        episode = EpisodeParts()
        for sample in samples:
            sample.episode = episode
    return samples


def _parent(turns: list[Turn], index: int) -> int | None:
    turn = turns[index]
    if turn.starts_context or index == 0:
        return None
    parent = index - 1 if turn.parent is None else turn.parent
    if not 0 <= parent < index:
        raise RolloutError(
            f"turn {index} continues turn {parent}; a parent must be an earlier turn of the trajectory"
        )
    return parent


def _chain(parents: list[int | None], leaf: int) -> list[int]:
    chain = [leaf]
    while (parent := parents[chain[-1]]) is not None:
        chain.append(parent)
    return chain[::-1]


def _sample(
    turns: list[Turn],
    chain: list[int],
    trained: set[int],
    weight: float,
    temperature: float | None,
) -> Sample:
    if not len(turns[chain[0]].prompt_ids):
        raise RolloutError(
            f"turn {chain[0]} starts a context without a prompt; its first token would follow nothing"
        )
    token_ids = np.concatenate(
        [ids for index in chain for ids in (turns[index].prompt_ids, turns[index].response_ids)]
    )
    response_mask = np.zeros(len(token_ids), np.bool_)
    logprobs = np.zeros(len(token_ids), np.float32)
    spans: list[TurnSpan] = []
    versions: list[tuple[VersionRun, ...]] = []
    parts: list[tuple[KeptIds | None, IntArray | None, int]] = []
    temperatures: FloatArray | None = None
    media: list[Media] = []
    media_positions: list[int] = []
    position = 0
    for index in chain:
        turn = turns[index]
        media.extend(turn.media)
        media_positions.extend([position] * len(turn.media))
        start = position + len(turn.prompt_ids)
        position += turn.num_tokens
        is_trained = position > start and turn.is_trained and not turn.is_greedy and index not in trained
        own_part = (turn.kept_ids, turn.kept_offsets) if is_trained else (None, None)
        parts += [(None, None, len(turn.prompt_ids)), (*own_part, len(turn.response_ids))]
        if is_trained:
            response_mask[start:position] = True
            logprobs[start:position] = turn.logprobs
            spans.append(TurnSpan(index, start, position))
            versions.append(turn.versions)
            if temperature is None or turn.sampling is None or turn.sampling.temperature == temperature:
                continue
            if temperatures is None:
                temperatures = np.zeros(len(token_ids), np.float32)
            temperatures[start:position] = turn.sampling.temperature
    kept_ids, kept_offsets = join_kept_ids(parts)
    return Sample(
        token_ids=token_ids.astype(np.int64),
        response_mask=response_mask,
        rollout_logprobs=logprobs,
        turn_spans=tuple(spans),
        versions=tuple(versions),
        weight=weight,
        kept_ids=kept_ids,
        kept_offsets=kept_offsets,
        temperatures=temperatures,
        media=tuple(media),
        media_positions=tuple(media_positions),
    )
