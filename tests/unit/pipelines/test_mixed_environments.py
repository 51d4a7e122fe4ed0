"""Several environments in one run: shares, limits and metrics by tag, and scores that are compared by tag."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from small_runs import run_small, small_config

from turnwise.tracking.jsonl import read_metrics

TOYS = "toy_envs:"
PLAIN = {"agent_system_template": "", "agent_template": "{observation}", "action_pattern": None}
LETTERS = {"env_type": f"{TOYS}LettersEnv", "max_steps": 3, "max_tokens_per_step": 4, **PLAIN}
BANDIT = {"env_type": f"{TOYS}BanditEnv", "max_steps": 1, "max_tokens_per_step": 2, **PLAIN}
IDENTITY = {
    "env_type": f"{TOYS}IdentityEnv",
    "env_config": {"num_turns": 5},
    "max_steps": 2,
    "max_tokens_per_step": 1,
    **PLAIN,
}


def run(tiny_model, folder, envs, partition, **changes):
    own = {
        "max_steps": 2,
        "eval_steps": 2,
        "save_steps": 0,
        "rollout_batch_size": 2 * sum(partition),
        "val_batch_size": sum(partition),
        "actor_train": {"training_args": {"per_device_train_batch_size": 32}},
        "train_env_manager": {
            "num_env_groups": sum(partition),
            "group_size": 2,
            "num_groups_partition": partition,
        },
        "val_env_manager": {"num_env_groups": sum(partition), "num_groups_partition": partition},
        "custom_envs": envs,
    }
    run_folder = run_small(small_config(tiny_model, folder, **own | changes)).folder
    return read_metrics(run_folder.metrics), [
        json.loads(line) for line in run_folder.rollouts.read_text().splitlines()
    ]


def of_tag(rows, tag, step=0):
    return [row for row in rows if row["task"]["tag"] == tag and row["step"] == step]


def scores(rows):
    return [row["score"] for row in rows]


def check_tags(metrics, rows, shares):
    """Shares of the batch, and metrics against what was played."""
    for step in range(2):
        played = Counter(row["task"]["tag"] for row in rows if row["step"] == step)
        assert played == {tag: 2 * share for tag, share in shares.items()}
        for tag in shares:
            mine = of_tag(rows, tag, step)
            for name, reduced in (
                ("mean", sum(scores(mine)) / len(mine)),
                ("max", max(scores(mine))),
                ("min", min(scores(mine))),
            ):
                assert metrics[step][f"rollout/{tag}/score/{name}"] == pytest.approx(reduced)
            successes = [row["metrics"]["success"] for row in mine]
            assert metrics[step][f"env/{tag}/success"] == pytest.approx(sum(successes) / len(successes))
        total = sum(metrics[step][f"rollout/{tag}/score/mean"] * share for tag, share in shares.items())
        assert metrics[step]["rollout/score/mean"] == pytest.approx(total / sum(shares.values()))
    for tag in shares:
        assert {f"val/{tag}/score/mean", f"val/env/{tag}/success"} <= set(metrics[0])


def test_three_environments_keep_their_own_limits(tiny_model, tmp_path):
    envs = {"Letters": LETTERS, "Bandit": BANDIT, "Identity": IDENTITY}
    metrics, rows = run(tiny_model, tmp_path, envs, [2, 1, 3])
    check_tags(metrics, rows, {"Letters": 2, "Bandit": 1, "Identity": 3})
    ends = {tag: {(len(row["turns"]), row["limit"]) for row in of_tag(rows, tag)} for tag in envs}
    assert ends == {"Letters": {(2, None)}, "Bandit": {(1, None)}, "Identity": {(2, "max_steps")}}
    most = {
        tag: max(len(turn["response_ids"]) for row in of_tag(rows, tag) for turn in row["turns"])
        for tag in envs
    }
    assert most == {"Letters": 4, "Bandit": 2, "Identity": 1}


@pytest.mark.parametrize("grouping", ["tags", "traj_group_id"])
def test_scores_can_be_compared_within_an_environment(tiny_model, tmp_path, grouping):
    envs = {"Letters": LETTERS, "Short": LETTERS | {"env_config": {"num_turns": 1}}}
    normalization = {"grouping": grouping, "method": "mean"}
    _, rows = run(tiny_model, tmp_path, envs, [3, 3], reward_normalization=normalization)
    by_tag = {tag: of_tag(rows, tag) for tag in envs}
    assert sum(scores(by_tag["Letters"])) != sum(scores(by_tag["Short"]))
    is_over_tag = []
    for mine in by_tag.values():
        mean = sum(scores(mine)) / len(mine)
        is_over_tag += [
            row["turns"][0]["advantage"] == pytest.approx(row["score"] - mean, abs=1e-6) for row in mine
        ]
    assert all(is_over_tag) is (grouping == "tags")


def test_a_filter_works_across_environments(tiny_model, tmp_path):
    """No answer of a bandit is right here, so that its groups are replaced by what comes next."""
    metrics, rows = run(
        tiny_model, tmp_path, {"Letters": LETTERS, "Bandit": BANDIT}, [2, 2], group_filter="non_zero_variance"
    )
    trained = [row for row in rows if not row["rejected"]]
    assert {row["task"]["tag"] for row in trained} == {
        "Letters"
    } and "rollout/Bandit/score/mean" not in metrics[0]
    assert len([row for row in trained if row["step"] == 0]) == 8
    filtered = [row for row in rows if row["rejected"] == "filtered" and row["step"] == 0]
    assert metrics[0]["rollout/filtered"] == len(filtered) > 0
    everything = [row["score"] for row in rows if row["step"] == 0]
    assert metrics[0]["rollout/unfiltered_score/mean"] == pytest.approx(sum(everything) / len(everything))
    assert not any("advantage" in turn for row in filtered for turn in row["turns"])


@pytest.mark.parametrize("changes", [{}, {"adv_estimator": "gae", "use_kl_loss": True, "ppo_epochs": 2}])
def test_a_step_that_the_filter_leaves_nothing_trains_on_nothing(tiny_model, tmp_path, changes):
    rejecting = {"group_filter": "non_zero_variance", "max_refill_factor": 1, **changes}
    metrics, rows = run(tiny_model, tmp_path, {"Bandit": BANDIT}, [2], **rejecting)
    assert [row.get("actor/backward_steps") for row in metrics[:2]] == [None, None]
    assert [row["rollout/filtered"] for row in metrics[:2]] == [8, 8] and len(rows) == 16
    assert [row["system/samples"] for row in metrics[:2]] == [0, 0]
    assert (
        metrics[0]["val/score/mean"] == metrics[2]["val/score/mean"]
        and "rollout/score/mean" not in metrics[0]
    )
