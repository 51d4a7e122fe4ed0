"""Bad input of every kind, as a user gives it: one screen, exit status 2, and what was done before is still
there."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import forked
import pytest
from messages import mentions
from transformers import AutoModelForCausalLM

from turnwise.cli.main import main
from turnwise.models.make import make_model


@pytest.fixture
def job(job):
    """A run of one group a step, whose episodes aren't played again."""
    manager = {"num_env_groups": 1, "group_size": 4, "max_env_retries": 0}
    return partial(job, rollout_batch_size=4, val_batch_size=4, train_env_manager=manager)


def model_folder(tmp_path, tiny_model, damage):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    if damage == "not a model":
        (folder / "config.json").unlink()
    elif damage == "no template":
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings.pop("chat_template", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    elif damage == "cut weights":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
    return folder


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("not a model", "it has no config.json"),
        ("no template", "no chat template"),
        ("cut weights", "model.safetensors is cut"),
    ],
)
def test_a_model_folder_that_cannot_be_used(job, refused, tmp_path, tiny_model, damage, message):
    assert message in refused("train", job(), f"pretrain={model_folder(tmp_path, tiny_model, damage)}")
    assert not list((tmp_path / "runs").glob("*/*")), "a start that failed leaves no run folder"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"env_type": "toy_envs:LetterEnv"}, "Did you mean 'LettersEnv'?"),
        ({"env_type": "broken_module:Env"}, r"importing broken_module failed with ZeroDivisionError"),
        ({"env_type": "odd_envs:RaisingEnv"}, "the toy is broken"),
        ({"env_type": "own_envs:RaisesInReset"}, "no level 7"),
        ({"env_type": "odd_envs:WrongTupleEnv"}, "got a tuple of 4"),
        ({"env_type": "odd_envs:NaNEnv"}, "nan"),
        ({"env_type": "own_envs:Hangs"}, "env_step_timeout_s"),
        ({"agent_template": "{observation} " + "word " * 400}, "raise sequence_length or shorten"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value.values()))[:30],
)
def test_an_environment_that_cannot_be_played(job, refused, tmp_path, env, message):
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    (tmp_path / "own_envs.py").write_text(
        "import asyncio\n"
        "from toy_envs import LettersEnv\n\n\n"
        "class RaisesInReset(LettersEnv):\n"
        "    def reset(self, *, seed=None):\n"
        "        raise ValueError('no level 7')\n\n\n"
        "class Hangs(LettersEnv):\n"
        "    async def step(self, action):\n"
        "        await asyncio.Event().wait()\n"
    )
    quick = ["train_env_manager.env_step_timeout_s=0.3"] if "Hangs" in str(env) else []
    assert message.lower() in refused("train", job(env), *quick, shows_trace=True).lower()


def runs(tmp_path):
    return sorted((tmp_path / "runs" / "job").iterdir())


def test_an_environment_that_breaks_in_the_middle_loses_nothing(job, counting_env, refused, tmp_path):
    env = counting_env("if Mine.made > 12:", "    raise OSError('the level server is gone')")
    breaks = partial(job, env, save_steps=0)
    said = refused("train", breaks(max_steps=5), shows_trace=True)
    [run] = runs(tmp_path)
    assert "the level server is gone" in said
    [num_done] = map(int, re.findall(r"saved (\d) steps", said))
    assert 1 <= num_done <= 3
    AutoModelForCausalLM.from_pretrained(run / "checkpoints" / f"checkpoint-{num_done}")
    sys.modules["counting"].Mine.made = -100
    assert main(["train", breaks(max_steps=4), "resume_from_checkpoint=true"]) == 0
    rows = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert runs(tmp_path) == [run] and rows == [0, 1, 2, 3]


def test_a_corrupted_newest_checkpoint(job, tmp_path, capsys):
    assert main(["train", job()]) == 0
    [run] = runs(tmp_path)
    (run / "checkpoints" / "checkpoint-2" / "model.safetensors").write_bytes(b"")
    assert main(["train", job(max_steps=3), "resume_from_checkpoint=true"]) == 0
    said = capsys.readouterr().err
    assert mentions(said, "checkpoint-2", "corrupted", "model.safetensors") and "checkpoint-1" in said
    assert (run / "checkpoints" / "checkpoint-3").is_dir()


def test_a_changed_config(job, refused, capsys):
    assert main(["train", job()]) == 0
    said = refused("train", job(), "resume_from_checkpoint=true", "seed=7")
    assert mentions(said, "continued", "config") and "seed: 42 → 7" in said
    assert main(["config", job(), "resume_from_checkpoint=true", "seed=7"]) == 0
    said = capsys.readouterr().out.partition("missing to run this config here:")[2]
    assert mentions(said, "continued", "config") and "seed: 42 → 7" in said
    assert main(["train", job(), "resume_from_checkpoint=true", "max_steps=3", "max_grad_norm=0.5"]) == 0
    said = capsys.readouterr().err
    assert "max_steps: 2 → 3" in said and "max_grad_norm: 1.0 → 0.5" in said


def turnwise(*arguments, cwd, prefix=(), **options):
    pipe = subprocess.PIPE
    options = {
        "cwd": cwd,
        "stdout": pipe,
        "stderr": pipe,
        "text": True,
        "env": os.environ | {"OMP_NUM_THREADS": "1"},
    } | options
    if not prefix:
        return forked.Popen(arguments, **options)
    return subprocess.Popen([*prefix, sys.executable, "-m", "turnwise.cli.main", *arguments], **options)


def test_ctrl_c_saves_and_a_second_run_into_the_same_folder_is_refused(job, refused, tmp_path):
    config = job(max_steps=100_000, save_steps=0)
    first = turnwise("train", config, cwd=tmp_path)
    try:
        while not list(tmp_path.glob("runs/job/*/metrics.jsonl")):
            assert first.poll() is None, first.communicate()[1]
            time.sleep(0.05)
        time.sleep(0.5)
        # Nothing is saved yet, so a second run that would go on starts one of its own. With the path of the
        # run it is told.
        [run] = runs(tmp_path)
        shutil.copytree(_any_checkpoint(job, tmp_path), run / "checkpoints" / "checkpoint-1")
        assert first.poll() is None, first.communicate()[1]
        said = refused("train", config, f"resume_from_checkpoint={run}")
        assert mentions(said, "in use", "process"), (
            first.communicate()[1] if first.poll() is not None else said
        )
        shutil.rmtree(run / "checkpoints")
    finally:
        first.send_signal(signal.SIGINT)
    _, said = first.communicate()
    assert first.returncode == 130, said
    [saved] = (run / "checkpoints").iterdir()
    assert (
        str(saved.relative_to(tmp_path)) in said
        and "resume_from_checkpoint=true" in said
        and "Traceback" not in said
    )
    rows = (run / "metrics.jsonl").read_text().splitlines()
    assert saved.name == f"checkpoint-{len(rows)}"
    AutoModelForCausalLM.from_pretrained(saved)
    assert main(["train", job(max_steps=len(rows) + 1), f"resume_from_checkpoint={run}"]) == 0
    assert len((run / "metrics.jsonl").read_text().splitlines()) == len(rows) + 1


def _any_checkpoint(job, tmp_path):
    assert main(["train", job(exp_name="other", max_steps=1)]) == 0
    return next((tmp_path / "runs" / "other").glob("*/checkpoints/checkpoint-1"))


IN_A_SMALL_DISK = (
    'mount -t tmpfs -o size=2500k tmpfs small && { "$0" "$@"; status=$?; ls small/job/*/; exit $status; }'
)
"""Runs a command beside a disk of 2.5 MB, which only it sees, and lists what the disk holds in the end."""


IN_A_TINY_DISK = (
    'mount -t tmpfs -o size=40k tmpfs small && { "$0" "$@"; status=$?; ls -A small; echo '
    "nothing; exit $status; }"
)


def can_mount() -> bool:
    return (
        shutil.which("unshare") is not None
        and not subprocess.run(
            ["unshare", "--map-root-user", "--mount", "true"], capture_output=True
        ).returncode
    )


@pytest.mark.skipif(not can_mount(), reason="needs user namespaces to mount a small tmpfs")
@pytest.mark.parametrize(
    "command",
    [
        "make-model --size tiny --out small/new",
        pytest.param("export --model {model} --out small/new", marks=pytest.mark.extra),
    ],
)
def test_a_full_disk_while_a_model_is_written(command, tiny_model, tmp_path):
    (tmp_path / "small").mkdir()
    prefix = ("unshare", "--map-root-user", "--mount", "sh", "-c", IN_A_TINY_DISK)
    process = turnwise(*command.format(model=tiny_model).split(), cwd=tmp_path, prefix=prefix)
    listing, said = process.communicate()
    assert process.returncode == 2, said
    assert mentions(said, "small/new", "No space left") and "Traceback" not in said
    assert listing.split() == ["nothing"], "no half model is left"


@pytest.mark.skipif(not can_mount(), reason="needs user namespaces to mount a small tmpfs")
def test_a_full_disk_while_checkpointing(job, tmp_path):
    """The disk takes some checkpoints; then one is refused, and those before it are whole."""
    (tmp_path / "small").mkdir()
    words = ["write 0 1 2 3 4 5 6 7 8 9 more "]
    make_model("tiny", tmp_path / "bigger", words, overrides={"hidden_size": 64, "num_hidden_layers": 1})
    config = job(max_steps=9, pretrain=str(tmp_path / "bigger"), checkpoint_config={"output_dir": "small"})
    prefix = ("unshare", "--map-root-user", "--mount", "sh", "-c", IN_A_SMALL_DISK)
    process = turnwise("train", config, cwd=tmp_path, prefix=prefix)
    listing, said = process.communicate()
    assert process.returncode == 2, said
    assert "can't be written" in said and "No space left on device" in said and "the last good one is" in said
    names = [line for line in listing.split() if line.startswith("checkpoint-")]
    assert names and all(name.removeprefix("checkpoint-").isdigit() for name in names), (
        "no half checkpoint is left"
    )
    assert f"checkpoint-{len(names)}" in said and "Traceback" not in said
