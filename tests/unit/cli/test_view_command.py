"""`turnwise view`: what it finds, what it prints, and one sentence for each kind of bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from viewed_run import HOSTILE, write_run

from turnwise.cli.main import main


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("view") / "exp" / "run")


@pytest.fixture
def run(written, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(written, tmp_path / "exp" / "run"))


def test_a_run_gets_its_pages(run, capsys):
    assert main(["view", str(run)]) == 0
    printed = capsys.readouterr()
    assert str(run / "view" / "index.html") in printed.out and not printed.err
    assert len(list((run / "view" / "data").iterdir())) == 5
    assert main(["view", str(run.parent), "--steps", "1,last", "--out", "pages"]) == 0
    names = {path.name for path in Path("pages", "data").iterdir()}
    assert names == {"index.js", "0-train-1.js", "0-train-3.js", "0-timeline.js"}


def test_several_runs_and_files_stand_side_by_side(run, capsys):
    other = Path(shutil.copy(run / "rollouts.jsonl", "mine.jsonl"))
    assert main(["view", str(run), str(other), "--out", "pages"]) == 0
    assert Path("pages/data/1-file-3.js").is_file()
    note = capsys.readouterr().err
    assert note.count("note:") == 1 and "--tokenizer" in note
    assert main(["view", str(other), "--tokenizer", str(run / "checkpoints/checkpoint-3")]) == 0
    assert Path("mine-view/index.html").is_file() and not capsys.readouterr().err


def test_a_cut_file_is_shown_as_far_as_possible(run, capsys):
    file = run / "rollouts.jsonl"
    content = file.read_bytes()
    file.write_bytes(content[:5000] + b"\n" + content[5000:-3000])
    assert main(["view", str(run)]) == 0
    assert "rollouts.jsonl: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("empty.jsonl", "", "no step"),
        ("other.jsonl", '{"messages": []}\n', "holds no episodes"),
        ("turns.jsonl", '{"episode":"a/0","context":0}\n', "--replay"),
        ("binary.jsonl", "\x00\x01", "holds no episodes"),
    ],
)
def test_files_without_episodes_are_one_sentence(run, capsys, name, content, word):
    Path(name).write_text(content)
    assert main(["view", name]) == 2
    assert word in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nowhere"], "nowhere"),
        (["empty"], "isn't a run folder"),
        (["sft"], "rollouts.jsonl"),
        (["RUN", "--out", "taken"], "taken"),
        (["RUN", "--out", "a-file"], "a-file"),
        (["RUN", "--steps", "7"], "none of them"),
        (["RUN", "--steps", "first"], "first"),
        (["RUN", "--steps", ","], "--steps"),
        (["RUN", "--port", "70000"], "65535"),
        (["RUN", "--port", "-1"], "--port"),
        (["RUN", "--port", "8000", "--text"], "exclude"),
        (["RUN", "--failed"], "--text"),
        (["RUN", "--no-color"], "--text"),
        (["RUN", "--tokenizer", "nowhere"], "nowhere"),
        (["RUN", "--text", "--trajectory", "1/2"], "STEP/GROUP/SIBLING"),
        (["RUN", "--text", "--trajectory", "9/0/0"], "no step 9"),
        (["RUN", "--text", "--trajectory", "1/77/0"], "no group 77"),
        (["RUN", "--text", "--trajectory", "1/0/9"], "no sibling 9"),
        (["RUN", "--text", "--failed", "--trajectory", "1/0/0"], "--failed"),
    ],
)
def test_bad_input_is_one_sentence(run, capsys, arguments, word):
    Path("empty").mkdir()
    Path("sft").mkdir()
    Path("sft/metrics.jsonl").write_text('{"step": 0, "sft/loss": 1.0}\n')
    Path("taken").mkdir()
    Path("taken/mine.txt").touch()
    Path("a-file").touch()
    assert main(["view", *(str(run) if word == "RUN" else word for word in arguments)]) == 2
    errors = capsys.readouterr().err
    assert word in errors and errors.count("error:") == 1 and "Traceback" not in errors


def test_damaged_parts_of_a_run_leave_the_rest(run, capsys):
    (run / "metrics.jsonl").write_text("{\n")
    (run / "timeline.json").write_text("{")
    (run / "config.yaml").write_text("a: [")
    assert main(["view", str(run)]) == 0
    notes = capsys.readouterr().err
    assert "timeline.json" in notes and "config.yaml" in notes
    assert "damaged" in (run / "view/data/index.js").read_text()


def test_copies_of_checkpoints_are_listed_too(run):
    for name in ("checkpoint-20", "checkpoint-10-copy2", "checkpoint-²"):
        (run / "checkpoints" / name).mkdir()
    assert main(["view", str(run)]) == 0
    index = (run / "view/data/index.js").read_text()
    assert "checkpoint-10-copy2" in index and index.index("checkpoint-3") < index.index("checkpoint-20")


def test_a_step_whose_lines_are_all_damaged_is_said(run, capsys):
    record = {"step": 0, "group": 0, "task": {"id": "t"}, "sibling": 0, "status": "finished", "turns": [5]}
    Path("mine.jsonl").write_text(json.dumps(record) + "\n")
    assert main(["view", "mine.jsonl", "--text"]) == 0
    assert main(["view", "mine.jsonl", "--text", "--trajectory", "1/0/0"]) == 2
    errors = capsys.readouterr().err
    assert "step 1" in errors and "damaged" in errors and "Traceback" not in errors


def test_a_step_that_is_missing_is_said(run, capsys):
    assert main(["view", str(run), "--steps", "0,2"]) == 0
    assert "no step 0" in capsys.readouterr().err


def test_text_lists_steps_failed_episodes_and_one_episode(run, capsys):
    assert main(["view", str(run), "--text"]) == 0
    listed = capsys.readouterr().out
    assert "entropy_collapse" in listed and "step 3" in listed and "1 failed" in listed
    assert main(["view", str(run), "--text", "--failed"]) == 0
    failed = capsys.readouterr().out
    assert "--trajectory 3/24/0" in failed and HOSTILE not in failed, "controls are escaped"
    assert main(["view", str(run), "--text", "--trajectory", "3/22/1"]) == 0
    episode = capsys.readouterr().out
    for word in ("turn 1, a new context", "sees", "logp", "search(", "score", "gsm8k 1"):
        assert word in episode
    shutil.rmtree(run / "checkpoints")
    assert main(["view", str(run), "--text", "--trajectory", "3/22/1"]) == 0
    assert "How high is the sea?" in capsys.readouterr().out, "without a tokenizer the messages are shown"


def test_text_counts_neither_baselines_nor_failed_episodes_in_the_mean(run, capsys):
    def line(sibling: int, score: float, **fields: object) -> str:
        record = {"step": 0, "group": 0, "task": {"id": "t"}, "sibling": sibling, "score": score, "turns": []}
        return json.dumps(record | {"status": "finished"} | fields) + "\n"

    lines = [line(0, 0.5), line(2, 0.25), line(3, 0.0, status="failed"), line(4, 1.0, is_baseline=True)]
    Path("mine.jsonl").write_text("".join(lines))
    assert main(["view", "mine.jsonl", "--text"]) == 0
    shown = capsys.readouterr().out
    assert "3 episodes" in shown and "0.375" in shown and "1 failed" in shown
    Path("mine.jsonl").write_text(line(0, 0.0, status="failed"))
    assert main(["view", "mine.jsonl", "--text"]) == 0
    assert "no score" in capsys.readouterr().out


def test_settings_that_differ_are_listed(run):
    assert main(["view", str(run)]) == 0
    text = (run / "view/data/index.js").read_text()
    [argument] = text.removeprefix("turnwise.index('").rsplit("');", 1)[:1]
    about = json.loads(argument.replace("\\'", "'").replace("\\\\", "\\"))["runs"][0]["about"]
    keys = [key for key, _ in about["settings"]]
    assert "adv_estimator" in keys and "gamma" not in keys and not about.get("settings_are_all")
    assert [one["step"] for one in about["health"]] == [2]
