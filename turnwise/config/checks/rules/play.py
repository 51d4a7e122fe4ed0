"""Rules of what is played and who does: environments, rows, rewards, and the models of the roles."""

from turnwise.config.checks.rules.rule import Rule
from turnwise.config.schema.agentic import AgenticConfig
from turnwise.spec import ROWS_TAG

WRITES_NO_TEXT = "token_classification is a value head, which writes no text; this model needs causal_lm"
IN_PROCESS = ("embedded", "hf")
"""The strategies of servers that run in the run's own process."""

PLAY_RULES: tuple[Rule[AgenticConfig], ...] = (
    Rule(
        "custom_envs",
        when=lambda c: not c.custom_envs and not c.data.train_files,
        says=lambda c: (
            "there is nothing to train on; name an environment, such as custom_envs: {Lake: "
            "{env_type: frozen_lake}}, or rows, data.train_files"
        ),
    ),
    Rule(
        "custom_envs.data",
        when=lambda c: ROWS_TAG in c.custom_envs,
        says=lambda c: "is the tag of the rows of data.train_files; give this environment another one",
    ),
    Rule(
        "data.train_files",
        when=lambda c: c.data.train_files == [] and ROWS_TAG not in c.custom_envs,
        says=lambda c: "[] leaves nothing to play; name files of rows, or remove it",
    ),
    Rule(
        "data.train_files",
        when=lambda c: (
            c.data.train_files and not c.train_env_manager.has_rows and ROWS_TAG not in c.custom_envs
        ),
        says=lambda c: "are not played: train_env_manager.tags doesn't name 'data'; add it, or remove tags",
    ),
    Rule(
        "data.reward",
        when=lambda c: (
            c.train_env_manager.has_rows
            and not c.data.reward
            and not c.may_score_rows
            and c.data.default_agent != "gateway"
        ),
        says=lambda c: (
            "is unset, and nothing else rewards the rows of train_files; name exact_match, your own "
            "module:function, or an agent or simulated user that scores (agent.play, agent.command, "
            "agent.agent_config_path, agent.interaction_config_path)"
        ),
    ),
    Rule(
        "eval_steps",
        when=lambda c: c.uses_validation and c.train_env_manager.has_rows and not c.val_env_manager.tags,
        says=lambda c: f"{c.eval_steps} asks for validation, and there are no data.val_files; name some",
    ),
    Rule(
        "data.num_epochs",
        when=lambda c: c.data.num_epochs and not c.train_env_manager.has_rows,
        says=lambda c: "counts how often rows are played, and there are no data.train_files",
    ),
    Rule(
        "data.reward",
        when=lambda c: c.has_own_judge and c.needs_reward_model,
        says=lambda c: (
            "reward_model and a judge without base_url both want the reward role's model; give the judge a "
            "base_url"
        ),
    ),
    Rule(
        "reward.strategy_args.strategy_name",
        when=lambda c: (
            c.has_own_judge
            and not c.needs_reward_model
            and c.reward.strategy_args.strategy_name not in IN_PROCESS
        ),
        says=lambda c: (
            f"{c.reward.strategy_args.strategy_name} doesn't serve a judge in the run's "
            "process; use embedded or hf, or give the judge a base_url"
        ),
    ),
    Rule(
        "actor_train.model_args.model_type",
        when=lambda c: c.actor_train.model_args.model_type != "causal_lm",
        says=lambda c: WRITES_NO_TEXT,
    ),
    Rule(
        "actor_infer.model_args.model_type",
        when=lambda c: c.actor_infer.model_args.model_type != "causal_lm",
        says=lambda c: WRITES_NO_TEXT,
    ),
    Rule(
        "critic.model_args.model_type",
        when=lambda c: c.needs_critic and c.critic.model_args.model_type == "causal_lm",
        says=lambda c: "causal_lm writes text; a critic has a value head, token_classification",
    ),
)
