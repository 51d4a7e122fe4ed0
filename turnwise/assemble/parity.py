"""The parity gate of a run: it compares the servers' log-probs with the trainer's, on the first prompts of
the run's tags."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from torch import Tensor

from turnwise.assemble.agents import build_agent
from turnwise.assemble.rollouts import ServedPolicy, sampling_params
from turnwise.config import AgenticConfig
from turnwise.examine.agents import agent_settings
from turnwise.examine.examined import Examined
from turnwise.models.load import base_folder, load_model_config
from turnwise.pipelines.model_role import ModelRole
from turnwise.pipelines.parity import TOKENS_PER_TURN, ParityGate, Prompt, first_prompts
from turnwise.pipelines.parity_diagnosis import Suspects
from turnwise.types import SamplingParams

_MIN_CONVERSATIONS = 2
_PLAIN_PROMPT: Prompt = [{"role": "user", "content": "Hello"}]
"""The prompt of the parity gate if the run's agents give no prompt that leaves room for a response."""


def build_parity_gate(
    examined: Examined,
    policy: ServedPolicy,
    actor_train: ModelRole,
    weights: Callable[[], Iterable[tuple[str, Tensor]]],
) -> ParityGate:
    """The parity gate of a run. `weights` returns the trainer's weights with their Hugging Face names."""
    config = examined.config
    sampling = sampling_params(config, "train")
    prompts = _prompts(examined, policy, sampling)
    num_conversations = max(_MIN_CONVERSATIONS, len(prompts), len(policy.servers.servers))
    return ParityGate(
        run_async=policy.event_loop.run,
        server=policy.servers,
        template=policy.template,
        prompts=[prompts[index % len(prompts)] for index in range(num_conversations)],
        sampling=gate_sampling(sampling, config.seed, policy.servers.info().sampling_mask),
        max_length=config.sequence_length,
        max_diff=config.parity_max_logprob_diff,
        forgets=not config.plays_ahead,
        suspects=_suspects(config, policy, actor_train, weights, sampling.temperature),
    )


def _prompts(examined: Examined, policy: ServedPolicy, sampling: SamplingParams) -> list[Prompt]:
    """The first prompts of the run's agents that leave room for a response, or `_PLAIN_PROMPT`."""
    config = examined.config
    agents = {}
    # An agent of the gateway makes its prompts where nobody can ask for them.
    for tag in [tag for tag in config.train_env_manager.env_tags if tag not in config.gateway_tags]:
        settings = agent_settings(config, tag, "train", policy.event_loop.watchdog)
        agents[tag] = build_agent(examined, tag, "train", settings=settings)
    by_tag = policy.event_loop.run(
        first_prompts(
            agents,
            config.seed,
            sampling,
            config.sequence_length,
        )
    )
    room = config.sequence_length - TOKENS_PER_TURN
    prompts = [prompt for prompt in by_tag.values() if len(policy.template.start(prompt)) <= room]
    return prompts or [_PLAIN_PROMPT]


def _suspects(
    config: AgenticConfig,
    policy: ServedPolicy,
    actor_train: ModelRole,
    weights: Callable[[], Iterable[tuple[str, Tensor]]],
    temperature: float,
) -> Suspects:
    trust = policy.info.trust
    without_adapter = None
    if config.actor_train.model_args.has_adapter:
        base = actor_train.without_adapter("base", actor_train.plan)
        without_adapter = partial(base.forward, output="logprobs")
    return Suspects(
        score=partial(actor_train.forward, output="logprobs"),
        weights=weights,
        model_config=load_model_config(base_folder(policy.info.path, trust), trust),
        temperature=temperature,
        trainer_dtype=config.actor_train.model_args.dtype,
        sampler_dtype=config.actor_infer.model_args.dtype,
        folders=_model_folders(config),
        without_adapter=without_adapter,
    )


def gate_sampling(sampling: SamplingParams, seed: int, has_kept_ids: bool) -> SamplingParams:
    """The gate's sampling: the run's temperature, and its top_k, top_p and min_p if the server says which
    tokens they leave."""
    plain = SamplingParams(TOKENS_PER_TURN, temperature=sampling.temperature, seed=seed)
    if not sampling.keeps_ids or not has_kept_ids:
        return plain
    return replace(plain, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)


def _model_folders(config: AgenticConfig) -> dict[str, str]:
    """Maps each model folder of the config to one setting that names it. The trained model's folder comes
    first."""
    by_setting = {"pretrain": config.pretrain}
    for name, role in config.roles.items():
        by_setting[f"{name}.model_args.model_name_or_path"] = role.model_args.model_name_or_path
    trained = config.actor_train.model_args.model_name_or_path
    folders: dict[str, str] = {}
    for setting, folder in sorted(by_setting.items(), key=lambda item: item[1] != trained):
        folders.setdefault(folder, setting)
    return folders
