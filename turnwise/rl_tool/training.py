"""The action `train`. It runs a Trainer with the tool's parameters, and puts the resulting model into
output_dir."""

import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.config.schema.model_shape import read_model_shape
from turnwise.costs.model import TokenWork, matrix_speed, training_seconds
from turnwise.errors import ConfigError, counted, nearest
from turnwise.model_files.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, NOTHING, base_of_adapter, check_model
from turnwise.rl_tool import loaded_rows as data
from turnwise.rl_tool.parameters import Train
from turnwise.rl_tool.rewards import reward_sections
from turnwise.runtime.rank import launched
from turnwise.runtime.replaceable import model_files, why_files_kept
from turnwise.spec.package_tables import read_table
from turnwise.tracking.jsonl import read_metrics
from turnwise.trainer.trainer import Trainer

RUN = "run"
"""Name of the run's folder in output_dir."""
LEARNING_RATES = {("sft", False): 2e-5, ("sft", True): 1e-4, ("rl", False): 1e-6, ("rl", True): 1e-5}
"""Default learning rates by `(kind of training, whether LoRA is used)`."""
CRITIC_FACTOR, FASTEST_CRITIC = 10, 1e-3
"""Without LoRA, the critic's default learning rate is `CRITIC_FACTOR` × the policy's, since the value head
starts at 0 and must fit before the policy improves; it is at most `FASTEST_CRITIC`, so that small critics
converge. With LoRA it is the policy's."""
_DEFAULT_CONTEXT, _DEFAULT_NEW_TOKENS = 4096, 512


class ExistsError(ConfigError):
    """`output_dir` holds a result already."""


def train(asked: Train, datasets: Mapping[str, Any], rewards: Mapping[str, Any]) -> dict[str, Any]:
    """Trains a model; returns the answer of the tool."""
    out, started, is_sft = Path(asked.output_dir), time.perf_counter(), asked.algorithm == "sft"
    _require_free(asked, out)
    check_model(asked.model_name)
    name, rows, _ = loaded = data.load(asked, "sft" if is_sft else "rl", datasets)
    estimated_s = estimate_seconds(asked, [data.formatted(row) for row in rows], num_generations(asked))
    estimate = f"; this training takes about {estimated_s:,.0f} s here, loading aside" if estimated_s else ""
    print(f"dataset: {name}, {counted(len(rows), 'row')}{estimate}", flush=True)
    if is_sft:
        config = sft_config(asked)
        checkpoint = Trainer.sft(
            asked.model_name, [{k: v for k, v in row.items() if k != "data_source"} for row in rows], **config
        )
    else:
        config = rl_config(asked, len(rows), rewards)
        if any(reward["name"] == "accuracy" for reward in config["data"]["reward"]):
            data.require_truths(loaded, ["ground_truth", "answer"])
        trainer = Trainer(model=asked.model_name, train_dataset=rows, **config)
        trainer.train()
        assert trainer.run_folder is not None
        checkpoint = sorted((trainer.run_folder / "checkpoints").glob("checkpoint-*"), key=_number)[-1]
    place_result(checkpoint, out)
    run = checkpoint.parents[1]
    metrics = (read_metrics(run / "metrics.jsonl") or [{}])[-1]
    trainable, total = parameter_counts(out)
    return {
        "algorithm": asked.algorithm,
        "model": asked.model_name,
        "base_model": base_of_adapter(out),
        "output_dir": str(out),
        "run_folder": str(run),
        "curve": str(run / "learning_curve.png"),
        "dataset": name,
        "dataset_size": len(rows),
        "num_epochs": asked.num_epochs,
        "batch_size": asked.batch_size,
        "effective_batch_size": asked.batch_size * num_generations(asked),
        "num_steps": _number(checkpoint),
        "learning_rate": learning_rate(asked),
        "kl": metrics.get("actor/kl_loss"),
        "final_loss": metrics.get("sft/loss" if is_sft else "actor/total_loss"),
        "average_reward": metrics.get("rollout/score/mean"),
        "metrics": metrics,
        "trainable_parameters": trainable,
        "total_parameters": total,
        "estimated_s": estimated_s,
        "duration_s": time.perf_counter() - started,
    }


def _require_free(asked: Train, out: Path) -> None:
    if asked.resume and asked.overwrite:
        raise ConfigError(
            "resume and overwrite contradict each other: one continues what the other replaces; choose one"
        )
    base: str | None = asked.model_name
    while base is not None:
        if Path(base).resolve() == out.resolve():
            raise ConfigError(
                f"output_dir {out} is a model that this training starts from; name another folder, to keep it"
            )
        base = base_of_adapter(base)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"output_dir {out} is a file; name a folder")
    is_taken = bool(model_files(out)) or any((out / RUN).glob("*/checkpoints/checkpoint-*"))
    if is_taken and not (asked.resume or asked.overwrite):
        raise ExistsError(
            f"output_dir {out} holds a result already; name another folder, or set resume or overwrite"
        )
    _require_replaceable_files(out)


def _require_replaceable_files(out: Path) -> None:
    """Raises ConfigError if the result would replace files of `out` that aren't a result's, such as another
    config.json."""
    reason = why_files_kept(out)
    if reason:
        raise ConfigError(f"output_dir {out}: its files aren't replaced, as {reason}; name another folder")


def _common(asked: Train) -> dict[str, Any]:
    trackers = [
        name
        for name, is_used in (("tensorboard", asked.use_tensorboard), ("wandb", asked.use_wandb))
        if is_used
    ]
    return {
        "output_dir": asked.output_dir,
        "exp_name": RUN,
        "seed": asked.seed,
        "save_steps": 50,
        "track_with": [*trackers, "stdout"],
        "tracker_kwargs": {"wandb": {"project": asked.wandb_project}}
        if asked.use_wandb and asked.wandb_project
        else {},
        "resume_from_checkpoint": asked.resume,
    }


def _model_args(asked: Train) -> dict[str, Any]:
    lora = {
        "lora_rank": asked.lora_rank,
        "lora_alpha": asked.lora_alpha,
        "lora_target": asked.lora_target_modules,
    }
    return {
        "dtype": asked.dtype,
        **{key: value for key, value in lora.items() if asked.use_lora and value is not None},
    }


def _strategy(asked: Train) -> dict[str, Any]:
    if asked.deepspeed is None:
        return {}
    return {"strategy_args": {"strategy_name": "deepspeed_train", "strategy_config": asked.deepspeed}}


def _training_args(asked: Train, rate: float) -> dict[str, Any]:
    return {
        "learning_rate": rate,
        "per_device_train_batch_size": _share_of_a_step(asked),
        "lr_scheduler_type": asked.lr_scheduler_type,
        "warmup_ratio": asked.warmup_ratio,
        "weight_decay": asked.weight_decay,
    }


def _share_of_a_step(asked: Train) -> int:
    """The number of a step's samples that each of a launcher's processes trains on."""
    samples, (_, num_processes) = asked.batch_size * num_generations(asked), launched()
    if samples % num_processes:
        raise ConfigError(
            f"batch_size {asked.batch_size}: a step has {samples} samples, which {num_processes} processes "
            f"can't share evenly; "
            "start a number of processes that divides it, or choose another batch_size"
        )
    return samples // num_processes


def learning_rate(asked: Train) -> float:
    """The learning rate asked for, else the algorithm's default."""
    return asked.learning_rate or LEARNING_RATES["sft" if asked.algorithm == "sft" else "rl", asked.use_lora]


def num_generations(asked: Train) -> int:
    """Answers per prompt; a demonstration has one."""
    return 1 if asked.algorithm == "sft" else asked.num_generations or (8 if asked.algorithm == "grpo" else 1)


def sft_config(asked: Train) -> dict[str, Any]:
    """The config of `turnwise sft` for these parameters."""
    return {
        **_common(asked),
        "num_epochs": asked.num_epochs,
        "model_args": _model_args(asked),
        "training_args": _training_args(asked, learning_rate(asked)),
        **_strategy(asked),
    }


def rl_config(asked: Train, num_rows: int, registered: Mapping[str, Any]) -> dict[str, Any]:
    """The config of `turnwise train` for these parameters."""
    group_size = num_generations(asked)
    safe = read_table(__file__, "presets.yaml")["safe_rewards"] if asked.preset else {}
    if asked.algorithm == "grpo" and group_size == 1:
        raise ConfigError(
            "num_generations is 1: grpo compares the answers to a prompt, so it needs 2 or more; ppo takes 1"
        )
    return {
        **_common(asked),
        "algorithm": "gae" if asked.algorithm == "ppo" else "grpo",
        "max_steps": asked.num_epochs * math.ceil(num_rows / asked.batch_size),
        "rollout_batch_size": asked.batch_size * group_size,
        "train_env_manager": {"num_env_groups": asked.batch_size, "group_size": group_size},
        "pg_clip": asked.clip_range,
        "use_kl_loss": asked.kl_coef > 0,
        **({"kl_loss_coef": asked.kl_coef} if asked.kl_coef else {}),
        "data": {
            "num_epochs": asked.num_epochs,
            "checker": asked.checker,
            "reward": reward_sections(
                asked.reward_type, asked.reward_config, asked.custom_reward, registered, safe
            ),
        },
        "actor_infer": {
            "generating_args": {
                "max_new_tokens": new_tokens(asked.model_name, asked.max_new_tokens),
                "temperature": asked.temperature,
            }
        },
        "actor_train": {
            "model_args": _model_args(asked),
            "training_args": _training_args(asked, learning_rate(asked)),
            "use_dynamic_batching_in_train": True,
            **_strategy(asked),
        },
        **({"critic": _critic(asked), "whiten_advantages": True} if asked.algorithm == "ppo" else {}),
    }


def _critic(asked: Train) -> dict[str, Any]:
    actor = learning_rate(asked)
    faster = actor if asked.use_lora else max(actor, min(CRITIC_FACTOR * actor, FASTEST_CRITIC))
    rate = asked.critic_learning_rate or faster
    return {
        "training_args": _training_args(asked, rate),
        "use_dynamic_batching_in_train": True,
        **_strategy(asked),
    }


def new_tokens(model: str, asked: int | None) -> int:
    """Maximum tokens per answer: the number asked for, else 512 or, if that is less, half of the model's
    context."""
    shape = read_model_shape(model)
    context = min(shape.context_length, _DEFAULT_CONTEXT) if shape else _DEFAULT_CONTEXT
    return asked or min(_DEFAULT_NEW_TOKENS, context // 2)


def place_result(checkpoint: Path, out: Path) -> None:
    """Puts the model of a checkpoint and its tokenizer into the folder `out`: a LoRA adapter as it is, any
    other model as a plain Hugging Face folder. Replaces a model that `out` holds. Raises ConfigError if its
    files are of something else."""
    from turnwise.models.load import export_model, load_tokenizer
    from turnwise.models.lora import BASE_FINGERPRINT

    _require_replaceable_files(out)
    prepared = out / ".turnwise-result"
    shutil.rmtree(prepared, ignore_errors=True)
    if base_of_adapter(checkpoint) is None:
        export_model(checkpoint, prepared)
    else:
        prepared.mkdir(parents=True)
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_FINGERPRINT):
            shutil.copy2(checkpoint / name, prepared / name)
        load_tokenizer(checkpoint).save_pretrained(prepared)
    placed = sorted(prepared.iterdir(), key=lambda file: file.suffix != ".safetensors")
    for file in placed:  # weights first: what a kill leaves has them, so it still counts as a result
        os.replace(file, out / file.name)
    prepared.rmdir()
    names = {file.name for file in placed}
    for old in model_files(out):
        if old.name not in names:
            old.unlink()


def parameter_counts(folder: Path) -> tuple[int, int]:
    """`(trained, all)`: the parameters in a result's own files, and these together with those of an adapter's
    base model."""
    base, own = base_of_adapter(folder), _num_values(folder)
    return own, own if base is None else own + parameter_counts(NOTHING.folder(base))[1]


def _num_values(folder: Path) -> int:
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of `train`: the given ones, and the preset's for the rest. Raises ConfigError for an
    unknown preset."""
    name = given.get("preset")
    if name is None:
        return dict(given)
    presets = read_table(__file__, "presets.yaml")["presets"]
    if str(name) not in presets:
        raise ConfigError(f"preset {name!r} isn't one of {', '.join(presets)}.{nearest(str(name), presets)}")
    return {**presets[name], **given}


def estimate_seconds(asked: Train, texts: Sequence[str], num_answers: int) -> float:
    """Roughly how many seconds a training run takes here if all answers are as long as they may be
    (`costs.model`), with four characters per token. Returns 0 if the model's size is unknown."""
    shape = read_model_shape(asked.model_name)
    if shape is None:
        return 0.0
    work = TokenWork(asked.algorithm != "sft")
    sampled = 0
    if work.is_sampled:
        work = TokenWork(True, has_reference=bool(asked.kl_coef), has_critic=asked.algorithm == "ppo")
        sampled = new_tokens(asked.model_name, asked.max_new_tokens) * num_answers
    num_tokens = asked.num_epochs * sum(len(text) // 4 + sampled for text in texts)
    return training_seconds(work, shape.num_parameters, num_tokens, _matrix_speed())


def _matrix_speed() -> float:
    """Operations per second of the fastest of some matrix products on this machine."""
    import torch

    size = 512
    matrix = torch.ones(size, size, device="cuda" if torch.cuda.is_available() else "cpu")
    product_s = math.inf
    for _ in range(32):  # the first ones wake threads
        started = time.perf_counter()
        float((matrix @ matrix)[0, 0])
        product_s = min(product_s, time.perf_counter() - started)
    return matrix_speed(size, product_s)
