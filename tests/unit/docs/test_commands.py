"""The commands of the docs: verbs and options exist, files are there or were made earlier on the page, extras
are ours."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnwise.cli.main import build_parser
from turnwise.errors import install_hint

ROOT = Path(__file__).parents[3]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
COMMENTED = sorted(path for path in (ROOT / "examples").rglob("*") if path.suffix in (".yaml", ".sh", ".py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

BLOCK = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SHELLS = ("bash", "sh", "console", "")
PROGRAMS = ("turnwise", "python", "pip", "make", "git", "torchrun", "accelerate", "deepspeed", "hf", "bash")
FILE = re.compile(r"[\w./-]+\.(yaml|json|jsonl|py|sh|txt|parquet)$")
MADE_BY = {
    "turnwise make-model": "--out",
    "turnwise demos": "--out",
    "turnwise rollout": "--out",
    "turnwise export": "--out",
    "turnwise compare": "--out",
}
"""Commands that write a file or folder, and the option that names it."""
BY_QUICK_START = {
    "make quickstart": "runs/quickstart",
    "python examples/frozen_lake/quickstart.py": "runs/quickstart",
    "python examples/sokoban/recipe.py": "runs/sokoban",
    **{
        f"python examples/imitate.py examples/{name}/agentic.yaml": f"runs/{name}"
        for name in ("webshop", "maze", "recall", "retry")
    },
    "python examples/arithmetic/sums.py": "runs/arithmetic",
    "python examples/rl_tool/quick_start.py": "runs/rl_tool",
    "python examples/products/products.py": "runs/products",
    "python examples/smollm/one_digit.py": "runs/smollm",
    "python examples/smollm/products.py": "runs/smollm",
    "python examples/tool_choice/choice.py": "runs/tool_choice",
}
"""Commands that make a folder whose name they don't say."""
PLACEHOLDER = re.compile(r"^[A-Z][A-Z_]*$|^\$|…")
"""What a reader replaces: CONFIG, MODEL_DIR, $SFT."""


def command_lines(text: str, language: str) -> Iterator[str]:
    """The commands of a block, each on one line. In a block without a language, only lines that begin with a
    program."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in joined.splitlines():
        line = line.strip().removeprefix("$ ")
        if not line or line.startswith("#"):
            continue
        if language in ("bash", "sh", "console") or line.split()[0] in PROGRAMS:
            yield line


def simple_commands(line: str) -> Iterator[list[str]]:
    """The words of each command of a line. Words of the shell, such as `for … do`, and `KEY=VALUE` in front
    are left out."""
    for part in re.split(r" && | \|\| |; | \| |\)$", line):
        words = shlex.split(part, comments=True)
        while words and (words[0] in ("do", "done", "for") or re.match(r"\w+=", words[0])):
            words = [] if words[0] in ("for", "done") else words[1:]
        if words:
            yield words


def commands_of(text: str) -> list[list[str]]:
    blocks = (block for block in BLOCK.finditer(text) if block[1] in SHELLS)
    return [
        words
        for block in blocks
        for line in command_lines(block[2], block[1])
        for words in simple_commands(line)
    ]


def comments_of(text: str) -> list[list[str]]:
    """The commands in the comments at the head of an example."""
    lines = re.sub(r"\\\n#\s*", " ", text).splitlines()
    indented = (re.match(r"#   +(.*)", line) for line in lines)
    commands = (match[1] for match in indented if match and match[1].split()[0] in PROGRAMS)
    return [words for line in commands for words in simple_commands(line)]


def is_there(name: str, page: Path, made: set[str]) -> bool:
    places = (ROOT / name, page.parent / name)
    return any(place.exists() for place in places) or any(
        name == one or name.startswith(f"{one}/") for one in made
    )


def faults_of(words: list[str], page: Path, made: set[str]) -> Iterator[str]:
    """What is wrong with a command. Adds to `made` what the command makes."""
    line = " ".join(words)
    if words[0] == "turnwise":
        try:
            _, rest = build_parser().parse_known_args(words[1:])
        except SystemExit:
            yield f"{line}: argparse refuses it"
            return
        yield from (
            f"{line}: {word} is neither an option nor KEY=VALUE"
            for word in rest
            if "=" not in word or word[0] == "-"
        )
    if words[0] == "pip" and words[1] == "install":
        yield from (f"{line}: {fault}" for fault in faults_of_install(words[2:]))
    written = MADE_BY.get(" ".join(words[:2]))
    outputs = {words[index + 1] for index, word in enumerate(words[:-1]) if word in (written, "--json")}
    for word in words[1:]:
        name = word.rpartition("=")[2].strip("[]")
        if (
            FILE.fullmatch(name)
            and not PLACEHOLDER.search(name)
            and name not in outputs
            and not is_there(name, page, made)
        ):
            yield f"{line}: {name} isn't there, and no earlier command of the page makes it"
    made.update(outputs)
    made.update(folder for command, folder in BY_QUICK_START.items() if line.startswith(command))


def faults_of_install(words: list[str]) -> Iterator[str]:
    for word in words:
        name, _, rest = word.partition("[")
        extras = rest.rstrip("]").split(",") if rest else []
        if name in ("turnwise", "turnwise-rl"):
            yield f"{name} is taken from an index, where this project isn't"
        if name == ".":
            yield from (
                f"there is no extra {extra}"
                for extra in extras
                if extra not in PROJECT["optional-dependencies"]
            )


def faults_on(page: Path, text: str) -> list[str]:
    """All faults of a page's commands, in order. Files that the page prints, or takes from the README, count
    as made."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    printed = text + readme if "files of the README" in text else text
    made = set(re.findall(r"```\w+\n# (\w+\.(?:py|yaml|json))\b", printed))
    commands = commands_of(text) if page.suffix == ".md" else comments_of(text)
    return [fault for words in commands for fault in faults_of(words, page, made)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_could_be_typed(page: Path) -> None:
    assert faults_on(page, page.read_text(encoding="utf-8")) == []


def test_so_could_the_commands_in_the_comments_of_examples() -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in COMMENTED}
    assert sum(len(comments_of(text)) for text in texts.values()) > 30
    assert [fault for page, text in texts.items() for fault in faults_on(page, text)] == []


@pytest.mark.parametrize(
    ("commands", "fault"),
    [
        ("turnwise trian x.yaml", "argparse"),
        ("turnwise train examples/frozen_lake/agentic.yaml --fast", "--fast"),
        ("turnwise train no_such.yaml", "no_such.yaml isn't there"),
        ("turnwise sft --json out.json examples/frozen_lake/sft.yaml", "--json"),
        (
            "turnwise train examples/frozen_lake/agentic.yaml data.train_files=[rows.jsonl]",
            "rows.jsonl isn't there",
        ),
        ("pip install 'turnwise[gym]'", "from an index"),
        ("pip install turnwise-rl", "from an index"),
        ("pip install -e '.[gymn]'", "no extra gymn"),
    ],
)
def test_a_wrong_command_is_found(commands: str, fault: str) -> None:
    [line] = faults_on(ROOT / "README.md", f"```bash\n{commands}\n```\n")
    assert fault in line


def test_what_an_earlier_command_made_is_there() -> None:
    made = (
        "turnwise demos examples/frozen_lake/agentic.yaml --out demos.jsonl\nturnwise make-model --text "
        "demos.jsonl --out m"
    )
    assert faults_on(ROOT / "README.md", f"```bash\n{made}\n```\n") == []
    [line] = faults_on(ROOT / "README.md", "```bash\nturnwise make-model --text demos.jsonl --out m\n```\n")
    assert "demos.jsonl isn't there" in line


def test_nothing_tells_readers_to_install_the_other_project_of_that_name() -> None:
    assert PROJECT["name"] == "turnwise-rl" and PROJECT["scripts"] == {"turnwise": "turnwise.cli.main:main"}
    files = [
        path
        for room in ("turnwise", "docs", "examples", "benchmarks")
        for path in sorted((ROOT / room).rglob("*"))
    ]
    readable = (".py", ".md", ".yaml", ".json", ".sh", ".ipynb", ".txt")
    texts = {path: path.read_text(encoding="utf-8") for path in [*files, *PAGES] if path.suffix in readable}
    of_the_index = re.compile(r"pip install \S*turnwise|turnwise\[")
    assert [str(path) for path, text in texts.items() if of_the_index.search(text)] == []
    outside_doctests = re.compile(r"^(?!    turnwise\.errors\.).*pip install", re.MULTILINE)
    sources = [path for path in texts if path.is_relative_to(ROOT / "turnwise") and path.name != "errors.py"]
    assert [str(path) for path in sources if outside_doctests.search(texts[path])] == []


def test_the_hint_names_an_extra_that_there_is() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "turnwise").rglob("*.py"))
    extras = set(re.findall(r"""install_hint\(["'](\w[\w-]*)["']\)""", sources))
    assert len(extras) >= 5 and extras <= set(PROJECT["optional-dependencies"])
    assert "pip install -e '.[gym]'" in install_hint("gym")


def test_the_readme_begins_with_a_clone() -> None:
    [first, *_] = commands_of((ROOT / "README.md").read_text(encoding="utf-8"))
    assert first[:2] == ["git", "clone"]
