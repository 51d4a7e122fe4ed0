"""The settings of a run under verl's names, for users' agent loops that read them there."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from turnwise.config import AgenticConfig
from turnwise.spec import ROWS_TAG, Split


def published_settings(config: AgenticConfig, split: Split) -> DictConfig:
    """What `self.config` of a published agent loop holds: `actor_rollout_ref.model` and
    `.rollout`, and `data`. `response_length` is that of one response, and `max_model_len` that
    of a whole episode."""
    agent = config.agent
    sampling = config.sampling(split)
    response_length = config.max_new_tokens(split, ROWS_TAG)
    prompt_length = max(config.sequence_length - response_length, 1)
    model = config.actor_train.model_args.model_name_or_path
    multi_turn = {
        "enable": True,
        "max_assistant_turns": agent.max_assistant_turns,
        "max_user_turns": agent.max_user_turns,
        "max_parallel_calls": agent.max_parallel_calls,
        "max_tool_response_length": agent.max_tool_response_length,
        "tool_response_truncate_side": agent.tool_response_truncate_side,
        "format": agent.tool_parser,
        "tool_config_path": agent.tool_config_path,
        "function_tool_path": agent.function_tool_path,
        "interaction_config_path": agent.interaction_config_path,
    }
    rollout = {
        "name": config.actor_infer.strategy_args.strategy_name,
        "mode": "async",
        "prompt_length": prompt_length,
        "response_length": response_length,
        "max_model_len": config.sequence_length,
        "n": config.env_manager(split).group_size,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "repetition_penalty": sampling.repetition_penalty,
        "calculate_log_probs": True,
        "multi_turn": multi_turn,
        "agent": {"agent_loop_config_path": agent.agent_config_path},
    }
    settings: dict[str, Any] = {
        "actor_rollout_ref": {"model": {"path": model}, "rollout": rollout},
        "data": {
            "max_prompt_length": prompt_length,
            "max_response_length": response_length,
            "prompt_key": config.data.prompt_key,
            "apply_chat_template_kwargs": dict(config.template_kwargs),
        },
    }
    created: DictConfig = OmegaConf.create(settings)
    return created
