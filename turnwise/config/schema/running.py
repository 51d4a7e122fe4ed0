"""Settings of a run as a whole: name and folders, steps, tracking, checkpoints, limits."""

import reprlib
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from turnwise.config.schema.section import (
    Count,
    Name,
    Names,
    NonNegative,
    OneOf,
    Positive,
    PositiveCount,
    Seconds,
    Section,
    derived,
)
from turnwise.spec import TRACKERS

LONGEST_NAME = 200
"""Maximum bytes of an experiment's name. The name, a time and an ending make a file name, which may have 255
bytes."""


def _trackers(names: list[str]) -> list[str]:
    return [OneOf(TRACKERS)(name) for name in names]


def _folder_name(name: str) -> str:
    if (
        not name.isprintable()
        or "/" in name
        or "\\" in name
        or name in ("", ".", "..")
        or len(name.encode()) > LONGEST_NAME
    ):
        raise ValueError(
            f"{reprlib.repr(name)} can't be the name of a folder in output_dir: give 1 to {LONGEST_NAME} "
            "bytes of printable characters without slashes; output_dir sets where it is"
        )
    return name


def _ray_address(address: str) -> str:
    host, _, port = address.rpartition(":")
    if address == "auto" or (host and port.isdecimal() and "/" not in host):
        return address
    advice = "give HOST:PORT of its head (`ray start --head` prints it), or auto"
    if address.startswith("ray://"):
        advice = "start the run on one of its nodes, or by `ray job submit`, and give HOST:PORT or auto"
    raise ValueError(f"{reprlib.repr(address)} isn't the address of a Ray that a run can join; {advice}")


class CheckpointConfig(Section):
    """Where checkpoints go."""

    type: Literal["file_system"] = "file_system"
    """Kind of storage. A folder is the only kind."""
    output_dir: Name | None = None
    """Checkpoints go to exp_name/time in this folder [checkpoints in the run's folder]."""
    save_hf_model: bool = False
    """Write a plain Hugging Face model folder into every checkpoint of fsdp2_train and megatron_train, and
    not only into the last one; `turnwise export` makes one of any checkpoint. Other strategies write one
    anyway."""


def _trace_backend(name: Any) -> Any:
    if name in ("weave", "trackio"):
        raise ValueError(
            f"traces don't go to {name}; use jsonl, a file in the run's folder that `turnwise trace` shows, "
            "or mlflow"
        )
    return name


class Trace(Section):
    """Traces of episodes: every response, call of a tool, step of an environment and reward as a span with
    its times (docs/debugging.md)."""

    backend: Annotated[Literal["jsonl", "mlflow"] | None, BeforeValidator(_trace_backend)] = None
    """Where traces of training and validation go; unset = nowhere. `jsonl` = the file traces.jsonl in the
    run's folder (`rollout` and `eval`: beside the file of trajectories); `mlflow` = the experiment in MLflow
    that metrics go to (`tracker_kwargs`, MLFLOW_TRACKING_URI)."""
    token2text: bool = False
    """Write the decoded text beside the token ids of prompts and responses."""
    max_samples_per_step: PositiveCount | None = derived()
    """Maximum tasks of a step that are traced, chosen by seed, with all siblings of each [all with jsonl, 1
    with mlflow]."""
    max_mb: PositiveCount = 256
    """Maximum size in megabytes of traces.jsonl and traces.1.jsonl together; `jsonl` only."""
    max_pending_mb: PositiveCount = 256
    """Maximum megabytes of traces that wait to be written. Beyond that, episodes go without a trace; the run
    never waits for them."""


class Deadlines(Section):
    """Seconds after which a wait ends with an error that names who waits for whom."""

    request_s: Seconds = 600.0
    """Deadline of one call of an inference server: the answer to a request, an abort, a pause."""
    start_s: Seconds = 1800.0
    """Deadline of the start of an inference server with its engine."""
    env_s: Seconds = 600.0
    """Deadline of code that blocks the event loop, if it has no other, and of the wait for a blocking
    environment's turn. An environment's call in a worker that was given up and still runs then costs the
    worker."""
    train_s: Seconds = 3600.0
    """Deadline of one call of the trainer, reference or critic: a forward pass, an optimiser step, saving,
    loading."""
    weights_s: Seconds = 600.0
    """Deadline of one weight update of the inference servers."""
    node_s: Seconds = 30.0
    """Silence of a node of Ray after which the run counts it as lost, and its processes end themselves."""


class CpuSplit(Section):
    """CPU threads of training and of rollouts in asynchronous runs, where both compute at once."""

    train: PositiveCount | None = None
    """Threads of the trainer [what rollouts leave; half if `rollout` is unset too]."""
    rollout: PositiveCount | None = None
    """Threads of the inference servers [what training leaves; half if `train` is unset too]."""


class ClusterArgs(Section):
    """The processes that train."""

    name: Literal["auto", "local", "process", "launched", "ray"] = "auto"
    """`local` = this process; `process` = a process for each device, beside this one; `launched` = the
    processes that torchrun or accelerate started; `ray` = an actor of Ray for each device, on any of its
    nodes. `auto` picks `ray` if `address` or RAY_ADDRESS is set, if a job of Ray started the run, or if a
    device is beyond num_gpus_per_node; else one of the others that suits the devices."""
    address: Annotated[str, AfterValidator(_ray_address)] | None = None
    """The Ray that the run joins: HOST:PORT of its head, or auto for the one that runs on this machine [a
    Ray of the run's own, on this machine]."""
    interface: Name | None = None
    """Network interface of each node for traffic between ranks and for weights to other nodes [that of the
    node's address in Ray]."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """What Ray prepares for the actors, passed on as it is: `env_vars`, `pip`, `working_dir`."""


class ValidationMetric(Section):
    """A metric of the validations, by which models are compared."""

    metric: str = "val/score/mean"
    """The metric that validations are compared by; for supervised fine-tuning it is always sft/val_loss."""
    mode: Literal["max", "min"] = "max"
    """Whether larger or smaller values are better; for supervised fine-tuning the default is min."""


class SaveBest(ValidationMetric):
    """How the best model is chosen. The run keeps it in its folder `best`."""


class EarlyStopping(ValidationMetric):
    """When a run ends early, because its validations no longer improve."""

    patience: PositiveCount = 5
    """The run ends after this many validations in a row that don't improve on the best value."""
    min_delta: NonNegative = 0.0
    """A value is better only if it improves on the best by more than this."""


class RunKeys(Section):
    """The keys that reinforcement learning and supervised fine-tuning share."""

    pretrain: Name
    """Model folder or hub name for every role that names no model of its own."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables that the policy's chat template reads at every render (`enable_thinking: false`,
    `date_string: "26 Jul 2024"`); a variable that the template never reads is an error."""
    exp_name: Annotated[str, AfterValidator(_folder_name)] = "turnwise"
    """Name of the experiment [the config file's name without .yaml; turnwise without a file]."""
    seed: Count = 42
    """Seed of all random numbers."""
    output_dir: Name = "runs"
    """A run writes to the folder output_dir/exp_name/time."""
    logging_dir: Name | None = None
    """Folder of the log file [the run's folder]."""

    save_steps: Count = 50
    """Write a checkpoint every so many steps, and at the end; 0 = only at the end."""
    logging_steps: PositiveCount = 1
    """Print a line of metrics and some samples every so many steps."""
    eval_steps: Count = 0
    """Validate every so many steps, from step 0 on, and at the end; 0 = never, or for fine-tuning only at the
    end."""
    save_best: SaveBest | None = None
    early_stopping: EarlyStopping | None = None
    resume_from_checkpoint: bool | str = False
    """Path of a checkpoint to continue from; true = the newest of this experiment; false = a new run."""
    max_ckpt_to_keep: Count = 2
    """Number of checkpoints to keep; older ones are deleted; 0 = keep all."""
    checkpoint_config: CheckpointConfig = Field(default_factory=CheckpointConfig)

    cluster: ClusterArgs = Field(default_factory=ClusterArgs)
    num_gpus_per_node: PositiveCount | None = None
    """Number of devices that a machine without accelerators is taken to have [its cores]."""
    deterministic: bool = False
    """Make two runs of one config and seed bit-identical, and refuse settings that prevent it."""

    track_with: Annotated[Names, AfterValidator(_trackers)] = Field(
        default_factory=lambda: ["tensorboard", "stdout"]
    )
    """Where metrics go besides metrics.jsonl: tensorboard, stdout, wandb, swanlab, mlflow."""
    tracker_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments by tracker name (`wandb: {mode: offline}`), or directly if only one tracker accepts any
    (docs/python.md)."""
    sequence_length: PositiveCount = derived()
    """Maximum tokens of a context [the model's, at most 4096]."""


class LimitKeys(Section):
    """Parity of sampler and trainer, asynchrony, deadlines and traces."""

    parity_max_logprob_diff: Positive = derived()
    """Maximum mean |difference| of the log-probs of sampler and trainer, in nats [1e-3 in fp32, 0.1
    otherwise, where a few tokens may exceed it by chance: more are asked for then]."""
    deadlines: Deadlines = Field(default_factory=Deadlines)
    on_weight_update: Literal["finish", "abort_continue", "abort_restart", "keep"] = "finish"
    """Whether running requests finish before a weight update, are aborted and continue or restart, or pause
    (`keep`)."""
    stale_groups: Literal["wait", "drop"] = "wait"
    """What happens to a late group in the last step that may train on it: the step waits (`wait`) or drops it
    (`drop`)."""
    stream_training: bool = derived()
    """Accumulate gradients as each group of a step ends, with one optimiser step after the last [true if
    training is asynchronous, no setting needs the whole batch, and no replica lends its device to
    training]."""
    cpu_split: CpuSplit = Field(default_factory=CpuSplit)
    trace: Trace = Field(default_factory=Trace)
