"""Checkpoints by shares on the process cluster: FSDP2's on any number of ranks, and in other strategies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_workers import Kind, distance
from ranked_roles import make_role, make_roles, runner, steps  # noqa: F401
from safetensors import safe_open
from strategy_contract import WeightedLoss
from toy_model import toy_samples

from turnwise.errors import ModelError
from turnwise.model_files.share_index import SHARES, read_index
from turnwise.models.load import load_model
from turnwise.models.shares import MOMENTS, Shares, moment_key

KIND = Kind(fsdp2={}, eps=1e-4)


def ask(role: Any, method: str, *arguments: Any) -> Any:
    return role.workers.call(method, *arguments, route="broadcast").result()


def state_of(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint by shares."""
    shares = Shares(folder)
    names = [*shares.weights]
    steps_of = json.loads((folder / "trainer_state.json").read_text())["optimizer"]["steps"]
    names += [moment_key(moment, name) for moment in MOMENTS for name in steps_of]
    return {name: shares.whole(name, shares.shape(name)).numpy() for name in names}


def step(role: Any, number: int) -> None:
    role.optimizer_step(toy_samples(11, seed=number), WeightedLoss(), position=number)


def test_two_ranks_go_on_bit_by_bit_and_other_numbers_with_the_same_state(make_role, tmp_path):  # noqa: F811
    """2 → 2 through the next step; 2 → 1 → 2 with all weights, moments and steps. The files of each rank hold
    about half of the model."""
    role = make_role(KIND, 2)
    step(role, 0)
    ask(role, "save", tmp_path / "two", "training and model")
    at_save = ask(role, "parameters")
    step(role, 1)
    expected = ask(role, "parameters")
    plain = dict(load_model(tmp_path / "two").named_parameters())
    assert {name: tensor.detach().numpy().tobytes() for name, tensor in plain.items()} == {
        name: array.tobytes() for name, array in at_save.items()
    }
    again = make_role(KIND, 2)
    ask(again, "load", tmp_path / "two")
    np.testing.assert_equal(ask(again, "parameters"), at_save)
    step(again, 1)
    np.testing.assert_equal(ask(again, "parameters"), expected)
    one = make_role(KIND, 1)
    ask(one, "load", tmp_path / "two")
    ask(one, "save", tmp_path / "one")
    ask(again, "load", tmp_path / "one")
    ask(again, "save", tmp_path / "again")
    states = [state_of(tmp_path / name) for name in ("two", "one", "again")]
    np.testing.assert_equal(states[1], states[0])
    np.testing.assert_equal(states[2], states[0])
    files = read_index(tmp_path / "two").files
    sizes = [file.num_bytes for file in files.values()]
    assert len(files) == 2 and max(sizes) < 1.2 * min(sizes)
    assert len(read_index(tmp_path / "one").files) == 1


@pytest.mark.extra
def test_four_ranks_go_on_from_two_by_way_of_one(make_role, tmp_path):  # noqa: F811
    """The same state, and the same next step up to rounding."""
    role = make_role(KIND, 2)
    step(role, 0)
    ask(role, "save", tmp_path / "2")
    at_save = ask(role, "parameters")
    for number, before in ((1, 2), (4, 1)):
        role = make_role(KIND, number)
        ask(role, "load", tmp_path / str(before))
        ask(role, "save", tmp_path / str(number))
        np.testing.assert_equal(state_of(tmp_path / str(number)), state_of(tmp_path / "2"))
    np.testing.assert_equal(ask(role, "parameters"), at_save)


@pytest.mark.extra
@pytest.mark.parametrize(
    "kind", [Kind(fsdp2={}, rank=4, eps=1e-4), Kind(fsdp2={"fsdp_size": 1}, eps=1e-4)], ids=["lora", "copies"]
)
def test_plain_torch_goes_on_from_shares_and_back(make_role, tmp_path, kind):  # noqa: F811
    two = make_role(kind, 2)
    step(two, 0)
    ask(two, "save", tmp_path / "shares")
    at_save = ask(two, "parameters")
    one = make_role(Kind(rank=kind.rank, eps=kind.eps), 1)
    ask(one, "load", tmp_path / "shares")
    np.testing.assert_equal(ask(one, "parameters"), at_save)
    for role in (one, two):
        step(role, 1)
    moved = [{n: v - at_save[n] for n, v in ask(role, "parameters").items()} for role in (one, two)]
    assert distance(*moved) <= 1e-3
    ask(one, "save", tmp_path / "whole")
    ask(two, "load", tmp_path / "whole")
    np.testing.assert_equal(ask(two, "parameters"), ask(one, "parameters"))


@pytest.mark.extra
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_saving_takes_twice_the_largest_file(make_role, tmp_path):  # noqa: F811
    """A rank holds ten times as much as a file may have, and its memory while saving is what it was before,
    twice the largest file, and 64 MB."""
    large = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    role = make_role(Kind(fsdp2={}, config=large), 2)
    step(role, 0)
    answers = [role.workers.at(rank).call("memory_of_saving", tmp_path, 16 * 2**20) for rank in (0, 1)]
    measured = [answer.result() for answer in answers]
    sizes = [file.stat().st_size for file in tmp_path.rglob("*.safetensors")]
    assert max(sizes) <= 16 * 2**20 and sum(sizes) > 20 * max(sizes)
    for before, peak in measured:
        assert peak <= before + 2 * max(sizes) + 64 * 2**20


def test_a_model_alone_has_no_state(make_role, tmp_path):  # noqa: F811
    role = make_role(KIND, 2)
    ask(role, "save", tmp_path / "model", "model")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert "model.safetensors" in names and SHARES not in names
    assert not any(name.startswith("trainer_state") for name in names)
    with safe_open(tmp_path / "model" / "model.safetensors", "np") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_a_missing_share_is_refused_on_all_ranks(make_role, tmp_path):  # noqa: F811
    role = make_role(KIND, 2)
    step(role, 0)
    ask(role, "save", tmp_path / "two")
    next((tmp_path / "two" / SHARES).glob("*/shard-00002-*")).unlink()
    with pytest.raises(ModelError, match="missing"):
        ask(role, "load", tmp_path / "two")
