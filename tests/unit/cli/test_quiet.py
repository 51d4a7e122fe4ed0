"""`--quiet` leaves warnings, errors and the places of the results."""

from __future__ import annotations

from small_runs import write_demonstrations

from turnwise.cli.main import main


def places(lines):
    return [line.partition(":")[0] for line in lines.splitlines()]


def test_a_quiet_training_says_where_its_results_are(job, capsys):
    config = job(track_with=["stdout"], max_steps=1, eval_steps=1, val_batch_size=2)
    assert main(["train", config, "--quiet"]) == 0
    quiet = capsys.readouterr()
    assert places(quiet.out) == ["model", "learning curve"]
    assert "takes no `split`" in quiet.err, "warnings are printed"


def test_a_quiet_fine_tuning_says_where_its_model_is(tiny_model, folder, capsys):
    write_demonstrations(folder / "rows.jsonl", 4)
    (folder / "toy.yaml").write_text(
        f"pretrain: {tiny_model}\nsequence_length: 384\ntrain_files: rows.jsonl\n"
    )
    assert main(["sft", "toy.yaml", "--quiet"]) == 0
    assert places(capsys.readouterr().out) == ["model", "learning curve"]
