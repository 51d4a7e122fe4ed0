"""Whole runs on rows of data sets, with rewards and without environments."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from messages import mentions, says
from small_runs import LETTERS, assert_same_weights, played, run_small as run, small_config, training
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from turnwise.assemble import rewards as build_rewards
from turnwise.assemble.rewards import build_reward_manager
from turnwise.assemble.saved import evaluate_model
from turnwise.chat.template import ChatTemplate
from turnwise.cli.main import main
from turnwise.config import AgenticConfig, dump_yaml, parse_config
from turnwise.errors import CheckpointError, ConfigError, DataError, RolloutError
from turnwise.examine.examined import examine
from turnwise.examine.problems import object_problems
from turnwise.models.load import load_model, load_tokenizer, save_model
from turnwise.protocols import RewardResult
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.placement import Placement
from turnwise.tracking.jsonl import read_metrics
from turnwise.types import Group, Task, Trajectory, Turn

WORDS = "one two three four five six seven"


@pytest.fixture
def make_config(tiny_model, tmp_path):
    for name, lines in (("train", WORDS), ("val", "eight nine ten")):
        rows = [
            {"prompt": word, "answer": word, "extra": {"number": number}}
            for number, word in enumerate(lines.split())
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(data: dict[str, Any] | None = None, **changes: Any) -> AgenticConfig:
        own = {
            "exp_name": "rows",
            "max_steps": 4,
            "save_steps": 0,
            "rollout_batch_size": 4,
            "val_batch_size": 8,
            "sequence_length": 64,
            "actor_infer": {"generating_args": {"max_new_tokens": 6}},
            "actor_train": training(),
            "train_env_manager": {"num_env_groups": 2, "group_size": 2},
            "custom_envs": {},
            "data": {"train_files": str(tmp_path / "train.jsonl"), "reward": "toy_rewards:length"}
            | (data or {}),
        }
        return small_config(tiny_model, tmp_path / "runs", **own | changes)

    return make


def rows_of(records: list[dict[str, Any]]) -> Counter[tuple[int, int]]:
    """How often each `(row, epoch)` was played."""
    return Counter((record["task"]["row"], record["task"]["epoch"]) for record in records)


def test_every_row_is_played_once_an_epoch_and_the_run_ends_with_them(make_config, tmp_path: Path) -> None:
    val = {"val_files": str(tmp_path / "val.jsonl"), "num_epochs": 2}
    pipeline = run(make_config(val, rollout_batch_size=10, max_steps=50, eval_steps=50))
    records = played(pipeline.folder)
    assert Counter(record["step"] for record in records) == {0: 10, 1: 10, 2: 8}, "the last batch is smaller"
    assert rows_of(records) == {(row, epoch): 2 for row in range(7) for epoch in range(2)}
    assert [record["task"]["row"] for record in records[::2]] != sorted(
        record["task"]["row"] for record in records[::2]
    )
    metrics = read_metrics(pipeline.folder.metrics)
    trained = [row for row in metrics if "rollout/score/mean" in row]
    assert len(trained) == pipeline.checkpoints.num_steps == 3
    assert all(record["score"] == record["outcome_rewards"]["length"] > 0 for record in records)
    assert "rollout/reward/length" in trained[0]
    validated = [row for row in metrics if "val/score/mean" in row]
    assert [row["val/num_episodes"] for row in validated] == [3, 3], (
        "there are three rows, and places for eight"
    )


def test_a_run_whose_rows_were_used_up_goes_on_to_nothing_more(make_config) -> None:
    """The filter drops the three rows before the fourth, so there are fewer steps than the seven rows would
    make."""
    data = {"num_epochs": 1, "reward": "toy_rewards:half_from_four_on"}
    first = run(make_config(data, group_filter="non_zero_variance"))
    again = run(make_config(data, group_filter="non_zero_variance", resume_from_checkpoint=True))
    assert (
        again.folder.path == first.folder.path
        and again.checkpoints.num_done == first.checkpoints.num_done < 4
    )
    assert len(read_metrics(again.folder.metrics)) == first.checkpoints.num_done


def test_a_run_that_goes_on_is_the_one_that_was_never_stopped(make_config) -> None:
    changes = {"data": {"curriculum": True}, "deterministic": True, "save_steps": 2}
    whole = run(make_config(**changes))
    resumed = run(make_config(**changes, resume_from_checkpoint=str(whole.checkpoints.path / "checkpoint-2")))
    torch.use_deterministic_algorithms(False)
    assert [r["task"] for r in played(resumed.folder)] == [r["task"] for r in played(whole.folder)]
    assert_same_weights(resumed.checkpoints.newest, whole.checkpoints.newest)


@pytest.mark.extra
def test_an_asynchronous_run_that_goes_on_plays_every_row_once(make_config) -> None:
    config = {
        "data": {"num_epochs": 2},
        "rollout_batch_size": 8,
        "async_generation_ratio": 1,
        "save_steps": 1,
        "max_steps": 50,
    }
    checkpoint = run(make_config(**config)).checkpoints.path / "checkpoint-2"
    state = json.loads((checkpoint / "pipeline.json").read_text())["rollouts"]
    assert state["playing"] or state["finished"], "nothing was ahead of training"
    resumed = run(make_config(**config, resume_from_checkpoint=str(checkpoint)))
    # The new folder begins with the records of the two steps that were done.
    assert rows_of(played(resumed.folder)) == {(row, epoch): 2 for row in range(7) for epoch in range(2)}


def test_a_run_goes_on_with_the_same_rows_only(make_config, tmp_path: Path) -> None:
    checkpoint = str(run(make_config(max_steps=1)).checkpoints.newest)
    file = tmp_path / "train.jsonl"
    file.write_text(file.read_text().replace("seven", "eleven"))
    with pytest.raises(CheckpointError, match=says("data.train_files", "ordered")):
        run(make_config(max_steps=2, resume_from_checkpoint=checkpoint))


def test_rewards_of_environments_and_their_arguments_are_in_the_resolved_config(make_config) -> None:
    reward = {"name": "toy_rewards:length", "weight": 0.5, "args": {"power": 2.0}}
    config = make_config({"train_files": None, "reward": [reward]}, custom_envs={"Letters": LETTERS})
    again = parse_config(yaml.safe_load(dump_yaml(config)))[0]
    assert again.data == config.data and again.data.reward[0].args == {"power": 2.0}


def test_rewards_whose_names_end_alike_are_kept_apart(make_config) -> None:
    rewards = [{"name": "toy_rewards:length"}, {"name": "odd_rewards:length", "weight": 0.5}]
    [first, *_] = played(run(make_config({"reward": rewards}, max_steps=1)).folder)
    assert set(first["outcome_rewards"]) == {"toy_rewards:length", "odd_rewards:length"}
    assert first["score"] == pytest.approx(sum(first["outcome_rewards"].values()))


@pytest.mark.parametrize("ending", ["stop", "length"])
def test_the_completions_of_rewards_have_no_special_tokens(make_config, tiny_model, ending: str) -> None:
    tokenizer = load_tokenizer(tiny_model)
    words, special = (
        tokenizer.encode(text, add_special_tokens=False) for text in ("one two", tokenizer.eos_token)
    )
    ids = words + special + words + (special if ending == "stop" else [])
    turn = Turn(np.array([1]), np.array(ids), np.zeros(len(ids), np.float32), finish_reason=ending)
    turn.text = tokenizer.decode(words + special + words)
    task = Task("train/data/0", "data", "train", 1, payload={"prompt": "one"}, row=0)
    group = Group(task, [Trajectory(task, 0, [turn])])
    with WatchedRunner() as runner:
        manager = build_reward_manager(
            examine(make_config()), Placement("local"), ChatTemplate(tokenizer), runner
        )
        assert runner.run(manager(group)) == []
    assert group.trajectories[0].score == pytest.approx(len("one twoone two") / 10)


def test_the_first_reward_that_is_named_decides_what_a_success_is(
    make_config, tiny_model, monkeypatch
) -> None:
    """Also where it is a model, which is made after the functions."""

    async def never_right(group: Group) -> RewardResult:
        return RewardResult([0.0] * len(group.trajectories))

    monkeypatch.setattr(build_rewards, "build_reward_model", lambda *_: never_right)
    task = Task("train/data/0", "data", "train", 1, payload={"prompt": "one"}, row=0)
    group = Group(
        task,
        [Trajectory(task, 0, [Turn(np.array([1]), np.array([2]), np.zeros(1, np.float32), text="a" * 99)])],
    )
    config = make_config({"reward": ["reward_model", "toy_rewards:length"]}, reward_pretrain=str(tiny_model))
    with WatchedRunner() as runner:
        manager = build_rewards.build_reward_manager(examine(config), Placement("local"), None, runner)
        assert runner.run(manager(group)) == []
    assert group.trajectories[0].outcome_rewards == {"reward_model": 0.0, "length": 9.9}
    assert group.trajectories[0].metrics["success"] == 0.0


def test_arguments_reach_rewards_of_groups_or_are_refused(make_config) -> None:
    def of(name: str, **args: Any) -> list[float]:
        records = played(run(make_config({"reward": [{"name": name, "args": args}]}, max_steps=1)).folder)
        return sorted({record["score"] for record in records})

    assert of("odd_rewards:compare", margin=3.0) == [3.0]
    for name, args, said in (
        ("odd_rewards:compare", {"marign": 3.0}, "args.marign isn't a parameter; it has group, margin"),
        ("reward_model", {"size": 1}, "reward_model takes no args"),
        ("judge", {"rubrik": "It is short."}, r"args.rubrik isn't a parameter; .* Did you mean 'rubric'"),
        ("judge", {"base_url": "http://localhost:1", "model": "small"}, "args.rubric is needed"),
    ):
        with pytest.raises(ConfigError, match=said):
            of(name, **args)


def test_an_asynchronous_curriculum_is_repeated_bit_by_bit(make_config) -> None:
    recorded = run(make_config({"curriculum": True}, async_generation_ratio=1))
    schedule = [json.loads(line) for line in recorded.folder.schedule_log.read_text().splitlines()]
    assert any(event.get("version") for event in schedule), "nothing was admitted after the first step"
    again = run(
        make_config({"curriculum": True}, async_generation_ratio=1, exp_name="again"),
        repeated_run=recorded.folder.path,
    )
    first, second = (
        {(r["group"], r["sibling"]): r["task"] for r in played(pipeline.folder)}
        for pipeline in (recorded, again)
    )
    assert first == second
    assert_same_weights(again.checkpoints.newest, recorded.checkpoints.newest)


@pytest.mark.extra
def test_an_asynchronous_curriculum_that_goes_on_plays_the_tasks_that_were_admitted(make_config) -> None:
    """Each by the version of the curriculum that admitted it, although the state has moved on since. With
    three siblings instead of two, what was played ahead of training is played again."""

    def config(group_size: int, **changes: Any) -> AgenticConfig:
        manager = {"num_env_groups": 24, "group_size": group_size}
        batch = {"rollout_batch_size": 24 * group_size, "train_env_manager": manager, "max_steps": 4}
        data = {"curriculum": True, "reward": "toy_rewards:half_from_four_on"}
        return make_config(data, async_generation_ratio=1, save_steps=1, **batch, **changes)

    first = run(
        config(2)
    )  # half of the siblings succeed from row 3 on, so the curriculum turns to these rows
    checkpoint = first.checkpoints.path / "checkpoint-1"
    admitted = dict(json.loads((checkpoint / "pipeline.json").read_text())["rollouts"]["task_versions"])
    assert admitted and set(admitted.values()) == {0}, "nothing was ahead of training"
    resumed = run(config(3, resume_from_checkpoint=str(checkpoint)))
    before, after = (
        {record["group"]: record["task"] for record in played(pipeline.folder)}
        for pipeline in (first, resumed)
    )
    num_played = Counter(record["group"] for record in played(resumed.folder) if record["group"] in admitted)
    assert num_played == dict.fromkeys(admitted, 3)
    assert {index: after[index] for index in admitted} == {index: before[index] for index in admitted}
    schedule = [json.loads(line) for line in resumed.folder.schedule_log.read_text().splitlines()]
    assert max(event.get("version", 0) for event in schedule) > 1, (
        "the curriculum stood still after the resume"
    )


def test_rows_and_environments_are_mixed_in_their_shares(make_config) -> None:
    manager = {
        "num_env_groups": 3,
        "group_size": 2,
        "tags": ["Letters", "data"],
        "num_groups_partition": [1, 2],
    }
    pipeline = run(
        make_config(
            custom_envs={"Letters": LETTERS},
            train_env_manager=manager,
            rollout_batch_size=6,
            sequence_length=256,
        )
    )
    records = played(pipeline.folder)
    assert Counter(record["task"]["tag"] for record in records) == {"Letters": 8, "data": 16}
    assert {record["task"]["agent"] for record in records} == {"env_agent", "single_turn_agent"}
    of_letters = next(record for record in records if record["task"]["tag"] == "Letters" and record["turns"])
    gained = sum(turn["reward"] for turn in of_letters["turns"])
    assert of_letters["score"] == pytest.approx(gained + of_letters["outcome_rewards"]["length"])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            {"prompt_key": "question"},
            "train.jsonl, line 1: there is no column 'question'; it has prompt, answer, extra",
        ),
        (
            {"reward": "toy_rewards:of_answer"},
            "line 1: data.reward of_answer needs the column 'ground_truth'",
        ),
        ({"agent_name_key": "answer"}, "line 1: agent 'one' isn't one of env_agent"),
        ({"train_files": "nowhere.jsonl"}, "nowhere.jsonl: no such file"),
        ({"reward": "toy_rewards:lenght"}, "toy_rewards has no object 'lenght'"),
    ],
)
def test_what_is_wrong_with_rows_is_found_before_a_model_is_loaded(make_config, data, said: str) -> None:
    config = make_config(data, pretrain="models/none")
    problems = " ".join(f"{problem.key}: {problem.message}" for problem in object_problems(examine(config)))
    assert said in problems


def test_a_fault_of_a_tool_file_is_said_once_although_rows_need_it_too(make_config, tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: calculatr}]")
    [problem] = object_problems(
        examine(make_config(agent={"tool_config_path": str(tmp_path / "tools.yaml")}))
    )
    assert problem.key == "agent.tool_config_path" and mentions(problem.message, "'calculator'")


def test_rows_without_room_are_left_out_and_counted(make_config, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = run(make_config({"max_prompt_length": 12, "num_epochs": 1}))
    left = {record["task"]["payload"]["prompt"] for record in played(pipeline.folder)}
    assert 0 < len(left) < 7
    assert (
        f"{7 - len(left)} of 7 rows are left out, since their prompts have more than 12 tokens" in caplog.text
    )
    with pytest.raises(DataError, match=says("7 prompts", "2 tokens", "data.max_prompt_length")):
        run(make_config({"max_prompt_length": 2}))


def test_recorded_rows_are_trained_on_again(make_config) -> None:
    first = run(make_config(max_steps=2))
    again = run(make_config(max_steps=2, exp_name="again"), rollouts=first.folder.rollouts)
    assert [record["score"] for record in played(again.folder)] == [
        record["score"] for record in played(first.folder)
    ]


def test_a_command_for_what_is_not_there_says_so(make_config, tmp_path: Path, capsys) -> None:
    (tmp_path / "rows.yaml").write_text(dump_yaml(make_config()))
    assert main(["eval", str(tmp_path / "rows.yaml")]) == 2
    assert mentions(capsys.readouterr().err, "data.val_files", "unset", "val")
    assert main(["check-env", str(tmp_path / "rows.yaml")]) == 2
    assert mentions(capsys.readouterr().err, "custom_envs", "rows of data")


def test_a_reward_that_breaks_on_every_group_ends_the_run_with_its_error(make_config) -> None:
    with pytest.raises(RolloutError, match=says("data.reward raising", "ValueError", "no such judge")):
        run(make_config({"reward": "toy_rewards:raising"}))


def test_validation_counts_broken_rewards_apart(make_config, tmp_path: Path, capsys) -> None:
    data = {"val_files": str(tmp_path / "val.jsonl"), "reward": "toy_rewards:failing_on_nine"}
    manager = {"num_env_groups": 2, "max_failed_fraction": 0.9}
    config = make_config(data, eval_steps=4, val_env_manager=manager)
    evaluation = evaluate_model(examine(config))
    assert evaluation.num_failed == 1 and evaluation.overall.mean_score == 1.0
    (tmp_path / "job.yaml").write_text(dump_yaml(config))
    assert main(["eval", str(tmp_path / "job.yaml"), "--greedy"]) == 0
    assert "tiny, greedy: not counted: 1 episode that failed outside the policy" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["eval", "train"])
def test_a_validation_without_scores_ends_with_the_error_of_its_reward(
    make_config, tmp_path: Path, capsys, verb: str
) -> None:
    """There are fewer rows than val_batch_size, which the table says too."""
    data = {"val_files": str(tmp_path / "val.jsonl"), "reward": "toy_rewards:failing_in_validation"}
    (tmp_path / "job.yaml").write_text(dump_yaml(make_config(data, eval_steps=2, val_batch_size=128)))
    assert main([verb, str(tmp_path / "job.yaml")]) == 2
    said = capsys.readouterr()
    assert (
        mentions(said.err, "ValueError", "judge is away")
        and "Fix data.reward failing_in_validation" in said.err
    )
    assert "success" not in said.out and ("3 trajectories from" in said.out or verb == "eval")
    logs = list((tmp_path / "runs").rglob("*.log"))
    assert len(logs) == (verb == "train")
    for log in logs:
        lines = [line for line in log.read_text().splitlines() if "the episodes of" in line]
        assert len(lines) == 1 and "the judge is away" in lines[0]


@pytest.mark.parametrize("kind", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_a_classifier_scores_whole_conversations(make_config, tiny_model, tmp_path: Path, kind: Any) -> None:
    torch.manual_seed(0)
    judge = kind.from_pretrained(tiny_model, num_labels=1).eval()
    judge.config.pad_token_id = 0
    tokenizer = load_tokenizer(tiny_model)
    save_model(judge, tokenizer, tmp_path / "judge")
    config = make_config({"reward": "reward_model"}, reward_pretrain=str(tmp_path / "judge"), max_steps=1)
    records = played(run(config).folder)
    assert len({record["score"] for record in records}) > 1
    for record in records:
        said = [("user", record["task"]["payload"]["prompt"]), ("assistant", record["turns"][-1]["text"])]
        messages = [{"role": role, "content": text} for role, text in said]
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        with torch.no_grad():
            assert record["score"] == pytest.approx(
                judge(torch.tensor([ids])).logits.flatten()[-1].item(), abs=1e-4
            )


def test_a_judge_of_the_reward_role_is_asked_in_the_run_itself(
    make_config, tiny_model, tmp_path: Path
) -> None:
    judge = {"name": "judge", "args": {"rubric": "It is short.", "max_new_tokens": 16}}
    path = str(model_that_says("Score: 7", tiny_model, tmp_path / "judge"))
    config = make_config({"reward": [judge]}, reward_pretrain=path, max_steps=1)
    strategy = {"strategy_args": {"strategy_name": "torch_infer"}}
    for wrong, said in (
        ({"data": {"reward": [judge, "reward_model"]}}, "both want the reward role's model"),
        ({"data": {"reward": [judge]}, "reward": strategy}, "torch_infer doesn't serve a judge"),
    ):
        with pytest.raises(ConfigError, match=said):
            make_config(wrong["data"], reward_pretrain=path, reward=wrong.get("reward", {}))
    [step] = [row for row in read_metrics(run(config).folder.metrics) if "rollout/score/mean" in row]
    assert step["rollout/score/mean"] == pytest.approx(0.7)


def model_that_says(text: str, start: Path, folder: Path) -> Path:
    """A causal model that says a text behind every prompt: it sees the last token alone, and knows which one
    is next."""
    model, tokenizer = load_model(start), load_tokenizer(start)
    template = ChatTemplate(tokenizer)
    said = [template.start([{"role": "user", "content": "a"}])[-1], *template.respond(text)]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        seen = torch.nn.functional.normalize(model.get_input_embeddings().weight)
        head = torch.zeros_like(seen)
        head[said[1:]] = 100 * seen[said[:-1]]
    model.config.tie_word_embeddings, model.lm_head.weight = False, torch.nn.Parameter(head)
    save_model(model, tokenizer, folder)
    return folder


def test_a_user_of_gsm8k_replies_in_a_whole_run(make_config, tmp_path: Path) -> None:
    users = {"interaction": [{"name": "gsm8k", "class_name": "gsm8k", "config": {}}]}
    (tmp_path / "users.yaml").write_text(json.dumps(users))
    rows = [
        {
            "prompt": f"{number} + 1?",
            "extra_info": {"interaction_kwargs": {"name": "gsm8k", "ground_truth": str(number + 1)}},
        }
        for number in range(4)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config(
        max_steps=1,
        sequence_length=512,
        actor_infer={
            "generating_args": {
                "max_new_tokens": 16,
                "stop_strings": list("abcdefghijklmnopqrstuvwxyz0123456789"),
            }
        },
        agent={"interaction_config_path": str(tmp_path / "users.yaml"), "max_user_turns": 2},
    )
    (tmp_path / "gsm8k.yaml").write_text(dump_yaml(config))
    assert main(["train", str(tmp_path / "gsm8k.yaml")]) == 0
    [folder] = (tmp_path / "runs" / "rows").iterdir()
    records = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert len(records) == 4
    whole = [record for record in records if record["limit"] == "max_steps"]
    assert whole and all(len(record["turns"]) == 3 for record in whole)
    assert all(
        turn["observation"].startswith("Your response is incorrect!") for turn in whole[0]["turns"][1:]
    )
    [*_, last] = read_metrics(folder / "metrics.jsonl")
    assert last["env/data/user_turns"] > 0 == last["env/data/interaction/gsm8k/score"]


def test_a_run_goes_on_where_the_user_of_a_row_raises(make_config, tmp_path: Path) -> None:
    (tmp_path / "users.yaml").write_text("interaction: [{name: user, class_name: toy_users.Asker}]")
    rows = [
        {"prompt": word, "extra_info": {"interaction_kwargs": {"name": "user"}}} for word in WORDS.split()
    ]
    rows[2]["extra_info"]["interaction_kwargs"]["start"] = "raise"
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config(
        {"num_epochs": 1},
        agent={"interaction_config_path": str(tmp_path / "users.yaml")},
        train_env_manager={
            "num_env_groups": 2,
            "group_size": 2,
            "max_env_retries": 0,
            "max_failed_fraction": 0.9,
        },
    )
    records = played(run(config).folder)
    failed = [record for record in records if record["status"] == "failed"]
    assert {record["task"]["row"] for record in failed} == {2} and len(
        {record["task"]["row"] for record in records}
    ) == 7
    said = "the interaction user.start_interaction raised RuntimeError: the service is down"
    assert all(record["error"].startswith(said) and record["rejected"] == "failed" for record in failed)
