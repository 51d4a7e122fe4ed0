"""What the pages of `turnwise view` are made from: steps of a rollouts.jsonl, and scripts that hold them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from viewed_run import HOSTILE, write_run

from turnwise.errors import ConfigError, DataError
from turnwise.models.token_decoder import TokenDecoder
from turnwise.report.view.folder import site_files, write_folder
from turnwise.report.view.rollouts_file import RolloutsFile, chosen_steps
from turnwise.report.view.scripts import script
from turnwise.report.view.source import Episodes, RunSource, metric_columns
from turnwise.report.view.step_data import step_data
from turnwise.report.view.timeline_data import timeline_data
from turnwise.report.view.token_texts import TokenTexts


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("viewed") / "run")


@pytest.fixture
def file(run) -> RolloutsFile:
    file = RolloutsFile(run / "rollouts.jsonl")
    file.scan()
    return file


def read_script(content: bytes) -> list:
    """The arguments of the call in a script, as a browser reads them."""
    [arguments] = re.findall(r"^turnwise\.[a-z]+\((.*)\);\n$", content.decode(), re.DOTALL)
    texts = re.findall(r"'((?:[^'\\]|\\.)*)'", arguments, re.DOTALL)
    return [json.loads(re.sub(r"\\(.)", r"\1", text)) for text in texts]


def test_steps_are_found_as_the_file_grows(run, tmp_path):
    lines = (run / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b"".join(lines[:3]) + lines[3][:40])
    file = RolloutsFile(path)
    assert file.scan() and list(file.steps) == [0] and len(file.lines(0)) == 3
    assert not file.scan(), "the fourth line has no end yet"
    path.write_bytes(b"".join(lines))
    assert file.scan() and list(file.steps) == [0, 1, 2]
    assert [json.loads(line) for step in file.steps for line in file.lines(step)] == [*map(json.loads, lines)]
    path.write_bytes(b"".join(lines[:2]))
    assert file.scan() and list(file.steps) == [0], "a resumed run cuts its file"


def test_a_file_that_was_cut_and_has_grown_again_is_read_anew(run, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    lines = [b'{"step":%d,"task":{},"turns":[],"score":0.25}\n' % step for step in range(5)]
    path.write_bytes(b"".join(lines))
    file = RolloutsFile(path)
    assert file.scan() and not file.scan() and file.num_cuts == 0
    again = [line.replace(b"0.25", b"0.5") for line in lines[2:]]
    path.write_bytes(b"".join([*lines[:2], *again, *again[-1:]]))
    assert file.scan() and file.num_cuts == 1, "it is longer than before"
    assert [record["score"] for step in range(2, 5) for record in file.records(step)[0]] == [0.5] * 4
    path.write_bytes(path.read_bytes().replace(b"0.5", b"0.7"))
    assert file.scan() and file.num_cuts == 2, "it is as long as before"
    path.write_bytes(path.read_bytes() + again[-1])
    assert file.scan() and not file.scan() and file.num_cuts == 2, "lines that are appended are no cut"
    path.write_bytes(b"")
    assert not file.scan() and file.steps == {} and file.num_cuts == 3


def test_damaged_lines_are_counted_and_left_out(run, tmp_path):
    lines = (run / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    path = tmp_path / "rollouts.jsonl"
    others = [
        b"no json\n",
        b'{"step": "a"}\n',
        b'{"step":0,"turns":[]}\n',
        b"\n",
        b'{"step":0,"x":[}\n',
        lines[0][:99] + b"\n",
    ]
    path.write_bytes(lines[0] + b"".join(others) + lines[1])
    file = RolloutsFile(path)
    file.scan()
    records, num_damaged = file.records(0)
    assert len(records) == 2 and file.num_damaged + num_damaged == 5


def test_a_step_says_what_its_lines_say(file):
    records, _ = file.records(1)
    made = step_data(1, records, None)
    assert [group["index"] for group in made.data["groups"]] == [10, 11, 12, 13, 14]
    assert [len(group["members"]) for group in made.data["groups"]] == made.summary["size"] == [4, 4, 2, 2, 2]
    assert made.summary["rejected"] == "02001" and made.summary["status"] == "f" * 12 + "xf"
    first, recorded = made.data["groups"][0]["members"][1]["turns"][2], records[1]["turns"][2]
    for name in ("prompt_ids", "response_ids", "messages", "action", "state_key", "versions"):
        assert first[name] == recorded[name]
    assert first["logprobs"] == [round(value, 4) for value in recorded["logprobs"]]
    assert first["old"] == recorded["token_values"]["old"] and first["entropy"]
    assert made.data["groups"][0]["task"]["seed"] == str(2**61 + 10), "a browser would round it"
    assert (
        made.data["tools"][made.data["groups"][2]["members"][0]["turns"][0]["tools"]][0]["function"]["name"]
        == "search"
    )
    assert "texts" not in made.data


def test_files_of_older_versions_and_of_other_programs_are_read(file):
    records, _ = file.records(0)
    for record in records:
        for name in ("contexts_are", "answer_turn"):
            del record[name]
        for turn in record["turns"]:
            for name in ("messages", "token_values", "is_trained", "tools"):
                turn.pop(name, None)
    made = step_data(0, [*records, {"step": 0, "task": {}, "turns": [3]}], None)
    assert made.summary["size"] == [4, 4, 2, 2, 2] and made.data["damaged"] == 1


def test_fields_of_any_type_are_shown_or_counted_as_damaged(file, run):
    texts = TokenTexts(TokenDecoder(run / "checkpoints" / "checkpoint-3"))
    records, _ = file.records(0)
    for odd in (None, 3, -1.5, "x", [], {}, [None], [["x"]], [2**70], {"a": 1}, True):
        for holder in ("record", "task", "turn"):
            names = {"record": records[0], "task": records[0]["task"], "turn": records[0]["turns"][0]}[holder]
            for name in names:
                record = json.loads(json.dumps(records[0]))
                place = {"record": record, "task": record["task"], "turn": record["turns"][0]}[holder]
                place[name] = odd
                if not isinstance(record["turns"], list) or not isinstance(record["task"], dict):
                    continue  # such a line isn't taken for an episode
                made = step_data(0, [record, records[1]], texts)
                assert sum(made.summary["size"]) + made.data.get("damaged", 0) == 2, (holder, name, odd)
                script("step", made.data)


def test_a_script_holds_any_text():
    values = {
        "__proto__": 1,
        "text": HOSTILE,
        "quote": "it's \\' \\\\",
        "line": "a\nb\u2028",
        "odd": "\ud800",
    }
    content = script("step", "0/train/1", values)
    assert b"\n" not in content[:-1], "a line break would end the text of a script"
    assert read_script(content) == ["0/train/1", values | {"odd": "?"}]
    assert read_script(script("step", {"score": float("inf")})) == [{"score": None}]


@pytest.mark.skipif(shutil.which("node") is None, reason="no node is here to check the syntax of scripts")
def test_scripts_and_pages_are_javascript(tmp_path):
    (tmp_path / "data.js").write_bytes(script("step", HOSTILE, {HOSTILE: [HOSTILE]}))
    for path in [tmp_path / "data.js", *(path for path in site_files() if path.suffix == ".js")]:
        subprocess.run(["node", "--check", path], check=True, timeout=60)


def test_pages_have_neither_inline_code_nor_addresses():
    pages = {path.name: path.read_text(encoding="utf-8") for path in site_files()}
    for name, text in pages.items():
        addresses = set(re.findall(r"https?://[^\s\"']+", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, f"{name} names {addresses}"
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
        )
    assert not re.search(r"<script(?! src=)|<style|\son[a-z]+=|style=", pages["index.html"])
    scripts = set(re.findall(r'<script src="([^"]+)"', pages["index.html"]))
    assert scripts == {name for name in pages if name.endswith(".js")}


def test_a_folder_is_written_again_but_not_over_other_files(run, file, tmp_path):
    source = RunSource("run", str(run), [Episodes("train", file, 1)], None)
    out = tmp_path / "pages"
    index = write_folder(out, [source])
    assert index == out / "index.html" and len(list((out / "data").iterdir())) == 4
    source.episodes[0].chosen = [2]
    write_folder(out, [source])
    assert {path.name for path in (out / "data").iterdir()} == {"index.js", "0-train-2.js"}
    [index_data] = read_script((out / "data" / "index.js").read_bytes())
    assert [row["step"] for row in index_data["runs"][0]["kinds"][0]["steps"]] == [2]
    (out / "mine.txt").touch()
    with pytest.raises(ConfigError, match=r"mine\.txt"):
        write_folder(out, [source])
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--out"):
        write_folder(tmp_path / "file", [source])


def test_of_a_large_file_every_kth_step_is_chosen(file):
    assert chosen_steps(file, 10**9) == ([0, 1, 2], 1)
    chosen, every = chosen_steps(file, sum(map(file.num_bytes, file.steps)) // 2)
    assert every >= 2 and chosen[0] == 0 and chosen[-1] == 2


def test_metrics_become_columns():
    columns = metric_columns([{"step": 0, "a": 1.23456}, {"step": 1, "b": 2}])
    assert columns == {"step": [0, 1], "values": {"a": [1.235, None], "b": [None, 2]}}


def test_a_timeline_keeps_the_longest_spans(run, tmp_path, monkeypatch):
    data = timeline_data(run / "timeline.json")
    assert [track["name"] for track in data["tracks"]] == ["trainer", "engine"] and data["left_out"] == 0
    assert data["tracks"][0]["spans"][0] == [0, 0.02, 0.06]
    monkeypatch.setattr("turnwise.report.view.timeline_data.MAX_SPANS", 10)
    assert timeline_data(run / "timeline.json")["left_out"] == 50
    for number, text in enumerate(["{", "[]", '{"traceEvents": [{}]}', '{"traceEvents": 3}']):
        broken = tmp_path / f"{number}.json"
        broken.write_text(text)
        with pytest.raises(DataError, match="timeline"):
            timeline_data(broken)
