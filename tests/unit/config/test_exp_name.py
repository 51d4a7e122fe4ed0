"""A run stays inside its `output_dir`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from small_configs import values_of

from turnwise.cli.main import main

NAMES = ["../evil", "/tmp/evil", "", ".", "..", "a/b", "a\\b", "a\0b", "x" * 300, "é" * 101, "two\nlines"]


def status_of(folder: Path, name: str) -> int:
    (folder / "run.yaml").write_text(yaml.safe_dump(values_of(exp_name=name)))
    return main(["config", str(folder / "run.yaml")])


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_that_is_no_folder_in_output_dir_is_refused(tmp_path, capsys, name):
    assert status_of(tmp_path, name) == 2
    said = capsys.readouterr().err
    assert "exp_name" in said and ("output_dir" in said or "\0" in name) and "Traceback" not in said


def test_names_in_any_script_are_fine(tmp_path):
    assert status_of(tmp_path, "Füße 2.1") == 0
