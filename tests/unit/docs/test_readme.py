"""The README's own environment is that of the docs, and links lead somewhere;
tests/extras/test_readme_learns.py runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from turnwise.cli.main import main

ROOT = Path(__file__).parents[3]
NAMES = ("rollout", "end_to_end", "rows", "sft", "async")


def own_environment(page: Path) -> str:
    [code] = re.findall(r"```python\n(# guess\.py\n.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return code


def test_both_pages_have_one_environment_and_it_is_short():
    code = own_environment(ROOT / "README.md")
    assert code == own_environment(ROOT / "docs" / "environments.md")
    assert len([line for line in code[code.index("class") :].splitlines() if line.strip()]) <= 15


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_the_tutorial_has_the_commands_of_the_readme_and_two_looks_that_run(tmp_path, monkeypatch, capfd):
    readme, tutorial = commands(ROOT / "README.md"), commands(ROOT / "docs" / "own_environment.md")
    looks = [line for line in tutorial if line not in readme]
    assert [line for line in tutorial if line in readme] == readme[readme.index(tutorial[len(looks)]) :]
    for text, name in re.findall(
        r"```\w+\n(# (\w+\.(?:py|yaml))\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert len(looks) == 2
    for line in looks:
        assert main(line.split()[1:]) == 0, capfd.readouterr().err
    printed = capfd.readouterr().out
    assert "GuessEnv is fit to train in: 2 warnings" in printed and "'5' → reward" in printed


def test_relative_links_exist_and_every_page_is_linked():
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    missing = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in documents
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
        if "://" not in target and not (document.parent / target).exists()
    ]
    assert missing == []
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert (
        pages
        - set(re.findall(r"\(([a-z_]+\.md)\)", (ROOT / "docs" / "README.md").read_text(encoding="utf-8")))
        == set()
    )


def test_how_fast_it_says_it_is_are_the_ratios_that_were_measured():
    """Rows in the order of the table."""
    results = {
        name: json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text()) for name in NAMES
    }
    cases, times = results["rollout"]["cases"], results["async"]["times"]
    measured = [
        cases["tiny:fp32"]["multi_turn"]["ratios"]["generate"],
        cases["tiny:fp32"]["multi_turn"]["ratios"]["vllm"],
        cases["tiny:fp32, vLLM compiled"]["multi_turn"]["ratios"]["vllm"],
        cases["small:fp32, vLLM compiled"]["multi_turn"]["ratios"]["vllm"],
        results["end_to_end"]["step"]["ratio"],
        results["rows"]["ratio_step_s"],
        results["sft"]["ratio"],
        times["ratio_1"]["faster"],
        times["ratio_2"]["faster"],
    ]
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("## How fast")[2].partition("## ")[0]
    said = [float(cell) for cell in re.findall(r"\| ([\d.]+) \|$", table, re.MULTILINE)]
    assert said == [pytest.approx(ratio, rel=0.02) for ratio in measured]
