"""The parity gate: servers that agree pass, and each fault that can make them disagree is provoked once and
named."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from messages import mentions
from toy_model import toy_model

from turnwise.batching.pack import pack
from turnwise.batching.plan import denominators
from turnwise.chat.template import ChatTemplate
from turnwise.errors import ParityError
from turnwise.inference.embedded.server import EmbeddedServer
from turnwise.inference.hf_server import HFServer
from turnwise.inference.server_manager import LLMServerManager
from turnwise.models.load import save_model
from turnwise.pipelines.parity import ParityGate, first_prompts
from turnwise.pipelines.parity_diagnosis import Suspects
from turnwise.testing.fakes import byte_tokenizer
from turnwise.training.settings import StrategySettings
from turnwise.training.torch_strategy import TorchStrategy
from turnwise.types import Completion, SamplingParams, VersionRun

TOKENIZER = byte_tokenizer(bos_token="<|endoftext|>")
TEMPLATE = ChatTemplate(TOKENIZER)
PROMPTS = [
    [{"role": "system", "content": "Walk to G."}, {"role": "user", "content": f"You are at {place}."}]
    for place in (3, 8)
]
MAX_LENGTH = 512


def make_model(seed=0):
    return toy_model(seed, vocab_size=len(TOKENIZER), max_position_embeddings=MAX_LENGTH)


def move(model, size=0.02, seed=1):
    """What an optimiser step does: every parameter changes, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)


def scorer(model, temperature=1.0, dtype=torch.float32):
    strategy = TorchStrategy(model, StrategySettings(temperature=temperature, dtype=dtype))

    def score(samples):
        batches = [pack([sample], denominators([sample], MAX_LENGTH)) for sample in samples]
        return [out["logprobs"] for out in strategy.forward(batches, frozenset({"logprobs"}))]

    return score


@pytest.fixture
def loop():
    with asyncio.Runner() as runner:
        yield runner


class Run:
    """Trainer, server and gate of a run. A class of servers serves the trainer's own model. `update` is a
    weight update, in which the server hears of its new version only."""

    def __init__(
        self, loop, server=EmbeddedServer, model=None, temperature=1.0, prompts=PROMPTS, cut=None, **suspects
    ):
        model = model or make_model()
        server = server(model, max_length=MAX_LENGTH) if isinstance(server, type) else server
        self.loop, self.server, self.model = loop, server, model
        known = Suspects(
            score=scorer(model, temperature),
            weights=model.named_parameters,
            model_config=model.config,
            temperature=temperature,
            trainer_dtype="fp32",
            sampler_dtype="fp32",
            folders={},
        )
        self.gate = ParityGate(
            run_async=loop.run,
            server=server,
            template=TEMPLATE,
            prompts=prompts,
            sampling=SamplingParams(4, temperature=temperature, seed=7, **cut or {}),
            max_length=MAX_LENGTH,
            max_diff=1e-3,
            suspects=replace(known, **suspects),
        )

    def update(self, version):
        move(self.model, seed=version)
        self.loop.run(self.server.suspend())
        self.loop.run(self.server.resume(version))

    def check(self, version=0):
        return {
            metric.name: metric.value
            for metric in self.gate.check(version)
            if not metric.name.startswith("time/")
        }

    def complaint(self, version=0):
        with pytest.raises(ParityError) as caught:
            self.gate.check(version)
        return str(caught.value)


def cause(message):
    """What the message names, without the table of what was tried."""
    [line] = [line for line in message.splitlines() if line.startswith("Cause: ")]
    return line.removeprefix("Cause: ")


# Agreement


@pytest.mark.parametrize(
    ("kind", "temperature", "num_updates", "cut"),
    [
        (EmbeddedServer, 1.0, 3, {}),
        (EmbeddedServer, 0.7, 3, {"top_k": 50, "top_p": 0.9}),
        (HFServer, 0.7, 2, {"top_k": 50, "min_p": 0.1}),
    ],
)
def test_servers_that_agree_pass_at_every_version(loop, kind, temperature, num_updates, cut):
    model = make_model()
    run = Run(loop, LLMServerManager([kind(model, max_length=MAX_LENGTH)]), model, temperature, cut=cut)
    for version in range(num_updates):
        metrics = run.check(version)
        assert 0 < metrics["parity/logprob_diff_mean"] < 1e-6
        assert metrics["parity/logprob_diff_mean"] <= metrics["parity/logprob_diff_max"] < 1e-5
        assert 8 <= metrics["parity/num_tokens"] <= 16
        run.update(version + 1)


def test_what_is_logged_follows_from_the_weights_alone(loop):
    whole = Run(loop)
    for version in range(3):
        whole.check(version)
        whole.update(version + 1)
    assert Run(loop, model=whole.model).check(3) == whole.check(3)


def test_a_context_too_short_for_two_turns_is_checked_with_one(loop):
    run = Run(loop, prompts=[[{"role": "user", "content": "x" * 430}]])
    for version in range(3):
        assert run.check(version)["parity/num_tokens"] <= 4


def test_nothing_global_is_drawn(loop):
    run = Run(loop, HFServer)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    run.check()
    assert torch.equal(torch.get_rng_state(), before[0]) and np.random.get_state()[1].tolist() == before[1]


# Faults


class FixedTemperature(EmbeddedServer):
    """Samples at temperature 1, whatever it is asked for."""

    async def generate(self, prompt_ids, sampling, request_id, media=()):
        return await super().generate(prompt_ids, replace(sampling, temperature=1.0), request_id, media)


class KeepsOldPrefixes(EmbeddedServer):
    """Forgets nothing at a weight update."""

    async def resume(self, version):
        self._engine.version = version
        self._runner.refresh()
        self._engine.is_admitting = True


class Sloppy(EmbeddedServer):
    """Gets every other log-prob wrong."""

    async def generate(self, prompt_ids, sampling, request_id, media=()):
        completion = await super().generate(prompt_ids, sampling, request_id, media)
        error = np.where(np.arange(len(completion.logprobs)) % 2, 0.4, -0.4)
        return replace(completion, logprobs=(completion.logprobs + error).astype(np.float32))


class Sessions(HFServer):
    """Keeps a conversation's keys and values for requests that extend exactly what is cached, over weight
    updates too."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self._sessions = {}

    async def sleep(self, kinds):
        self._sessions.clear()

    @torch.no_grad()
    async def generate(self, prompt_ids, sampling, request_id, media=()):
        generator = torch.Generator().manual_seed(sampling.seed % 2**63)
        ids, logprobs = list(prompt_ids), []
        cached, cache = self._sessions.get(request_id, ([], None))
        if ids[: len(cached)] != cached:
            cached, cache = [], None
        for _ in range(sampling.max_new_tokens):
            out = self.model(torch.tensor([ids[len(cached) :]]), past_key_values=cache, use_cache=True)
            cached, cache = list(ids), out.past_key_values
            log_p = torch.log_softmax(out.logits[0, -1] / sampling.temperature, -1)
            ids.append(int(torch.multinomial(log_p.exp(), 1, generator=generator)))
            logprobs.append(float(log_p[ids[-1]]))
            if ids[-1] in sampling.stop_token_ids:
                break
        self._sessions[request_id] = (cached, cache)
        count = len(logprobs)
        runs = (VersionRun(self.version, count),)
        return Completion(np.array(ids[-count:]), np.array(logprobs, np.float32), "length", runs)


def test_a_server_of_another_temperature(loop):
    message = Run(loop, FixedTemperature, temperature=0.6).complaint()
    assert cause(message).startswith("temperature 1.")
    assert "the trainer's of 0.6" in message and "actor_infer.generating_args.temperature" in message


def test_a_trainer_of_another_temperature(loop):
    model = make_model()
    run = Run(loop, model=model, temperature=0.6, score=scorer(model, temperature=1.0))
    assert cause(run.complaint()).startswith("trainer's forward pass")


def test_a_copy_in_bf16(loop):
    model = make_model()
    run = Run(loop, EmbeddedServer(copy.deepcopy(model).to(torch.bfloat16), max_length=MAX_LENGTH), model)
    message = run.complaint()
    assert mentions(cause(message), "dtype", "bf16", "server")
    assert "actor_infer.model_args.dtype" in message and "parity_max_logprob_diff" in message


def test_a_trainer_in_bf16(loop):
    model = make_model()
    run = Run(loop, model=model, score=scorer(model, dtype=torch.bfloat16), trainer_dtype="bf16")
    assert mentions(cause(run.complaint()), "dtype", "bf16", "trainer")


@pytest.mark.parametrize("kind", [KeepsOldPrefixes, Sessions])
def test_prefixes_that_outlive_an_update(loop, kind):
    model = make_model()
    run = Run(loop, LLMServerManager([kind(model, max_length=MAX_LENGTH)]), model)
    run.check(0)
    run.update(1)
    message = run.complaint(1)
    assert cause(message).startswith("stale prefix") and "policy version 1" in message


def test_weights_that_never_leave_the_trainer(loop):
    run = Run(loop, EmbeddedServer(make_model(), max_length=MAX_LENGTH))
    run.check(0)
    run.update(1)
    assert mentions(cause(run.complaint(1)), "weights", "version 0")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models of one shape."""
    path = tmp_path_factory.mktemp("folders")
    for name, seed in (("right", 0), ("wrong", 5)):
        save_model(make_model(seed), TOKENIZER, path / name)
    return path


def test_a_resumed_run_whose_server_starts_over(loop, folders):
    run = Run(
        loop,
        EmbeddedServer(make_model(), max_length=MAX_LENGTH),
        folders={str(folders / "right"): "pretrain"},
    )
    run.update(4)
    message = cause(run.complaint(4))
    assert mentions(message, "weights", "pretrain") and str(folders / "right") in message


def test_a_server_of_the_wrong_folder(loop, folders):
    named = {
        str(folders / "right"): "actor_train.model_args.model_name_or_path",
        str(folders / "wrong"): "pretrain",
    }
    run = Run(loop, EmbeddedServer(make_model(seed=5), max_length=MAX_LENGTH), folders=named)
    message = cause(run.complaint())
    assert (
        message.startswith(f"wrong folder, pretrain {folders / 'wrong'}")
        and str(folders / "right") in message
    )


def test_one_replica_of_the_wrong_folder(loop, folders):
    model = make_model()
    servers = [EmbeddedServer(m, max_length=MAX_LENGTH) for m in (model, make_model(seed=5))]
    named = {
        str(folders / "right"): "pretrain",
        str(folders / "wrong"): "reference.model_args.model_name_or_path",
    }
    run = Run(loop, LLMServerManager(servers), model, folders=named)
    assert cause(run.complaint()).startswith("wrong folder, reference.model_args.model_name_or_path")


def test_a_server_without_the_adapter(loop, folders):
    model, base = make_model(), make_model()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.self_attn.q_proj.weight
            low_rank = (
                torch.randn(size, generator=generator) for size in ((len(weight), 2), (2, weight.shape[1]))
            )
            weight += 0.5 * torch.matmul(*low_rank)
    named = {str(folders / "right"): "pretrain"}
    run = Run(
        loop,
        EmbeddedServer(base, max_length=MAX_LENGTH),
        model,
        folders=named,
        without_adapter=scorer(make_model()),
    )
    assert cause(run.complaint()).startswith("adapter not loaded")


def test_what_nothing_explains_is_said_to_be_so(loop, folders):
    folders = {str(folders / "right"): "pretrain", str(folders / "nowhere"): "reward_pretrain"}
    message = Run(loop, Sloppy, folders=folders).complaint()
    assert cause(message).startswith("none")
    table = message.split("if the cause were\n")[1].splitlines()
    assert len(table) >= 6 and any("nan" in line and "can't be tried" in line for line in table)


# Chance, in 16 bits


BF16 = {"trainer_dtype": "bf16", "sampler_dtype": "bf16"}


class Rounded(EmbeddedServer):
    """Rounds the log-probs of its first answers a little too much, and those of long ones less."""

    long_error = 4e-4

    async def generate(self, prompt_ids, sampling, request_id, media=()):
        completion = await super().generate(prompt_ids, sampling, request_id, media)
        error = 1.5e-3 if sampling.max_new_tokens <= 4 else self.long_error
        return replace(completion, logprobs=completion.logprobs + np.float32(error))


class Wrong(Rounded):
    long_error = 5e-3


class WrongAtFirst(EmbeddedServer):
    """Gets one token after each prompt wrong, and all others right."""

    async def generate(self, prompt_ids, sampling, request_id, media=()):
        completion = await super().generate(prompt_ids, sampling, request_id, media)
        completion.logprobs[0] -= 5.0
        return completion


def test_few_tokens_over_the_bound_are_chance_if_more_are_within_it(loop, caplog):
    run = Run(loop, Rounded, **BF16)
    assert run.check()["parity/logprob_diff_mean"] > run.gate.max_diff
    assert run.check(1)["parity/num_tokens"] == 16
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 4 and mentions(warnings[0], "parity_max_logprob_diff", "0.0015", "128 more")


def test_nothing_is_chance_in_fp32(loop):
    assert mentions(Run(loop, Rounded).complaint(), "0.0015")


def test_few_tokens_over_the_bound_are_no_chance_if_more_are_over_it_too(loop):
    assert mentions(Run(loop, Wrong, **BF16).complaint(), "over 144 tokens", "0.0046")


@pytest.mark.parametrize("dtypes", [{}, BF16])
def test_a_large_fault_of_few_tokens_is_no_chance(loop, dtypes):
    assert mentions(Run(loop, WrongAtFirst, **dtypes).complaint(), "5 at most")


def test_one_wrong_replica_of_many_is_no_chance(loop):
    model = make_model()
    right = [EmbeddedServer(model, max_length=MAX_LENGTH) for _ in range(2)]
    prompts = [PROMPTS[index % 2] for index in range(3)]
    run = Run(
        loop, LLMServerManager([*right, Sloppy(model, max_length=MAX_LENGTH)]), model, prompts=prompts, **BF16
    )
    run.gate.max_diff = 0.1
    assert "0.4 nats" in run.complaint()


def test_a_context_without_room_for_more_tokens_is_judged_by_the_few(loop):
    run = Run(loop, Rounded, **BF16)
    lengths = {len(sample.token_ids) for sample in loop.run(run.gate._play())[0]}
    run = Run(loop, Rounded, **BF16)
    run.gate.max_length = min(lengths)
    assert mentions(run.complaint(), "over 16 tokens")


def test_two_sides_that_both_compute_in_bf16_are_told_so(loop):
    model = make_model()
    server = EmbeddedServer(copy.deepcopy(model).to(torch.bfloat16), max_length=MAX_LENGTH)
    score = scorer(model, dtype=torch.bfloat16)
    message = Run(loop, server, model, score=score, **BF16).complaint()
    assert mentions(cause(message), "both", "bf16", "own kernels", "parity_max_logprob_diff")


# Prompts of the run


class Greeter:
    """An agent that speaks, and goes on while it is answered."""

    async def run(self, task, sibling, open_conversation, sampling):
        conversation = open_conversation(sampling)
        while await conversation.generate([{"role": "user", "content": task.tag}]):
            pass
        return []


class Broken:
    async def run(self, task, sibling, open_conversation, sampling):
        raise RuntimeError("no such maze")


def test_prompts_are_what_agents_say_first(loop, caplog):
    caplog.set_level("INFO")
    prompts = loop.run(first_prompts({"a": Greeter(), "b": Broken()}, 42, SamplingParams(4), 64))
    assert prompts == {"a": [{"role": "user", "content": "a"}]}
    assert "no such maze" in caplog.text
