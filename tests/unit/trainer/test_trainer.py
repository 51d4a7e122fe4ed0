"""`Trainer`: objects in the place of a file, its steps, what it leaves, and what it refuses."""

from __future__ import annotations

import enum
import json
import sys
from datetime import date
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from messages import mentions, says
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise import Trainer
from turnwise.agents.env_agent import EnvAgent
from turnwise.cli.main import main
from turnwise.envs.base import TextEnv
from turnwise.errors import ConfigError, DataError, EnvironmentFault, NotAvailableError, TurnwiseError
from turnwise.tracking.jsonl import read_metrics
from turnwise.trainer.objects import Objects, plain_values


class OwnEnv(TextEnv):
    """Wants lower-case letters in one turn."""

    def reset(self, *, seed=None):
        return "write", {}

    def step(self, action):
        share = sum(letter.islower() for letter in action) / max(len(action), 1)
        return "done", share, True, False, {}


def own(**changes):
    texts = {"agent_system_template": "", "agent_template": "{observation}", "action_pattern": None}
    return {"OwnEnv": {"env_type": OwnEnv, "max_tokens_per_step": 4, **texts, **changes}}


@pytest.fixture
def keys(small_keys):
    return small_keys | {"env": own()}


def measured(folder):
    rows = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "system/tps"))} for row in rows]


def test_a_trainer_trains_evaluates_and_saves_what_the_commands_do(keys, tmp_path, capsys):
    trainer = Trainer(**keys, eval_steps=2, algorithm="rloo")
    assert trainer.run_folder is None and trainer.checkpoint is None
    trainer.train()
    assert trainer.checkpoint == trainer.run_folder / "checkpoints" / "checkpoint-2"
    last = measured(trainer.run_folder)[-1]
    evaluation = trainer.evaluate()
    assert evaluation.overall.mean_score == pytest.approx(last["val/score/mean"], abs=1e-12)
    assert str(evaluation).splitlines()[2].startswith("all ")
    assert trainer.plot()._repr_png_().startswith(b"\x89PNG")
    saved = trainer.save(tmp_path / "out")
    assert not (saved / "trainer_state.pt").exists() and AutoTokenizer.from_pretrained(saved).chat_template
    assert AutoModelForCausalLM.from_pretrained(saved).num_parameters() > 0
    assert trainer.save(tmp_path / "out") == saved  # a notebook's cell is called again

    names = {"env_type": f"{__name__}:OwnEnv"}
    config = {
        k: str(v) if k == "output_dir" else v
        for k, v in keys.items()
        if k not in ("model", "env", "is_quiet")
    }
    config |= {
        "pretrain": str(keys["model"]),
        "custom_envs": own(**names),
        "adv_estimator": "rloo",
        "eval_steps": 2,
    }
    config["exp_name"] = "by-file"
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    sys.modules.setdefault(__name__, sys.modules[OwnEnv.__module__])
    assert main(["train", str(tmp_path / "own.yaml"), "--quiet"]) == 0
    [by_file] = (tmp_path / "runs" / "by-file").iterdir()
    assert measured(by_file) == measured(trainer.run_folder)


def test_steps_and_callbacks_tell_of_metrics_groups_validation_and_checkpoints(keys):
    watcher = Watcher()
    trainer = Trainer(**keys, eval_steps=2, callbacks=[watcher])
    reports = list(trainer.steps())
    assert [report.step for report in reports] == [1, 2, 2]
    assert [report.is_final for report in reports] == [False, False, True]
    assert [len(report.groups) for report in reports] == [2, 2, 0]
    assert [report.validation is not None for report in reports] == [True, False, True]
    assert [report.checkpoint for report in reports] == [None, trainer.checkpoint, None]
    rows = read_metrics(trainer.run_folder / "metrics.jsonl")
    assert [{"step": step, **report.metrics} for step, report in enumerate(reports)] == rows
    first, last = [("validation", 2.0), ("step", 1)], [("validation", 2.0)]
    assert watcher.calls == [*first, ("step", 2), ("checkpoint", "checkpoint-2"), *last]


def test_a_loop_that_is_left_is_saved_and_gone_on_from(keys, capsys):
    trainer = Trainer(**keys | {"max_steps": 3})
    for report in trainer.steps():
        if report.step == 1:
            break
    assert trainer.checkpoint.name == "checkpoint-1"
    assert "saved 1 step" in capsys.readouterr().err
    trainer.train()
    assert "going on from" in capsys.readouterr().err
    whole = Trainer(**keys | {"max_steps": 3, "exp_name": "whole"})
    whole.train()
    assert measured(trainer.run_folder) == measured(whole.run_folder)
    assert [row["step"] for row in measured(trainer.run_folder)] == [0, 1, 2]


def test_training_again_says_that_all_is_done_and_goes_on_with_more_steps(keys, capsys):
    trainer = Trainer(**keys)
    trainer.train()
    folder = trainer.run_folder
    trainer.train()
    assert mentions(capsys.readouterr().out, "all 2 steps")
    trainer.train(max_steps=3)
    assert trainer.run_folder == folder and trainer.checkpoint.name == "checkpoint-3"
    assert "max_steps: 2 → 3" in capsys.readouterr().err


def test_an_error_and_ctrl_c_in_the_loop_save_as_well(keys):
    for fault in (ValueError, KeyboardInterrupt):
        trainer = Trainer(**keys, exp_name=fault.__name__)
        with pytest.raises(fault):
            for _ in trainer.steps():
                raise fault
        assert trainer.checkpoint.name == "checkpoint-1"


class Watcher:
    def __init__(self, answer=None):
        self.calls, self.answer = [], answer

    def on_step_end(self, report):
        self.calls.append(("step", report.step))
        return self.answer

    def on_validation(self, report):
        self.calls.append(("validation", report.validation["val/num_episodes"]))

    def on_checkpoint(self, report):
        self.calls.append(("checkpoint", report.checkpoint.name))


def test_a_callback_stops_a_run_with_its_checkpoint_and_validation(keys):
    watcher = Watcher("stop")
    trainer = Trainer(**keys | {"max_steps": 5}, eval_steps=5, callbacks=[watcher])
    reports = list(trainer.steps())
    assert [report.step for report in reports] == [1, 1] and reports[-1].is_final and reports[-1].validation
    assert trainer.checkpoint.name == "checkpoint-1" and watcher.calls[-1] == ("checkpoint", "checkpoint-1")


def test_a_callback_that_raises_is_named_and_the_steps_are_saved(keys):
    class Broken:
        def on_step_end(self, report):
            raise ValueError("not today")

    trainer = Trainer(**keys, callbacks=[Broken()])
    with pytest.raises(
        EnvironmentFault, match=says("callback Broken.on_step_end", "ValueError", "not today")
    ):
        trainer.train()
    assert trainer.checkpoint.name == "checkpoint-1"


def test_a_callback_that_answers_something_else_or_has_no_method_is_refused(keys):
    with pytest.raises(ConfigError, match=says("Watcher.on_step_end", "True", "'stop'")):
        Trainer(**keys, callbacks=[Watcher(True)]).train()

    class Misspelt:
        def on_step_ended(self, report): ...

    with pytest.raises(ConfigError, match=says("methods", "'on_step_end'")):
        Trainer(**keys, callbacks=[Misspelt()])


def test_two_trainers_at_once_are_refused(keys):
    steps = Trainer(**keys).steps()
    next(steps)
    other = Trainer(**keys, exp_name="other")
    for work in (other.train, other.evaluate):
        with pytest.raises(NotAvailableError, match=says("Trainer", "at work")):
            work()
    steps.close()
    other.train()
    assert other.checkpoint.name == "checkpoint-2"


def test_an_object_is_recorded_compared_and_asked_for(keys, capsys, tmp_path):
    trainer = Trainer(**keys)
    trainer.train()
    recorded = yaml.safe_load((trainer.run_folder / "config.yaml").read_text())
    text = recorded["custom_envs"]["OwnEnv"]["env_type"]
    assert text.startswith("object_") and text.endswith(f"{OwnEnv.__module__}:OwnEnv")
    again = Trainer(**keys | {"max_steps": 3}, resume_from_checkpoint=True)
    again.train()
    assert again.run_folder == trainer.run_folder
    assert "env_type" not in capsys.readouterr().err

    class OwnEnv2(OwnEnv):
        def reset(self, *, seed=None):
            return "write something", {}

    OwnEnv2.__name__ = "OwnEnv"
    changed = keys | {"max_steps": 4, "env": own(env_type=OwnEnv2)}
    Trainer(**changed, resume_from_checkpoint=True).train()
    assert "custom_envs.OwnEnv.env_type: 'object_" in capsys.readouterr().err

    del sys.modules[text.partition(":")[0]]
    file = trainer.run_folder / "config.yaml"
    (tmp_path / "config.yaml").write_text(file.read_text().replace("object_", "object_0"))
    with pytest.raises(ConfigError, match=says("Python object", "Trainer")):
        Trainer.from_config(tmp_path / "config.yaml")
    capsys.readouterr()
    assert main(["train", str(tmp_path / "config.yaml"), "resume_from_checkpoint=true"]) == 2
    assert "the object and Trainer(…, resume_from_checkpoint=True)" in capsys.readouterr().err


def test_closures_of_one_source_stay_apart(keys):
    def make(reply):
        class Env(OwnEnv):
            def reset(self, *, seed=None):
                return reply, {}

        return Env

    trainer = Trainer(**keys | {"env": {name: own(env_type=make(name))["OwnEnv"] for name in ("one", "two")}})
    texts = [env.env_type for env in trainer.config.custom_envs.values()]
    assert texts[1] == f"{texts[0]}_2"
    for report in trainer.steps():
        firsts = {(group.task.tag, group.trajectories[0].turns[0].observation) for group in report.groups}
        assert {tag in seen for tag, seen in firsts} == {True}


def test_a_file_with_overrides(keys, tmp_path):
    (tmp_path / "own_env.py").write_text("from toy_envs import LettersEnv as Letters\n")
    section = {
        "env_type": "own_env:Letters",
        "max_tokens_per_step": 4,
        "action_pattern": None,
        "max_steps": 3,
    }
    values = {
        "pretrain": str(keys["model"]),
        "custom_envs": {"Letters": section},
        "train_env_manager": {"num_env_groups": 3},
    }
    (tmp_path / "letters.yaml").write_text(yaml.safe_dump(values))
    trainer = Trainer.from_config(tmp_path / "letters.yaml", train_env_manager={"group_size": 2}, max_steps=1)
    config = trainer.config
    assert (
        config.exp_name,
        config.train_env_manager.num_env_groups,
        config.train_env_manager.group_size,
    ) == ("letters", 3, 2)
    sys.path.remove(str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"letters.yaml can't be used: 1 problem.\n .*max_step: unknown key. Did you mean"
    ):
        Trainer.from_config(tmp_path / "letters.yaml", max_step=1)


REFUSED = {
    "no model": ({"model": None}, says("Trainer", "model='runs/model'")),
    "nothing to play": ({"env": None}, says("play", "env=YourEnv")),
    "rewards alone": (
        {"env": None, "reward_funcs": [len]},
        says("reward_funcs", "play"),
    ),
    "weights alone": ({"reward_weights": [1.0]}, says("no reward_funcs")),
    "a weight too many": ({"reward_funcs": ["a"], "reward_weights": [1, 2]}, "2 weights for 1 reward_funcs"),
    "a weight that is no number": (
        {"reward_funcs": ["a"], "reward_weights": ["a"]},
        says("reward_weights", "['a']"),
    ),
    "weights that are no list": (
        {"reward_funcs": ["a"], "reward_weights": 0.5},
        says("reward_weights", "0.5"),
    ),
    "a callback without a list": ({"callbacks": OwnEnv()}, r"callbacks: got <.*OwnEnv.*callbacks=\[…\]"),
    "a model twice": ({"pretrain": "runs/model"}, says("model", "pretrain")),
    "an algorithm twice": (
        {"algorithm": "grpo", "adv_estimator": "rloo"},
        says("algorithm", "adv_estimator"),
    ),
    "an unknown keyword": (
        {"rollout_batch": 2},
        says("rollout_batch", "'rollout_batch_size'"),
    ),
    "an instance": (
        {"env": OwnEnv()},
        says("custom_envs.OwnEnv.env_type", "OwnEnv", "'env_config'"),
    ),
    "an unknown environment": (
        {"env": "frozen_lak"},
        says("'frozen_lak'", "'frozen_lake'"),
    ),
    "data that is no section": ({"data": ["a.jsonl"]}, says("data", "['a.jsonl']", "section")),
    "a number as a data set": ({"train_dataset": 3}, says("data set", "list of dicts")),
    "a wrong class": ({"env": {"A": {"env_type": int}}}, "has no `step`|int"),
}


@pytest.mark.parametrize(("changes", "sentence"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused_when_the_trainer_is_made(changes, sentence, keys):
    with pytest.raises(TurnwiseError, match=sentence):
        Trainer(**{key: value for key, value in (keys | changes).items() if value is not None})


def test_a_section_that_is_none_is_one_that_is_not_given():
    with pytest.raises(ConfigError, match=says("nothing to play")):
        Trainer(model="runs/model", data=None, reward_funcs=[len])


def test_values_of_numpy_and_enums_are_plain_values():
    class Mode(enum.StrEnum):
        FAST = "fast"

    given = {
        "penalty": np.float64(-0.5),
        "mode": Mode.FAST,
        "size": enum.IntEnum("Size", {"SMALL": 3}).SMALL,
        "is": True,
    }
    plain = plain_values(given, Objects(), "env_config")
    assert yaml.safe_load(yaml.safe_dump(plain)) == {"penalty": -0.5, "mode": "fast", "size": 3, "is": True}


def test_save_before_training_and_over_something_else_is_refused(keys, tmp_path):
    trainer = Trainer(**keys)
    for ask in (partial(trainer.save, tmp_path / "out"), trainer.plot):
        with pytest.raises(ConfigError, match="call train"):
            ask()
    trainer.train()
    project = tmp_path / "project"
    (project / "sub").mkdir(parents=True)
    for name, text in {"config.json": '{"name": "my project"}', "train.py": "", "sub/data.csv": "1"}.items():
        (project / name).write_text(text)
    assert trainer.checkpoint is not None and trainer.run_folder is not None
    for folder in (tmp_path, project, keys["model"], trainer.checkpoint, trainer.run_folder):
        before = _contents(Path(folder))
        with pytest.raises(ConfigError, match=says("save", "already exists")):
            trainer.save(folder)
        assert _contents(Path(folder)) == before
    for wrong in (5, "", "a\0b", b"bytes", None):
        with pytest.raises(ConfigError, match=r"save: .*path"):
            trainer.save(wrong)
    saved = trainer.save(tmp_path / "model")
    (saved / "vocab.txt").write_text("of an older model")
    assert not (trainer.save(saved) / "vocab.txt").exists(), "a model of ours is replaced"


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_config_of_another_type_than_a_path_is_refused():
    for wrong in (5, None, ["a.yaml"], ""):
        with pytest.raises(ConfigError, match=r"from_config: .*path"):
            Trainer.from_config(wrong)


def test_the_best_model_is_saved_where_it_is_asked_for(keys, tmp_path, capsys):
    trainer = Trainer(**keys, eval_steps=1, save_best={"mode": "min"})
    with pytest.raises(ConfigError, match=says("no best model")):
        trainer.save(tmp_path / "out", best=True)
    trainer.train()
    measured_at = {
        row["step"]: row["val/score/mean"] for row in measured(trainer.run_folder) if "val/score/mean" in row
    }
    step = min(measured_at, key=measured_at.get)
    capsys.readouterr()
    for best in (True, False):
        saved = trainer.save(tmp_path / "out", best=best)
        model = trainer.best if best else trainer.checkpoint
        assert (saved / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    told_best, told_newest = capsys.readouterr().out.splitlines()
    assert (
        told_best
        == f"{tmp_path / 'out'}: the best model, val/score/mean {measured_at[step]:g} after {step} steps"
    )
    assert mentions(told_newest, "best=True", "val/score/mean")

    without = Trainer(**keys)
    with pytest.raises(ConfigError, match="set save_best="):
        without.save(tmp_path / "out", best=True)


class AgentWithTools(EnvAgent):
    """An environment's agent that asks for more than others do."""

    def __init__(self, make_env, settings, *, seed, tools):
        super().__init__(make_env, settings)
        self._noted = {"seed": seed, "num_tools": len(tools.schemas)}

    async def run(self, *args):
        trajectories = await super().run(*args)
        for trajectory in trajectories:
            trajectory.metrics |= self._noted
        return trajectories


class AgentOfItsOwn(EnvAgent):
    def __init__(self, make_env, settings, judge):
        super().__init__(make_env, settings)


def test_an_agent_of_an_environment_is_given_what_it_asks_for(keys):
    trainer = Trainer(**keys | {"env": own(agent_name=AgentWithTools), "seed": 7})
    trainer.train()
    [_, row, *_] = measured(trainer.run_folder)
    assert row["env/OwnEnv/seed"] == 7 and row["env/OwnEnv/num_tools"] == 0
    with pytest.raises(ConfigError, match=says("judge", "interactions")):
        Trainer(**keys | {"env": own(agent_name=AgentOfItsOwn)})


def test_sft_takes_messages_as_objects(tiny_model, tmp_path, monkeypatch):
    rows = [
        [{"role": "user", "content": f"write {i}"}, {"role": "assistant", "content": "Left"}]
        for i in range(4)
    ]
    given = {"output_dir": tmp_path, "track_with": [], "is_quiet": True, "sequence_length": 128}
    one = Trainer.sft(tiny_model, rows, exp_name="one", **given)
    two = Trainer.sft(tiny_model, [{"messages": messages} for messages in rows], exp_name="two", **given)
    [file] = (tmp_path / "one").glob("messages-*.jsonl")
    assert [json.loads(line)["messages"] for line in file.read_text().splitlines()] == rows
    three = Trainer.sft(tiny_model, file, exp_name="three", **given)
    assert len({(folder / "model.safetensors").read_bytes() for folder in (one, two, three)}) == 1
    with pytest.raises(ConfigError, match="has no `messages`"):
        Trainer.sft(tiny_model, [{"text": "x"}], **given)
    for content, said in (
        ("\ud800", r"holds '\\ud800', half a char"),
        (date(2026, 1, 1), "is a list, which JSON can't hold"),
    ):
        with pytest.raises(DataError, match=f"messages, row 2: column 'messages' {said}"):
            Trainer.sft(tiny_model, [rows[0], [{"role": "user", "content": content}]], **given)
    whole = file.read_text()

    def half_written(path, text, **_):
        path.write_bytes(text.encode()[:10])
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_text", half_written)
    with pytest.raises(OSError, match="the disk is full"):
        Trainer.sft(tiny_model, rows, exp_name="one", **given)
    assert file.read_text() == whole, "another rank or run may be reading it"
