"""SGLang's client against a server of ours with its routes: the contract of servers, and what a server
elsewhere may do."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import server_contract as contract
from letters import letter_model
from sglang_fake import SGLangFake
from transformers import PreTrainedModel

from turnwise.errors import ConfigError, NotAvailableError, ReplicasDeadError, ServerError
from turnwise.inference import engine_server
from turnwise.inference.http_json import HttpJson
from turnwise.inference.server_manager import LLMServerManager
from turnwise.inference.sglang_server import SGLangServer
from turnwise.models.load import policy_info
from turnwise.runtime.info import PolicyInfo
from turnwise.runtime.rank import RankContext
from turnwise.types import SamplingParams, VersionRun

CHECKS = [
    c
    for c in contract.CHECKS
    if c not in (contract.stop_strings_need_text, contract.penalties_match_a_forward_pass)
]
SUPPORT = Path(__file__).parents[1] / "support"


class Client(SGLangServer):
    fake: SGLangFake

    async def let_it_sample(self) -> None:
        """Until a few more tokens are there, or none comes."""
        before = self.fake.num_sampled
        for _ in range(20):
            await asyncio.sleep(0.01)
            if self.fake.num_sampled > before + 3:
                break


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> PolicyInfo:
    folder = tmp_path_factory.mktemp("letters")
    letter_model(folder)
    return policy_info(str(folder), "fp32", contract.MAX_LENGTH)


@pytest.fixture
def model(policy: PolicyInfo, tmp_path: Path) -> PreTrainedModel:
    return letter_model(tmp_path)


@pytest.fixture
def serve(policy: PolicyInfo) -> Iterator[Callable[..., Client]]:
    fakes: list[SGLangFake] = []

    def make_server(
        model: PreTrainedModel, max_length: int = contract.MAX_LENGTH, decode: Any = None
    ) -> Client:
        fakes.append(SGLangFake(deepcopy(model), decode).start())
        client = Client(RankContext(), replace(policy, max_context=max_length), HttpJson(fakes[-1].url))
        client.fake = fakes[-1]
        return client

    yield make_server
    for fake in fakes:
        fake.shutdown()
        fake.server_close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Callable[..., Any], serve: Callable[..., Client], model: PreTrainedModel) -> None:
    asyncio.run(check(serve, model))


def test_a_label_of_another_run_is_no_version(serve, policy, model):
    fake = serve(model).fake
    fake.version = "7"
    server = SGLangServer(RankContext(), policy, HttpJson(fake.url))
    completion = asyncio.run(server.generate([1, 2], SamplingParams(2), "c"))
    assert completion.versions == (VersionRun(0, 2),)


def test_a_request_that_is_cancelled_ends_in_the_engine_too(serve, model):
    async def main() -> None:
        server = serve(model)
        fake, request = server.fake, asyncio.create_task(server.generate([1, 2], SamplingParams(90), "c"))
        while not fake.num_sampled:
            await asyncio.sleep(0.01)
        fake.pause("in_place")
        num_sampled = fake.num_sampled
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        fake._may_run.set()
        while fake._running:
            await asyncio.sleep(0.01)
        assert fake.num_sampled <= num_sampled + 1, "but for the token that was in the making"

    asyncio.run(main())


def test_a_cancelled_request_ends_though_the_engine_answers_no_abort(serve, model, monkeypatch):
    async def main() -> None:
        server = serve(model)
        monkeypatch.setattr(engine_server, "_ABORT_S", 0.05)
        monkeypatch.setattr(server, "_abort", lambda _: asyncio.Event().wait())
        request = asyncio.create_task(server.generate([1, 2], SamplingParams(90), "c"))
        while not server.fake.num_sampled:
            await asyncio.sleep(0.01)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(request, 60)

    asyncio.run(main())


def test_a_missing_log_prob_is_no_evidence(serve, model, monkeypatch):
    server = serve(model)
    monkeypatch.setattr(server.fake, "_sample", lambda *_: (7, -9999.0, -9999.0, [7]))
    with pytest.raises(ServerError, match="2 tokens for conversation 'c', and not every one has a log-prob"):
        asyncio.run(server.generate([1, 2], SamplingParams(2), "c"))


def test_what_the_server_refuses_or_answers_otherwise_fails_alone(serve, model, monkeypatch):
    async def main() -> None:
        server = serve(model)
        with pytest.raises(ServerError, match="repetition_penalty ignores the prompt"):
            await server.generate([1], SamplingParams(2, repetition_penalty=1.1), "penalty")
        monkeypatch.setattr(server.fake, "generate", lambda **_: {"text": "hello"})
        with pytest.raises(ServerError, match="answered something else than SGLang"):
            await server.generate([1], SamplingParams(2), "other")

    asyncio.run(main())


def test_a_server_that_is_gone_is_a_dead_replica(serve, model):
    server = serve(model)
    server.fake.shutdown()
    server.fake.server_close()
    with pytest.raises(ReplicasDeadError, match="doesn't answer"):
        asyncio.run(LLMServerManager([server]).generate([1, 2], SamplingParams(2), "c"))


def test_another_version_a_url_with_options_and_a_port_in_use_are_refused(serve, model, policy, monkeypatch):
    url = serve(model).fake.url
    with pytest.raises(ConfigError, match="has its options already; remove tp_size"):
        SGLangServer.for_policy(RankContext(), policy, url=url, tp_size=2)
    for version in ("0.4.9.post2", "0.6.0rc1", "0.5.24"):
        monkeypatch.setattr("sglang_fake.VERSION", version)
        with pytest.raises(
            NotAvailableError, match=rf"SGLang {version} is installed; turnwise works with 0.5.23: "
        ):
            SGLangServer.for_policy(RankContext(), policy, url=url)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"port: \d+ is in use; name another, or remove it"):
            SGLangServer.for_policy(RankContext(), policy, port=taken.getsockname()[1])


@pytest.mark.extra
def test_it_is_started_told_its_options_and_ended(policy, model, tmp_path, monkeypatch):
    package = tmp_path / "path" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text("from sglang_fake import main\nmain()\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), str(SUPPORT)]))
    server = SGLangServer.for_policy(
        RankContext(), policy, mem_fraction_static=0.5, enable_deterministic_inference=True
    )
    process, log = server._process

    async def main() -> None:
        completion = await server.generate([5, 6, 7], SamplingParams(4, seed=1), "c")
        contract.assert_logprobs(model, [5, 6, 7], completion, SamplingParams(4))
        os.kill(process.pid, 9)
        process.wait()
        with pytest.raises(
            ConnectionError, match="SGLang has ended; its last words: told: --log-level warning"
        ):
            await server.generate([5], SamplingParams(1), "d")
        await server.close()

    asyncio.run(main())
    told = log.read_text()
    assert "--mem-fraction-static 0.5 --enable-deterministic-inference" in told and "--dtype float32" in told
    log.unlink()


def test_a_start_that_fails_shows_the_log(policy, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"SGLang didn't start \(exit status 1\): .*No module named"
    ) as failure:
        SGLangServer.for_policy(RankContext(), policy)
    Path(str(failure.value).rpartition("all of them: ")[2].rstrip(")")).unlink()
