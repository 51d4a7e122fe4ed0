"""What every inference server must do, as checks over a factory: `await check(make_server, model)`.

`make_server(model, max_length=..., decode=...)` gives a fresh server of version 0 over a small fp32 model,
whose own plain forward pass is the reference for tokens and log-probs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from transformers import PreTrainedModel

from turnwise.errors import ModelError, ServerError
from turnwise.protocols import InferenceServer
from turnwise.transfer.live import LiveWeights, manifest_of
from turnwise.transfer.manifest import WeightManifest
from turnwise.types import Completion, IntArray, SamplingParams, VersionRun

ServerFactory = Callable[..., InferenceServer]
MAX_LENGTH = 96


def decode_letters(token_ids: Sequence[int]) -> str:
    """A text form for any vocabulary: one letter a token."""
    return "".join(chr(ord("a") + token % 26) for token in token_ids)


def prompts_of(
    model: PreTrainedModel, count: int, seed: int = 0, low: int = 3, high: int = 30
) -> list[list[int]]:
    """Random prompts of `low` to `high` − 1 tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, model.config.vocab_size, rng.integers(low, high)).tolist() for _ in range(count)]


def reference_logprobs(
    model: PreTrainedModel, prompt_ids: Sequence[int], response_ids: IntArray, sampling: SamplingParams
) -> np.ndarray:
    """Log-probs [R] of a response under the distributions that `sampling` draws from, by one plain forward
    pass."""
    logits = _logits(model, [*prompt_ids, *response_ids.tolist()])
    return _drawn(_distributions(logits, prompt_ids, response_ids, sampling), response_ids)


def _logits(model: PreTrainedModel, context: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.tensor([context], device=model.device)).logits[0].float().cpu()


def _distributions(
    logits: torch.Tensor, prompt_ids: Sequence[int], response_ids: IntArray, sampling: SamplingParams
) -> list[np.ndarray]:
    """The log-probs [V] from which each token of a response is drawn, by the logits [N, V] of the whole
    context."""
    context = [*prompt_ids, *response_ids.tolist()]
    return [_processed(logits[t - 1], context[:t], sampling) for t in range(len(prompt_ids), len(context))]


def _drawn(distributions: Sequence[np.ndarray], response_ids: IntArray) -> np.ndarray:
    return np.array([logprobs[token] for logprobs, token in zip(distributions, response_ids, strict=True)])


def _processed(logits: torch.Tensor, context: Sequence[int], sampling: SamplingParams) -> np.ndarray:
    """Log-probs [V] after repetition penalty, temperature, top-k, top-p and min-p, one token after another,
    as defined."""
    scores = logits.double().numpy().copy()
    for token in set(context):
        scores[token] *= sampling.repetition_penalty if scores[token] < 0 else 1 / sampling.repetition_penalty
    scores /= sampling.temperature
    order = np.argsort(-scores)
    if sampling.top_k:
        scores[order[sampling.top_k :]] = -np.inf
    mass = 0.0
    for token in order:
        prob = np.exp(scores[token]) / np.exp(scores[order]).sum() if mass < sampling.top_p else 0.0
        if mass >= sampling.top_p:
            scores[token] = -np.inf
        mass += prob
    scores[scores < scores.max() + np.log(max(sampling.min_p, 1e-300))] = -np.inf
    return scores - np.log(np.exp(scores).sum())


def assert_logprobs(
    model: PreTrainedModel, prompt_ids: Sequence[int], completion: Completion, sampling: SamplingParams
) -> np.ndarray:
    """Checks each log-prob of a completion against the reference within 1e-4; the differences [R]."""
    logits = _logits(model, [*prompt_ids, *completion.token_ids.tolist()])
    distributions = _distributions(logits, prompt_ids, completion.token_ids, sampling)
    expected = _drawn(distributions, completion.token_ids)
    assert np.isfinite(expected).all(), "a sampled token has probability 0 under the reference"
    differences = np.abs(completion.logprobs - expected)
    if completion.kept_ids is not None and completion.kept_offsets is not None:
        expected_ids = [np.flatnonzero(np.isfinite(logprobs)).tolist() for logprobs in distributions]
        kept = [completion.kept_ids[start:stop] for start, stop in pairwise(completion.kept_offsets)]
        assert [sorted(ids.tolist()) for ids in kept] == expected_ids, (
            "the kept ids aren't those of the reference"
        )
    assert differences.max(initial=0.0) <= 1e-4, f"log-probs differ by up to {differences.max():.2e}"
    return differences


async def greedy_equals_reference(make_server: ServerFactory, model: PreTrainedModel) -> None:
    server = make_server(model, max_length=MAX_LENGTH)
    prompts = prompts_of(model, 5)
    greedy = [
        SamplingParams(8, temperature=0.0),
        SamplingParams(8, do_sample=False),
        SamplingParams(8, top_k=3, do_sample=False),
    ]
    choices = [greedy[i % 3] for i in range(5)]
    completions = await asyncio.gather(
        *(server.generate(p, choices[i], f"c{i}") for i, p in enumerate(prompts))
    )
    for prompt, completion in zip(prompts, completions, strict=True):
        context = list(prompt)
        for token in completion.token_ids.tolist():
            assert token == int(_logits(model, context)[-1].argmax())
            context.append(token)
        assert completion.logprobs.tolist() == [0.0] * 8
    await server.close()


mean_bound = 1e-6
"""The mean difference of log-probs that is allowed. An engine with kernels of its own may set another."""


async def logprobs_match_a_forward_pass(make_server: ServerFactory, model: PreTrainedModel) -> None:
    choices = [
        SamplingParams(9),
        SamplingParams(9, temperature=0.6),
        SamplingParams(9, top_k=5),
        SamplingParams(9, top_p=0.7, temperature=1.3),
        SamplingParams(9, top_k=20, top_p=0.8, temperature=0.8),
        SamplingParams(
            9, top_k=20, min_p=0.2, temperature=0.8
        ),  # without top_p, which vLLM applies after min_p
    ]
    await _match(make_server, model, choices)


async def penalties_match_a_forward_pass(make_server: ServerFactory, model: PreTrainedModel) -> None:
    choices = [
        SamplingParams(9, repetition_penalty=1.4),
        SamplingParams(9, top_k=20, top_p=0.8, repetition_penalty=1.2, temperature=0.8),
    ]
    await _match(make_server, model, choices, mean=1e-5)  # a penalty multiplies the rounding errors too


async def _match(
    make_server: ServerFactory, model: PreTrainedModel, choices: list[SamplingParams], mean: float = 0.0
) -> None:
    mean = max(mean, mean_bound)
    server = make_server(model, max_length=MAX_LENGTH)
    prompts = prompts_of(model, len(choices))
    choices = [replace(sampling, seed=index) for index, sampling in enumerate(choices)]
    completions = await asyncio.gather(
        *(server.generate(p, s, str(s.seed)) for p, s in zip(prompts, choices, strict=True))
    )
    differences = []
    for prompt, sampling, completion in zip(prompts, choices, completions, strict=True):
        assert len(completion.token_ids) == 9
        has_kept_ids = completion.kept_ids is not None
        assert has_kept_ids == (sampling.keeps_ids and server.info().sampling_mask)
        differences.append(assert_logprobs(model, prompt, completion, sampling))
    assert np.mean(differences) <= mean, f"{np.mean(differences):.2e} nats on average"
    await server.close()


async def samples_follow_the_distribution(make_server: ServerFactory, model: PreTrainedModel) -> None:
    server = make_server(model, max_length=MAX_LENGTH)
    prompt, sampling, count = [3, 1, 4], SamplingParams(1, top_k=6), 300
    completions = await asyncio.gather(
        *(server.generate(prompt, replace(sampling, seed=seed), f"c{seed}") for seed in range(count))
    )
    probs = np.exp(_processed(_logits(model, prompt)[-1], prompt, sampling))
    frequencies = np.bincount([c.token_ids[0] for c in completions], minlength=len(probs)) / count
    assert np.abs(frequencies - probs).sum() / 2 < 0.1
    await server.close()


async def stops(make_server: ServerFactory, model: PreTrainedModel) -> None:
    server = make_server(model, max_length=MAX_LENGTH, decode=decode_letters)
    prompt = prompts_of(model, 1)[0]
    free = await server.generate(prompt, SamplingParams(12, seed=5), "free")
    stop_token = int(free.token_ids[4])
    end = free.token_ids.tolist().index(stop_token) + 1
    by_token = await server.generate(
        prompt, SamplingParams(12, seed=5, stop_token_ids=(stop_token,)), "token"
    )
    assert by_token.token_ids.tolist() == free.token_ids[:end].tolist()
    assert by_token.finish_reason == "stop"
    text = decode_letters(free.token_ids.tolist())
    stop_string = text[5:7]
    end = text.index(stop_string) + 2
    by_string = await server.generate(
        prompt, SamplingParams(12, seed=5, stop_strings=("??", stop_string)), "string"
    )
    assert by_string.token_ids.tolist() == free.token_ids[:end].tolist()
    assert by_string.finish_reason == "stop"
    await server.close()


async def budgets(make_server: ServerFactory, model: PreTrainedModel) -> None:
    server = make_server(model, max_length=40)
    prompt = prompts_of(model, 1, low=30, high=31)[0]
    short = await server.generate(prompt, SamplingParams(1), "short")
    clipped = await server.generate(prompt, SamplingParams(500), "clipped")
    assert (len(short.token_ids), short.finish_reason) == (1, "length")
    assert (len(clipped.token_ids), clipped.finish_reason) == (10, "length")
    await server.close()


async def a_crowd_changes_nothing(make_server: ServerFactory, model: PreTrainedModel) -> None:
    prompts = prompts_of(model, 8, seed=1)

    async def ask(server: InferenceServer, index: int) -> list[int]:
        sampling = SamplingParams(4 + index, temperature=0.9, seed=index)
        return (await server.generate(prompts[index], sampling, f"c{index}")).token_ids.tolist()

    crowd = make_server(model, max_length=MAX_LENGTH)
    together = await asyncio.gather(*(ask(crowd, index) for index in range(8)))
    alone = make_server(model, max_length=MAX_LENGTH)
    assert list(together) == [await ask(alone, index) for index in range(8)]
    await crowd.close()
    await alone.close()


async def abort_returns_partial_tokens(make_server: ServerFactory, model: PreTrainedModel) -> None:
    server = make_server(model, max_length=MAX_LENGTH)
    prompt, sampling = prompts_of(model, 1)[0], SamplingParams(60, seed=9)
    whole = await server.generate(prompt, sampling, "whole")
    task = asyncio.create_task(server.generate(prompt, sampling, "cut"))
    await _let_it_sample(server)
    await server.abort("cut")
    cut = await task
    count = len(cut.token_ids)
    assert cut.finish_reason == "aborted" and count < 60
    assert cut.token_ids.tolist() == whole.token_ids[:count].tolist()
    await server.abort("nobody")
    await server.close()


async def later_turns_equal_fresh_ones(make_server: ServerFactory, model: PreTrainedModel) -> None:
    server, fresh = make_server(model, max_length=MAX_LENGTH), make_server(model, max_length=MAX_LENGTH)
    rng = np.random.default_rng(4)

    async def converse(index: int) -> None:
        context = prompts_of(model, 1, seed=index)[0]
        for turn in range(4):
            sampling = SamplingParams(int(rng.integers(1, 6)), seed=10 * index + turn)
            kept = await server.generate(context, sampling, f"c{index}")
            anew = await fresh.generate(context, sampling, f"c{index}.{turn}")
            assert kept.token_ids.tolist() == anew.token_ids.tolist()
            assert_logprobs(model, context, kept, sampling)
            # At one turn the context is rewritten: only a part of what is cached still holds.
            context = context[:7] if turn == 2 else context + kept.token_ids.tolist()
            context = context + rng.integers(0, model.config.vocab_size, int(rng.integers(0, 9))).tolist()
        await server.release(f"c{index}")

    await asyncio.gather(*(converse(index) for index in range(4)))
    await server.close()
    await fresh.close()


async def a_shared_prompt_changes_nothing(make_server: ServerFactory, model: PreTrainedModel) -> None:
    server = make_server(model, max_length=MAX_LENGTH)
    prompt = prompts_of(model, 1, low=40, high=41)[0]
    # Four siblings, a shorter one, and some that go their own ways: at once, and then from what these have
    # left.
    prompts = (
        [prompt] * 4 + [prompt[:30]] + [[*prompt[:32], *other] for other in prompts_of(model, 3, seed=1)]
    )
    for turn in range(2):
        choices = [SamplingParams(5, seed=10 * turn + index) for index in range(len(prompts))]
        asked = [server.generate(p, s, f"c{turn}.{s.seed}") for p, s in zip(prompts, choices, strict=True)]
        for p, s, completion in zip(prompts, choices, await asyncio.gather(*asked), strict=True):
            assert_logprobs(model, p, completion, s)
    await server.close()


async def weight_update_takes_effect(make_server: ServerFactory, model: PreTrainedModel) -> None:
    server = make_server(model, max_length=MAX_LENGTH)
    prompt, sampling = prompts_of(model, 1)[0], SamplingParams(6, seed=2)
    before = await server.generate(prompt, sampling, "c")
    assert before.versions == (VersionRun(0, 6),)
    await server.suspend("finish")
    held = asyncio.create_task(server.generate([*prompt, *before.token_ids.tolist(), 1], sampling, "c"))
    perturb(model)
    await _let_it_sample(server)
    assert not held.done()
    await _update(server, model, 7)
    after = await held
    assert after.versions == (VersionRun(7, 6),)
    assert_logprobs(model, [*prompt, *before.token_ids.tolist(), 1], after, sampling)
    await server.close()


async def weights_that_do_not_fit_are_refused_before_they_are_sent(
    make_server: ServerFactory, model: PreTrainedModel
) -> None:
    server = make_server(model, max_length=MAX_LENGTH)
    manifest = manifest_of(model.named_parameters())
    name, spec = next(iter(manifest.tensors.items()))
    misshapen = {**manifest.tensors, name: replace(spec, shape=(3, *spec.shape[1:]))}
    unknown = {**manifest.tensors, "model.unknown.weight": spec}
    missing = {other: tensor for other, tensor in manifest.tensors.items() if other != name}
    for tensors, culprit in ((misshapen, name), (unknown, "model.unknown.weight"), (missing, name)):
        try:
            await server.begin_update(WeightManifest(tensors))
        except ModelError as error:
            assert culprit in str(error) and "model_name_or_path" in str(error)
        else:
            raise AssertionError(f"{culprit} is wrong, and was accepted")
    await server.begin_update(manifest)
    completion = await server.generate([1, 2, 3], SamplingParams(2), "after it")
    assert completion.versions == (VersionRun(0, 2),)
    await server.close()


async def interrupted_requests_go_on(make_server: ServerFactory, model: PreTrainedModel) -> None:
    prompt, sampling = prompts_of(model, 1)[0], SamplingParams(40, seed=3)
    server = make_server(model, max_length=MAX_LENGTH)
    task = asyncio.create_task(server.generate(prompt, sampling, "goes-on"))
    await _let_it_sample(server)
    await server.suspend("abort")
    before = await task
    assert before.finish_reason == "aborted" and 0 <= len(before.token_ids) < 40
    assert_logprobs(model, prompt, before, sampling)
    held = asyncio.create_task(
        server.generate(prompt, sampling, "goes-on", partial_ids=before.token_ids.tolist())
    )
    await _let_it_sample(server)
    assert not held.done()
    perturb(model)
    await _update(server, model, 1)
    after = await held
    assert after.versions == (VersionRun(1, 40 - len(before.token_ids)),)
    assert_logprobs(model, [*prompt, *before.token_ids.tolist()], after, sampling)
    whole = await server.generate(prompt, sampling, "whole")
    partial = whole.token_ids[:15].tolist()
    rest = (await server.generate(prompt, sampling, "rest", partial_ids=partial)).token_ids.tolist()
    stop = replace(sampling, stop_strings=(decode_letters([*partial[13:], *rest[:2]]),))
    stopping = make_server(model, max_length=MAX_LENGTH, decode=decode_letters)
    across = await stopping.generate(prompt, stop, "stops across", partial_ids=partial)
    assert across.finish_reason == "stop" and across.token_ids.tolist() == rest[:2]
    await stopping.close()
    await server.close()


async def frozen_requests_go_on(make_server: ServerFactory, model: PreTrainedModel) -> None:
    """Requests that stand still over an update keep the KV of the old weights, and what nobody else may read
    of it."""
    server, (prompt, other) = make_server(model, max_length=MAX_LENGTH), prompts_of(model, 2, low=30, high=31)
    sampling, short = SamplingParams(60, seed=3), SamplingParams(4, seed=4)
    assert "keep" in server.info().suspensions and server.info().weight_versions
    idle = await server.generate(other, short, "idle")
    tasks = [
        asyncio.create_task(server.generate(p, sampling, f"kept {len(p)}")) for p in (prompt, prompt[:25])
    ]
    await _let_it_sample(server)
    await server.suspend("keep")
    sibling = asyncio.create_task(server.generate(prompt, short, "sibling"))
    await _let_it_sample(server)
    assert not sibling.done() and not any(task.done() for task in tasks)
    old = deepcopy(model)
    perturb(model)
    await _update(server, model, 7)
    for start, task in zip((prompt, prompt[:25]), tasks, strict=True):
        kept = await task
        assert [run.version for run in kept.versions] in ([0, 7], [7]) and len(kept.token_ids) == 60
        assert_frozen(old, model, start, kept, sampling)
    assert len((await tasks[0]).versions) == 2, "the first request wasn't met in the middle"
    # What the old weights computed serves nobody: a sibling, another conversation's next turn, and its own.
    turns = {"sibling": prompt, "idle": [*other, *idle.token_ids.tolist()]}
    turns["kept 30"] = [*prompt, *(await tasks[0]).token_ids.tolist(), 1]
    for name, context in turns.items():
        completion = await (sibling if name == "sibling" else server.generate(context, short, name))
        assert completion.versions == (VersionRun(7, 4),)
        assert_logprobs(model, context, completion, short)
    await server.close()


def assert_frozen(
    old: PreTrainedModel,
    new: PreTrainedModel,
    prompt_ids: Sequence[int],
    completion: Completion,
    sampling: SamplingParams,
) -> None:
    """Checks each log-prob of a response that stood still while `new` weights took the place of `old`: its
    first tokens are of the old ones, the others of the new ones over the keys and values that the old ones
    had computed."""
    context = [*prompt_ids, *completion.token_ids.tolist()]
    num_old = sum(run.num_tokens for run in completion.versions[:-1])
    # The last token before the update was sampled, and nothing of it computed yet.
    cut = len(prompt_ids) + num_old - 1 if num_old else 0
    with torch.no_grad():
        cache, parts = None, []
        for model, ids in ((old, context[:cut]), (new, context[cut:])):
            if ids:
                output = model.eval()(
                    torch.tensor([ids], device=model.device), past_key_values=cache, use_cache=True
                )
                cache = output.past_key_values
                parts.append(output.logits[0].float().cpu())
    distributions = _distributions(torch.cat(parts), prompt_ids, completion.token_ids, sampling)
    differences = np.abs(completion.logprobs - _drawn(distributions, completion.token_ids))
    assert differences.max() <= 1e-4, (
        f"log-probs differ by up to {differences.max():.2e}, {num_old} tokens before the update"
    )


async def a_continuation_draws_the_same(make_server: ServerFactory, model: PreTrainedModel) -> None:
    server = make_server(model, max_length=MAX_LENGTH)
    prompt, sampling = prompts_of(model, 1)[0], SamplingParams(40, seed=3)
    whole = await server.generate(prompt, sampling, "whole")
    rest = await server.generate(prompt, sampling, "rest", partial_ids=whole.token_ids[:15].tolist())
    assert rest.token_ids.tolist() == whole.token_ids[15:].tolist()
    await server.close()


async def stop_strings_need_text(make_server: ServerFactory, model: PreTrainedModel) -> None:
    server = make_server(model, max_length=MAX_LENGTH)
    (answer,) = await asyncio.gather(
        server.generate([1], SamplingParams(5, stop_strings=("a",)), "no decode"), return_exceptions=True
    )
    assert isinstance(answer, ServerError)
    await server.close()


async def a_bad_request_fails_alone(make_server: ServerFactory, model: PreTrainedModel) -> None:
    server = make_server(model, max_length=MAX_LENGTH)
    good = SamplingParams(5, seed=1)
    vocab_size = model.config.vocab_size
    answers = await asyncio.gather(
        server.generate([1, 2, 3], good, "good"),
        server.generate([], good, "empty"),
        server.generate([1, vocab_size], good, "beyond the vocabulary"),
        server.generate([1, -1], good, "negative"),
        server.generate([1] * MAX_LENGTH, good, "too long"),
        server.generate([1], replace(good, max_new_tokens=0), "no budget"),
        server.generate([1], replace(good, top_p=0.0), "no nucleus"),
        return_exceptions=True,
    )
    assert isinstance(answers[0], Completion) and len(answers[0].token_ids) == 5
    assert all(isinstance(answer, ServerError) for answer in answers[1:]), answers
    await server.close()


async def close_fails_what_is_in_flight(make_server: ServerFactory, model: PreTrainedModel) -> None:
    server = make_server(model, max_length=MAX_LENGTH)
    task = asyncio.create_task(server.generate([1, 2, 3], SamplingParams(80), "c"))
    await asyncio.sleep(0)
    await server.close()
    (failure,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(failure, ServerError)
    (failure,) = await asyncio.gather(server.generate([1], SamplingParams(1), "d"), return_exceptions=True)
    assert isinstance(failure, ServerError)


@runtime_checkable
class SamplesElsewhere(Protocol):
    """A server in another process, which can be waited for until it has sampled a few tokens."""

    async def let_it_sample(self) -> None: ...


async def _let_it_sample(server: InferenceServer) -> None:
    """Some turns of the event loop, in which a server in this process samples a few tokens."""
    if isinstance(server, SamplesElsewhere):
        await server.let_it_sample()
    for _ in range(20):
        await asyncio.sleep(0)


async def _update(server: InferenceServer, model: PreTrainedModel, version: int) -> None:
    """Brings the model's weights to a suspended server."""
    if server.info().needs_weights:
        weights = LiveWeights.of(lambda: model.state_dict().items())
        await server.begin_update(weights.manifest)
        assert await server.receive(weights) > 0
    await server.resume(version)


def perturb(model: PreTrainedModel) -> None:
    """An in-place weight update, as an optimiser makes it."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))


CHECKS: tuple[Callable[[ServerFactory, PreTrainedModel], Awaitable[None]], ...] = (
    greedy_equals_reference,
    logprobs_match_a_forward_pass,
    penalties_match_a_forward_pass,
    samples_follow_the_distribution,
    stops,
    budgets,
    a_crowd_changes_nothing,
    abort_returns_partial_tokens,
    later_turns_equal_fresh_ones,
    a_shared_prompt_changes_nothing,
    weight_update_takes_effect,
    weights_that_do_not_fit_are_refused_before_they_are_sent,
    interrupted_requests_go_on,
    frozen_requests_go_on,
    a_continuation_draws_the_same,
    stop_strings_need_text,
    a_bad_request_fails_alone,
    close_fails_what_is_in_flight,
)
