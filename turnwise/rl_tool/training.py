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
CRITIC_FACTOR = 10
"""Without LoRA, the critic's default learning rate is this times the policy's, since the value head starts at
0 and must fit before the policy improves. With LoRA it is the policy's."""
FASTEST_CRITIC = 1e-3
"""The highest default learning rate that `CRITIC_FACTOR` leads to, so that small critics converge."""
_DEFAULT_CONTEXT = 4096
_DEFAULT_NEW_TOKENS = 512


class ExistsError(ConfigError):
    """`output_dir` holds a result already."""


def train(action: Train, datasets: Mapping[str, Any], rewards: Mapping[str, Any]) -> dict[str, Any]:
    """Trains a model; returns the answer of the tool."""
    out = Path(action.output_dir)
    started = time.perf_counter()
    is_sft = action.algorithm == "sft"
    _require_free(action, out)
    check_model(action.model_name)
    loaded = data.load(action, "sft" if is_sft else "rl", datasets)
    texts = [data.formatted(row) for row in loaded.rows]
    estimated_s = estimate_seconds(action, texts, num_generations(action))
    summary = f"dataset: {loaded.name}, {counted(len(loaded.rows), 'row')}"
    if estimated_s:
        summary += f"; this training takes about {estimated_s:,.0f} s here, loading aside"
    print(summary, flush=True)
    checkpoint = _train_sft(action, loaded) if is_sft else _train_rl(action, loaded, rewards)
    place_result(checkpoint, out)
    run = checkpoint.parents[1]
    steps = read_metrics(run / "metrics.jsonl")
    metrics = steps[-1] if steps else {}
    trainable, total = parameter_counts(out)
    return {
        "algorithm": action.algorithm,
        "model": action.model_name,
        "base_model": base_of_adapter(out),
        "output_dir": str(out),
        "run_folder": str(run),
        "curve": str(run / "learning_curve.png"),
        "dataset": loaded.name,
        "dataset_size": len(loaded.rows),
        "num_epochs": action.num_epochs,
        "batch_size": action.batch_size,
        "effective_batch_size": action.batch_size * num_generations(action),
        "num_steps": _number(checkpoint),
        "learning_rate": learning_rate(action),
        "kl": metrics.get("actor/kl_loss"),
        "final_loss": metrics.get("sft/loss" if is_sft else "actor/total_loss"),
        "average_reward": metrics.get("rollout/score/mean"),
        "metrics": metrics,
        "trainable_parameters": trainable,
        "total_parameters": total,
        "estimated_s": estimated_s,
        "duration_s": time.perf_counter() - started,
    }


def _train_sft(action: Train, loaded: data.LoadedRows) -> Path:
    """Trains by SFT; returns the last checkpoint."""
    demonstrations = [dict(row) for row in loaded.rows]
    for demonstration in demonstrations:
        demonstration.pop("data_source", None)
    return Trainer.sft(action.model_name, demonstrations, **sft_config(action))


def _train_rl(action: Train, loaded: data.LoadedRows, rewards: Mapping[str, Any]) -> Path:
    """Trains by reinforcement learning; returns the last checkpoint."""
    config = rl_config(action, len(loaded.rows), rewards)
    if any(reward["name"] == "accuracy" for reward in config["data"]["reward"]):
        data.require_truths(loaded, ["ground_truth", "answer"])
    trainer = Trainer(model=action.model_name, train_dataset=loaded.rows, **config)
    trainer.train()
    assert trainer.run_folder is not None
    checkpoints = (trainer.run_folder / "checkpoints").glob("checkpoint-*")
    return max(checkpoints, key=_number)


def _require_free(action: Train, out: Path) -> None:
    if action.resume and action.overwrite:
        raise ConfigError(
            "resume and overwrite contradict each other: one continues what the other replaces; choose one"
        )
    base: str | None = action.model_name
    while base is not None:
        if Path(base).resolve() == out.resolve():
            raise ConfigError(
                f"output_dir {out} is a model that this training starts from; name another folder, to keep it"
            )
        base = base_of_adapter(base)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"output_dir {out} is a file; name a folder")
    is_taken = bool(model_files(out)) or any((out / RUN).glob("*/checkpoints/checkpoint-*"))
    if is_taken and not (action.resume or action.overwrite):
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


def _common(action: Train) -> dict[str, Any]:
    trackers = []
    tracker_kwargs = {}
    if action.use_tensorboard:
        trackers.append("tensorboard")
    if action.use_wandb:
        trackers.append("wandb")
        if action.wandb_project:
            tracker_kwargs["wandb"] = {"project": action.wandb_project}
    return {
        "output_dir": action.output_dir,
        "exp_name": RUN,
        "seed": action.seed,
        "save_steps": 50,
        "track_with": [*trackers, "stdout"],
        "tracker_kwargs": tracker_kwargs,
        "resume_from_checkpoint": action.resume,
    }


def _model_args(action: Train) -> dict[str, Any]:
    arguments: dict[str, Any] = {"dtype": action.dtype}
    if not action.use_lora:
        return arguments
    arguments["lora_rank"] = action.lora_rank
    if action.lora_alpha is not None:
        arguments["lora_alpha"] = action.lora_alpha
    if action.lora_target_modules is not None:
        arguments["lora_target"] = action.lora_target_modules
    return arguments


def _strategy(action: Train) -> dict[str, Any]:
    if action.deepspeed is None:
        return {}
    return {"strategy_args": {"strategy_name": "deepspeed_train", "strategy_config": action.deepspeed}}


def _training_args(action: Train, rate: float) -> dict[str, Any]:
    return {
        "learning_rate": rate,
        "per_device_train_batch_size": _share_of_a_step(action),
        "lr_scheduler_type": action.lr_scheduler_type,
        "warmup_ratio": action.warmup_ratio,
        "weight_decay": action.weight_decay,
    }


def _share_of_a_step(action: Train) -> int:
    """The number of a step's samples that each of a launcher's processes trains on."""
    num_samples = action.batch_size * num_generations(action)
    _, num_processes = launched()
    if num_samples % num_processes:
        raise ConfigError(
            f"batch_size {action.batch_size}: a step has {num_samples} samples, which {num_processes} "
            "processes can't share evenly; start a number of processes that divides it, or choose another "
            "batch_size"
        )
    return num_samples // num_processes


def learning_rate(action: Train) -> float:
    """The learning rate asked for, else the algorithm's default."""
    kind = "sft" if action.algorithm == "sft" else "rl"
    return action.learning_rate or LEARNING_RATES[kind, action.use_lora]


def num_generations(action: Train) -> int:
    """Answers per prompt; a demonstration has one."""
    if action.algorithm == "sft":
        return 1
    default = 8 if action.algorithm == "grpo" else 1
    return action.num_generations or default


def sft_config(action: Train) -> dict[str, Any]:
    """The config of `turnwise sft` for these parameters."""
    return {
        **_common(action),
        "num_epochs": action.num_epochs,
        "model_args": _model_args(action),
        "training_args": _training_args(action, learning_rate(action)),
        **_strategy(action),
    }


def rl_config(action: Train, num_rows: int, registered: Mapping[str, Any]) -> dict[str, Any]:
    """The config of `turnwise train` for these parameters."""
    group_size = num_generations(action)
    reward_defaults: dict[str, Any] = {}
    if action.preset:
        reward_defaults = read_table(__file__, "presets.yaml")["safe_rewards"]
    if action.algorithm == "grpo" and group_size == 1:
        raise ConfigError(
            "num_generations is 1: grpo compares the answers to a prompt, so it needs 2 or more; ppo uses 1"
        )
    config = {
        **_common(action),
        "algorithm": "gae" if action.algorithm == "ppo" else "grpo",
        "max_steps": action.num_epochs * math.ceil(num_rows / action.batch_size),
        "rollout_batch_size": action.batch_size * group_size,
        "train_env_manager": {"num_env_groups": action.batch_size, "group_size": group_size},
        "pg_clip": action.clip_range,
        "use_kl_loss": action.kl_coef > 0,
        "data": {
            "num_epochs": action.num_epochs,
            "checker": action.checker,
            "reward": reward_sections(
                action.reward_type,
                action.reward_config,
                action.custom_reward,
                registered,
                reward_defaults,
            ),
        },
        "actor_infer": {
            "generating_args": {
                "max_new_tokens": new_tokens(action.model_name, action.max_new_tokens),
                "temperature": action.temperature,
            }
        },
        "actor_train": {
            "model_args": _model_args(action),
            "training_args": _training_args(action, learning_rate(action)),
            "use_dynamic_batching_in_train": True,
            **_strategy(action),
        },
    }
    if action.kl_coef:
        config["kl_loss_coef"] = action.kl_coef
    if action.algorithm == "ppo":
        config["critic"] = _critic(action)
        config["whiten_advantages"] = True
    return config


def _critic(action: Train) -> dict[str, Any]:
    actor_rate = learning_rate(action)
    default = actor_rate
    if not action.use_lora:
        default = max(actor_rate, min(CRITIC_FACTOR * actor_rate, FASTEST_CRITIC))
    return {
        "training_args": _training_args(action, action.critic_learning_rate or default),
        "use_dynamic_batching_in_train": True,
        **_strategy(action),
    }


def new_tokens(model: str, max_new_tokens: int | None) -> int:
    """Maximum tokens per answer: `max_new_tokens`, else 512 or, if that is less, half of the model's
    context."""
    shape = read_model_shape(model)
    context = _DEFAULT_CONTEXT
    if shape:
        context = min(shape.context_length, _DEFAULT_CONTEXT)
    return max_new_tokens or min(_DEFAULT_NEW_TOKENS, context // 2)


def place_result(checkpoint: Path, out: Path) -> None:
    """Puts the model of a checkpoint and its tokenizer into the folder `out`: a LoRA adapter as it is, any
    other model as a plain Hugging Face folder. Replaces a model that `out` holds. Raises ConfigError if its
    files are of something else."""
    from turnwise.models.export import export_model
    from turnwise.models.load import load_tokenizer
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
    # Weights first: what a kill leaves has them, so it still counts as a result.
    new_files = sorted(prepared.iterdir(), key=lambda file: file.suffix != ".safetensors")
    for file in new_files:
        os.replace(file, out / file.name)
    prepared.rmdir()
    names = {file.name for file in new_files}
    for old in model_files(out):
        if old.name not in names:
            old.unlink()


def parameter_counts(folder: Path) -> tuple[int, int]:
    """`(trained, all)`: the parameters in a result's own files, and these together with those of an adapter's
    base model."""
    num_trained = _num_values(folder)
    base = base_of_adapter(folder)
    if base is None:
        return num_trained, num_trained
    _, num_of_base = parameter_counts(NOTHING.folder(base))
    return num_trained, num_trained + num_of_base


def _num_values(folder: Path) -> int:
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def with_preset(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of `train`: these, and the preset's for all others. Raises ConfigError for an unknown
    preset."""
    name = parameters.get("preset")
    if name is None:
        return dict(parameters)
    presets = read_table(__file__, "presets.yaml")["presets"]
    if str(name) not in presets:
        raise ConfigError(f"preset {name!r} isn't one of {', '.join(presets)}.{nearest(str(name), presets)}")
    return {**presets[name], **parameters}


def estimate_seconds(action: Train, texts: Sequence[str], num_answers: int) -> float:
    """Roughly how many seconds a training run takes here if all answers are as long as they may be
    (`costs.model`), with four characters per token. Returns 0 if the model's size is unknown."""
    shape = read_model_shape(action.model_name)
    if shape is None:
        return 0.0
    work = TokenWork(action.algorithm != "sft")
    num_sampled = 0
    if work.is_sampled:
        work = TokenWork(True, has_reference=bool(action.kl_coef), has_critic=action.algorithm == "ppo")
        num_sampled = new_tokens(action.model_name, action.max_new_tokens) * num_answers
    num_tokens = action.num_epochs * sum(len(text) // 4 + num_sampled for text in texts)
    return training_seconds(work, shape.num_parameters, num_tokens, _matrix_speed())


def _matrix_speed() -> float:
    """Operations per second of the fastest of some matrix products on this machine."""
    import torch

    size = 512
    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix = torch.ones(size, size, device=device)
    product_s = math.inf
    for _ in range(32):  # the first ones wake threads
        started = time.perf_counter()
        float((matrix @ matrix)[0, 0])
        product_s = min(product_s, time.perf_counter() - started)
    return matrix_speed(size, product_s)
