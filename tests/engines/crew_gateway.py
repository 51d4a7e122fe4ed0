"""CrewAI plays an episode through the gateway, against a scripted model. Its environment is one of its own,
since it needs an older `openai` and `pydantic` than the other clients."""

from __future__ import annotations

import os
from tempfile import TemporaryDirectory
from typing import Any

os.environ["CREWAI_DISABLE_TELEMETRY"] = "true"
os.environ["CREWAI_TRACING_ENABLED"] = "false"
os.environ["OTEL_SDK_DISABLED"] = "true"
os.environ["HF_HUB_OFFLINE"] = "1"

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from gateway_players import SUM_PARENTS, SUMS, Addresses, played


@tool("add")
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def play(addresses: Addresses) -> Any:
    model = LLM(model="openai/policy", base_url=addresses.openai, api_key=addresses.key)
    agent = Agent(role="adder", goal="add", backstory="Adds.", llm=model, tools=[add], verbose=False)
    task = Task(description="what is it?", expected_output="a sum", agent=agent)
    return Crew(agents=[agent], tasks=[task], verbose=False).kickoff().raw


def main() -> None:
    with TemporaryDirectory() as home:
        os.environ["CREWAI_STORAGE_DIR"] = home
        assert played(SUMS, play, SUM_PARENTS) == "It is 10."
    print("crewai: one context, though it drops thinking and the text beside calls", flush=True)


if __name__ == "__main__":
    main()
