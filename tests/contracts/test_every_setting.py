"""No setting is dead: each changes what a run does, or is refused, or is answered with a sentence that names
it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import chdir, redirect_stdout
from functools import reduce
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from odd_envs import CrowdEnv
from safetensors.torch import load_file
from settings.answers import BASE, COMBINATIONS, answers
from settings.leaves import KINDS, TAG, Kind, Leaf, leaves, with_value
from settings.table import AGENTIC, PLACES, SAME_RESULT, SFT, Live

from turnwise.assemble.agentic import build_agentic
from turnwise.assemble.run import start_run
from turnwise.assemble.run_table import settings_table
from turnwise.assemble.sft import build_sft
from turnwise.cluster.weight_senders import spawn_senders
from turnwise.config import AgenticConfig, SFTConfig, parse_config
from turnwise.config.problems import Problem
from turnwise.errors import TurnwiseError
from turnwise.examine.examined import examine
from turnwise.models.load import load_model, load_tokenizer, save_model
from turnwise.models.value_head import load_value_model, value_head
from turnwise.pipelines.model_role import ModelRole
from turnwise.protocols import Cluster, WeightSource
from turnwise.tracking.jsonl import read_metrics
from turnwise.tracking.traces_file import read_traces

_NOTES = "toy_tools.Notebook"
LIVE: dict[Kind, tuple[Live, ...]] = {AgenticConfig: AGENTIC, SFTConfig: SFT}
LEAVES: dict[Kind, dict[str, Leaf]] = {kind: {leaf.key: leaf for leaf in leaves(kind)} for kind in KINDS}


class Recorder:
    """Workers that note which micro-batches and passes were asked for."""

    def __init__(self, workers: Any, role: str, calls: list[Any]) -> None:
        self._workers, self._role, self._calls = workers, role, calls
        self.size, self.dp_size = workers.size, workers.dp_size

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method in ("train_step", "forward"):
            self._calls.append((self._role, method, [batch.lengths for batch in args[0]]))
        return self._workers.call(method, *args, **kwargs)


class Bench:
    """Runs configs in a folder each and remembers what was seen of those it has run."""

    def __init__(self, folder: Path, paths: Mapping[str, str]) -> None:
        self._folder, self._paths, self._num_runs = folder, paths, 0
        self._seen: dict[str, dict[str, Any]] = {}

    def observe(self, kind: Kind, values: dict[str, Any]) -> dict[str, Any]:
        name = f"{kind.__name__} {json.dumps(values, sort_keys=True)}"
        if name not in self._seen:
            self._seen[name] = self._run(kind, values)
        return self._seen[name]

    def checkpoint(self, kind: Kind) -> str:
        """A checkpoint of the unchanged config."""
        [path] = self.observe(kind, BASE[kind])["folder"].rglob("checkpoint-*")
        return str(path)

    def _run(self, kind: Kind, values: dict[str, Any]) -> dict[str, Any]:
        self._num_runs += 1
        folder = self._folder / str(self._num_runs)
        folder.mkdir()
        CrowdEnv.now.clear()
        CrowdEnv.most.clear()
        with chdir(folder), redirect_stdout(StringIO()) as output:
            try:
                seen = run(kind, self.filled(values))
            except TurnwiseError as error:
                seen = dict.fromkeys(PLACES) | {"error": str(error), "notes": []}
        seen["folder"] = folder
        seen["output"] = TIMES.sub("", output.getvalue())
        seen["files"] = sorted(
            STAMP.sub("…", path.relative_to(folder).as_posix()) for path in folder.rglob("*")
        )
        seen["log"] = [line for path in sorted(folder.rglob("*.log")) for line in log_lines(path)]
        return seen

    def filled(self, value: Any) -> Any:
        """The value with the paths that stand for names like `$model`."""
        if isinstance(value, dict):
            return {key: self.filled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.filled(item) for item in value]
        return self._paths.get(value, value) if isinstance(value, str) else value


STAMP = re.compile(r"\d{8}-\d{6}(-\d+)?|(?<=tfevents\.).*")
TIMES = re.compile(r"(?<=tok/s )[\d,]+|\d+\.\d+|\d+(?=s)|\d{8}-\d{6}")


def sent_weights(cluster: Cluster, role: ModelRole) -> WeightSource:
    senders = spawn_senders(cluster, role.name, is_shared=True, is_sharded=role.is_sharded)
    return senders.publish().result()


def run(kind: Kind, values: dict[str, Any]) -> dict[str, Any]:
    config, notes = parse_config(values, kind)
    folder = start_run(config)
    calls: list[Any] = []
    try:
        pipeline = (
            build_agentic(examine(config), folder)
            if isinstance(config, AgenticConfig)
            else build_sft(examine(config), folder)
        )
    except TurnwiseError:
        folder.close()
        raise
    table = settings_table(pipeline).text()
    try:
        roles = (
            [pipeline.sft]
            if kind is SFTConfig
            else [pipeline.actor_train, pipeline.reference, pipeline.critic]
        )
        manager = None if kind is SFTConfig else pipeline.train_rollout_scheduler.score
        roles += [
            weighted.reward.role
            for weighted in (manager.rewards if manager else ())
            if weighted.name == "reward_model"
        ]
        for role in roles:
            if role is not None:
                role.workers = Recorder(role.workers, role.name, calls)
        pipeline.run()
        trained = [role for role in roles if role and role.name not in ("reference", "reward")]
        weights = [tensor for role in trained for _, tensor in sent_weights(pipeline.cluster, role)]
    finally:
        pipeline.close()
    metrics = [
        {k: v for k, v in row.items() if not k.startswith(("time/", "system/"))}
        for row in read_metrics(folder.metrics)
    ]
    not_played = ("generate_s", "step_s", "advantage")
    played = (
        [json.loads(line) for line in folder.rollouts.read_text().splitlines()]
        if folder.rollouts.exists()
        else []
    )
    return {
        "weights": hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights)).hexdigest(),
        "credit": [[turn.get("advantage") for turn in row["turns"]] for row in played],
        "rollouts": [
            {k: v for k, v in turn.items() if k not in not_played} for row in played for turn in row["turns"]
        ],
        "rewards": [row["outcome_rewards"] for row in played],
        "traces": traced(folder.traces),
        "validation": [{k: v for k, v in row.items() if k.startswith("val/")} for row in metrics],
        "metrics": metrics,
        "calls": calls,
        "episodes": dict(CrowdEnv.most),
        "table": STAMP.sub("…", table),
        "error": None,
        "notes": notes,
    }


def traced(path: Path) -> list[Any]:
    """The names of what each span of each trace tells."""
    if not path.exists():
        return []
    return [[sorted(span.attributes) for span in trace.spans] for trace in read_traces(path, [])]


def log_lines(path: Path) -> Iterator[str]:
    """The warnings and errors in the log of a run, without their times."""
    for line in path.read_text().splitlines():
        found = re.match(r"\S+ \S+ (\w+) (\S+): (.*)", line)
        if found and found[1] in ("WARNING", "ERROR"):
            yield found[0].partition(" ")[2].partition(" ")[2]


def path_of(kind: Kind, key: str) -> tuple[str | int, ...]:
    return LEAVES[kind][key].path


def odd_model(model: Path, folder: Path) -> Path:
    """The model with pickled weights, or with Python code of its own that does what transformers' does."""
    shutil.copytree(model, folder)
    if folder.name == "pickled_model":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        return folder
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "from transformers import Qwen3Config, Qwen3ForCausalLM\nclass OwnConfig(Qwen3Config):\n    pass\n"
        "class OwnModel(Qwen3ForCausalLM):\n    config_class = OwnConfig\n"
    )
    return folder


@pytest.fixture(scope="module")
def bench(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("settings")
    paths = {"$model": str(tiny_model), "$other_model": str(folder / "other_model"), "<tag>": TAG}
    other = load_model(tiny_model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    save_model(other, load_tokenizer(tiny_model), Path(paths["$other_model"]))
    paths |= {
        name: str(odd_model(tiny_model, folder / name[1:])) for name in ("$pickled_model", "$coded_model")
    }
    for name, words in (("$demonstrations", "Left Right"), ("$other_demonstrations", "Up Down")):
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"write {i}"},
                    {"role": "assistant", "content": word * (1 + i % 3)},
                ]
            }
            for i, word in enumerate(words.split() * 3)
        ]
        paths[name] = str(folder / f"{name[1:]}.jsonl")
        Path(paths[name]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths["$spoilt_demonstrations"] = str(folder / "spoilt_demonstrations.jsonl")
    Path(paths["$spoilt_demonstrations"]).write_text(
        Path(paths["$demonstrations"]).read_text() + '{"prompt": "one"}\n'
    )
    for name, lines in (("$rows", "one two three"), ("$other_rows", "four five six")):
        paths[name] = str(folder / f"{name[1:]}.jsonl")
        rows = [
            {"prompt": word, "question": f"{word}? {word}?", "answer": word, "asker": "toy_rewards:AskTwice"}
            for word in lines.split()
        ]
        rows.append(rows[0] | {"prompt": "a long one, too long for some", "asker": ""})
        Path(paths[name]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    half = """def half(x: float) -> float:
    '''Halves.

    Args:
        x: A number.
    '''
    return x / 2
"""
    tools = {
        name: f"tools: [{{class_name: {entry}}}]"
        for name, entry in (("$tools", "calculator"), ("$other_tools", _NOTES))
    }
    users = "interaction: [{name: gsm8k, class_name: gsm8k}]"
    for name, text in (tools | {"$functions": half, "$users": users}).items():
        paths[name] = str(folder / f"{name[1:]}.py")
        Path(paths[name]).write_text(text)
    paths["$http_command"] = str(Path(__file__).parents[1] / "support" / "http_command.py")
    for name in ("$score_model", "$other_score_model"):
        torch.manual_seed(len(name))
        model = load_value_model(tiny_model)
        torch.nn.init.normal_(value_head(model).weight)
        paths[name] = str(folder / name[1:])
        save_model(model, load_tokenizer(tiny_model), Path(paths[name]))
    yield Bench(folder, paths)
    torch.use_deterministic_algorithms(False)


def ids(line: Any) -> str:
    return line.key if isinstance(line, Live) else line.__name__


def live_settings() -> list[Any]:
    """All live settings; each fourth is a smoke of the others, which `make test-extras` tries."""
    lines = [(kind, line) for kind in KINDS for line in LIVE[kind]]
    return [
        pytest.param(kind, line, marks=[pytest.mark.extra] if number % 4 else [])
        for number, (kind, line) in enumerate(lines)
    ]


@pytest.mark.parametrize(("kind", "line"), live_settings(), ids=ids)
def test_a_live_setting_shows_itself(kind: Kind, line: Live, bench: Bench) -> None:
    base = reduce(
        lambda raw, item: with_value(raw, path_of(kind, item[0]), item[1]), line.under.items(), BASE[kind]
    )
    before = bench.observe(kind, base)
    value = bench.checkpoint(kind) if line.value == "$checkpoint" else line.value
    after = bench.observe(kind, with_value(base, path_of(kind, line.key), value))
    changed = [place for place in PLACES if before[place] != after[place]]
    assert line.place in changed, (
        f"{line.key} = {line.value!r} doesn't change {PLACES[line.place]}; it changes "
        f"{', '.join(changed) or 'nothing'}\nbefore: {before['error']}\nafter:  {after['error']}"
    )
    assert before["error"] is None or line.place in ("error", "log")
    if line.place == "error":
        names = [line.key.rpartition(".")[2], *(line.value if isinstance(line.value, dict) else ())]
        assert any(name in after["error"] for name in names), after["error"]
    else:
        assert after["error"] == before["error"] or line.place == "log", after["error"]
    named = Problem(path_of(kind, line.key), "").key
    assert not [note for note in after["notes"] if note.startswith(f"{named}:")], (
        "it is answered as if it had no effect"
    )
    if line.place in SAME_RESULT:
        assert_same_result(before, after)


def assert_same_result(before: dict[str, Any], after: dict[str, Any]) -> None:
    """The first step is the same but for rounding. Later ones may part, where Adam blows up the rounding of
    tiny gradients."""
    first, again = before["metrics"][0], after["metrics"][0]
    # Which passes are made isn't the result: log-probs that are taken from the rollouts need none.
    names, names_again = (
        {name for name in metrics if not name.startswith("batch/")} for metrics in (first, again)
    )
    assert names == names_again
    for name in names:
        if name.startswith(
            ("rollout/", "actor/pg_loss", "actor/entropy", "actor_train/grad", "sft/loss", "val/")
        ):
            np.testing.assert_allclose(again[name], first[name], rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "leaf"),
    [
        (kind, leaf)
        for kind in KINDS
        for key, leaf in LEAVES[kind].items()
        if key not in {line.key for line in LIVE[kind]}
    ],
    ids=lambda part: part.key if isinstance(part, Leaf) else part.__name__,
)
def test_every_other_setting_is_answered_wherever_it_is_set(kind: Kind, leaf: Leaf, bench: Bench) -> None:
    for changes in COMBINATIONS[kind]:
        assert answers(kind, bench.filled(changes), leaf), (
            f"{leaf.key} is neither refused nor answered with {changes}; where it does something, the table "
            "needs a line"
        )


def test_the_table_holds_settings_once() -> None:
    for kind in KINDS:
        keys = [line.key for line in LIVE[kind]]
        assert sorted(set(keys)) == sorted(keys) and set(keys) <= set(LEAVES[kind])
