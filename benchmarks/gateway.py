"""What the gateway costs, and what it does under faults.

    python benchmarks/gateway.py [--sessions N] [--requests N] [--rounds N]

1. CPU seconds of this process for a request, beside an engine that answers at once (best of the rounds): with
4 KB in one message, and with 120 messages of 200 KB in a conversation that grows. The client is another
process.
2. Sessions with faults: connections dropped before, during and after the answer, garbage, bodies too large,
wrong and ended keys, slow readers, retries. What a client has read to its end is trained once; no request is
answered with another's answer; no task, socket or thread is left.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import re
import resource
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import describe_machine
from toy import parse_arguments

from turnwise.batching.samples import build_samples
from turnwise.chat.template import ChatTemplate
from turnwise.chat.tree import ConversationTree
from turnwise.gateway.rules import SessionRules
from turnwise.gateway.server import Gateway, GatewaySettings
from turnwise.gateway.sessions import EpisodeSession, Sessions
from turnwise.testing.fakes import ScriptedServer, SeenRequest, byte_tokenizer
from turnwise.types import SamplingParams, Task

HERE = Path(__file__).parent
RULES = SessionRules({"policy": "trained"}, max_requests=10**6)
TASK = Task("t", "T", "train", 0)
TEXT = "the agent reads a file and writes a short answer to the user about what it found there "
MAX_BODY = 2**16
FAULTS = (
    *("drop_before", "drop_during", "drop_after", "garbage", "oversize", "wrong_key", "ended_key"),
    *("slow", "retry", "stream", "plain", "plain", "plain"),
)

CLIENT = """
import http.client, json, sys
host, key, size, num_messages = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
connection = http.client.HTTPConnection(host)
words = "the agent reads a file and writes a short answer to the user about what it found there ".split()
text = " ".join(words * (size // 80 + 1))[:size]
messages = []
number = 0
def ask():
    global number
    messages.append({"role": "user", "content": f"{number} {text}"})
    number += 1
    body = json.dumps({"model": "policy", "messages": messages})
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
    connection.request("POST", "/v1/chat/completions", body, headers)
    answer = json.load(connection.getresponse())
    messages.append(answer["choices"][0]["message"])
    if not num_messages:
        messages.clear()
while len(messages) < num_messages:
    ask()
print("ready", flush=True)
for line in sys.stdin:
    for _ in range(int(line)):
        ask()
    print("done", flush=True)
"""


def template() -> ChatTemplate:
    return ChatTemplate(byte_tokenizer(training_texts=[TEXT * 50]))


def tree(shared: ChatTemplate, server: ScriptedServer, name: str) -> ConversationTree:
    return ConversationTree(shared, server, name, SamplingParams(max_new_tokens=64), 10**6)


class TimedServer(ScriptedServer):
    """Answers at once, and counts its own CPU seconds: it stands for an engine."""

    seconds = 0.0

    async def generate(self, *args: Any, **options: Any) -> Any:
        started = time.process_time()
        completion = await super().generate(*args, **options)
        self.seconds += time.process_time() - started
        return completion


async def cpu_of_requests(size: int, num_messages: int, num_requests: int, rounds: int) -> float:
    """CPU seconds of a request, without those of the scripted engine."""
    shared = template()
    server = TimedServer(lambda request: shared.respond("ok"))
    sessions = Sessions()
    gateway = Gateway(sessions, GatewaySettings())
    await gateway.start()
    session = sessions.open(tree(shared, server, "e"), RULES, "e")
    arguments = [gateway.url.removeprefix("http://"), session.key, str(size), str(num_messages)]
    client = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CLIENT,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert client.stdin and client.stdout
    await client.stdout.readline()
    seconds = []
    for _ in range(rounds):
        server.requests.clear()
        started = time.process_time() - server.seconds
        client.stdin.write(f"{num_requests}\n".encode())
        await client.stdout.readline()
        ended = time.process_time() - server.seconds
        seconds.append((ended - started) / num_requests)
    client.stdin.close()
    await client.wait()
    await sessions.end(session)
    await gateway.close()
    return min(seconds)


@dataclass
class Storm:
    """Sessions whose clients misbehave."""

    gateway: Gateway
    sessions: Sessions
    ended_key: str
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    async def play(self, session: EpisodeSession, number: int, num_requests: int) -> None:
        """One session's requests, some of them at once, and the check of what is trained of them."""
        got: Counter[str] = Counter()
        unsure: set[str] = set()
        at_once = asyncio.Semaphore(4)

        async def request(index: int) -> None:
            async with at_once:
                fault = self.rng.choice(FAULTS)
                self.counts[fault] += 1
                await self.request(session, f"s{number}r{index}", fault, got, unsure)

        await asyncio.gather(*(request(index) for index in range(num_requests)))
        await asyncio.sleep(0)
        trajectory = session.tree.trajectory(TASK, 0)
        session.tree.verify()
        spans = [span.turn for sample in build_samples(trajectory) for span in sample.turn_spans]
        trained = Counter(re.findall(r"s\d+r\d+", trajectory.turns[turn].text)[0] for turn in spans)
        if len(set(spans)) != len(spans):
            self.problems.append(f"session {number}: a turn is trained twice")
        for name in got:
            if not trained[name]:
                self.problems.append(f"{name} was read to its end and isn't trained")
        for name in trained:
            if name not in got and name not in unsure:
                self.problems.append(f"{name} is trained, and nobody got it")
            if not name.startswith(f"s{number}r"):
                self.problems.append(f"{name} is in session {number}")
        await self.sessions.end(session)

    async def request(
        self, session: EpisodeSession, name: str, fault: str, got: Counter[str], unsure: set[str]
    ) -> None:
        key = {"wrong_key": "wrong", "ended_key": self.ended_key}.get(fault, session.key)
        body: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": name}]}
        if fault == "stream":
            body["stream"] = True
        content = json.dumps(body).encode()
        if fault == "garbage":
            content = self.rng.randbytes(200)
        elif fault == "oversize":
            content = b"x" * (2 * MAX_BODY)
        if fault == "retry":
            unsure.add(name)
            await self.send(key, content, "drop_during")
        answer = await self.send(key, content, fault, is_retry=fault == "retry")
        if fault.startswith("drop"):
            unsure.add(name)
        elif fault in ("garbage", "oversize", "wrong_key", "ended_key"):
            if answer.startswith(b"HTTP/1.1 2"):
                self.problems.append(f"{name}: {fault} was answered")
        elif f"echo {name}" not in answer.decode(errors="replace"):
            self.problems.append(f"{name}: got {answer[-200:]!r}")
        else:
            got[name] += 1

    async def send(self, key: str, content: bytes, fault: str, is_retry: bool = False) -> bytes:
        """All bytes of the answer, if the fault leaves any."""
        host, _, port = self.gateway.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {key}\r\n"
        head += f"x-stainless-retry-count: {int(is_retry)}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        sent = head.encode() + content
        try:
            if fault == "drop_before":
                writer.write(sent[: len(sent) // 2])
                await writer.drain()
                return b""
            writer.write(sent)
            await writer.drain()
            if fault == "drop_during":
                await asyncio.sleep(self.rng.random() / 500)
                return b""
            if fault == "drop_after":
                return await reader.read(40)
            answer = b""
            while chunk := await reader.read(64 if fault == "slow" else 2**16):
                answer += chunk
                if fault == "slow":
                    await asyncio.sleep(0.001)
            return answer
        except ConnectionError:
            return b""
        finally:
            if fault.startswith("drop"):
                writer.transport.abort()
            else:
                writer.close()


async def storm(num_sessions: int, num_requests: int, seed: int) -> dict[str, Any]:
    """The counts of faults, the problems, and what is left."""
    shared = template()

    def echo(request: SeenRequest) -> list[int]:
        name = re.findall(r"s\d+r\d+", shared.decode(list(request.prompt_ids)))[-1]
        return shared.respond(f"echo {name}")

    sessions = Sessions()
    gateway = Gateway(sessions, GatewaySettings(max_body_bytes=MAX_BODY))
    await gateway.start()
    ended = sessions.open(tree(shared, ScriptedServer(echo), "ended"), RULES, "ended")
    await sessions.end(ended)
    played = Storm(gateway, sessions, ended.key, random.Random(seed))
    places = asyncio.Semaphore(8)

    async def session(number: int) -> None:
        async with places:
            opened = sessions.open(tree(shared, ScriptedServer(echo), f"e{number}"), RULES, f"e{number}")
            await played.play(opened, number, num_requests)

    before = left_over()
    for number in range(min(num_sessions, 4)):
        await session(number)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await asyncio.gather(*(session(number) for number in range(4, num_sessions)))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    await asyncio.sleep(0.2)
    after = left_over()
    await gateway.close()
    return {
        "faults": dict(played.counts),
        "problems": played.problems[:20],
        "num_problems": len(played.problems),
        "sessions_left": len(sessions),
        "left_over": {name: after[name] - before[name] for name in before},
        "peak_memory_grown_mb": round(grown / 1024, 1),
    }


def left_over() -> dict[str, int]:
    gc.collect()
    return {
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "open_files": len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gateway.json")
    options = parse_arguments(parser, sessions=3, requests=20, rounds=1)
    faults = asyncio.run(storm(options.sessions, options.requests, options.seed))
    num_requests = 4 * options.rounds
    small = asyncio.run(cpu_of_requests(4_000, 0, 10 * num_requests, options.rounds))
    large = asyncio.run(cpu_of_requests(3_300, 120, num_requests, options.rounds))
    result = {
        "machine": describe_machine(),
        "cpu_ms_4_kb": round(1000 * small, 3),
        "cpu_ms_200_kb": round(1000 * large, 3),
        **faults,
    }
    print(json.dumps(result, indent=2))
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if faults["num_problems"]:
        sys.exit("faults led to wrong answers or wrong training")


if __name__ == "__main__":
    main()
