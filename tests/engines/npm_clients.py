"""`python tests/engines/npm_clients.py FOLDER`: Codex and Claude Code, installed by npm into FOLDER, play an
episode through the gateway against a scripted model, and their history is one context.

No test starts it: these clients come from npm, and 658 MB of them. Run it in a network namespace that has
loopback alone (`unshare -rn`, then `ip link set lo up`), so that they reach nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scripted_gateway import HeldReplies, tool_template

from turnwise.chat.tool_calls import find_parser
from turnwise.chat.tree import ConversationTree
from turnwise.gateway.rules import SessionRules
from turnwise.gateway.server import Gateway, GatewaySettings, serving
from turnwise.gateway.sessions import Sessions
from turnwise.types import SamplingParams

TIMEOUT_S = 300
THINKING = "<think>\nhm\n</think>\n\nLet me see."


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def shell(command: str) -> dict[str, str]:
    """The same command for the tools of both clients."""
    return {
        "codex": call("exec_command", cmd=command),
        "claude": call("Bash", command=command, description="x"),
    }


def command_line(client: str, folder: Path, base_url: str) -> list[str]:
    program = str(folder / "node_modules" / ".bin" / client)
    if client == "claude":
        return [program, "--dangerously-skip-permissions", "-p", "run echo hi"]
    provider = f'{{name="here", base_url="{base_url}/v1", env_key="OPENAI_API_KEY", wire_api="responses"}}'
    settings = ["-c", "model_provider=here", "-c", f"model_providers.here={provider}", "-m", "m"]
    options = ["--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check"]
    return [program, "exec", *options, *settings, "run echo hi"]


def environment(home: str, base_url: str, key: str) -> dict[str, str]:
    return {
        "HOME": home,
        "CODEX_HOME": home,
        "PATH": os.environ["PATH"],
        "OPENAI_API_KEY": key,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_MODEL": "m",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
    }


async def play(client: str, folder: Path) -> None:
    replies = [THINKING + shell("echo hi")[client] + shell("echo ho")[client], shell("false")[client], "Hi."]
    template = tool_template()
    server = HeldReplies(replies)
    sampling = SamplingParams(max_new_tokens=32_000)
    tree = ConversationTree(template, server, client, sampling, 400_000, parser=find_parser(None, template))
    sessions = Sessions()
    async with serving(Gateway(sessions, GatewaySettings())) as gateway:
        session = sessions.open(tree, SessionRules({"m": "trained"}), client)
        base_url = gateway.base_url(session.key)
        with TemporaryDirectory() as home:
            output = await _output(
                command_line(client, folder, base_url), environment(home, base_url, session.key), home
            )
        await sessions.end(session)
    assert output.rstrip().endswith("Hi."), output
    assert [turn.parent for turn in tree.turns] == [None, 0, 1], output
    tree.verify()
    new = [len(turn.prompt_ids) for turn in tree.turns]
    print(f"{client}: one context, {new} bytes of prompt, {dict(session.counts)}")


async def _output(command: Sequence[str], variables: Any, folder: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        env=variables,
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    return output.decode(errors="replace")


def main() -> None:
    for client in ("codex", "claude"):
        asyncio.run(play(client, Path(sys.argv[1])))


if __name__ == "__main__":
    main()
