"""Rules of a run: what its validations decide, and what must not depend on time."""

from turnwise.config.checks.rules.play import IN_PROCESS
from turnwise.config.checks.rules.rule import Rule
from turnwise.config.schema.agentic import AgenticConfig
from turnwise.config.schema.gateway import LOOPBACK

RUN_RULES: tuple[Rule[AgenticConfig], ...] = (
    Rule(
        "val_env_manager.group_size_redundancy",
        when=lambda c: c.val_env_manager.group_size_redundancy,
        says=lambda c: (
            "would score the quickest episodes only, which aren't a fair sample; remove it for validation"
        ),
    ),
    Rule(
        "save_best",
        when=lambda c: c.save_best and not c.uses_validation,
        says=lambda c: (
            "metric, mode say what the validations decide, and eval_steps is 0; set it, or remove this"
        ),
    ),
    Rule(
        "early_stopping",
        when=lambda c: c.early_stopping and not c.uses_validation,
        says=lambda c: (
            "metric, mode, patience, min_delta say what the validations decide, and eval_steps is 0; set "
            "it, or remove this"
        ),
    ),
    Rule(
        "stale_groups",
        when=lambda c: c.deterministic and c.plays_ahead and c.stale_groups == "drop",
        says=lambda c: (
            "drop lets time decide what is trained on, which deterministic: true forbids; use wait"
        ),
    ),
    Rule(
        "deterministic",
        when=lambda c: c.deterministic and c.names_gateway,
        says=lambda c: (
            "an agent of the gateway sends its requests when it likes, so no two runs are the same; set it "
            "to false"
        ),
    ),
    Rule(
        "gateway.public_url",
        when=lambda c: c.gateway.host not in LOOPBACK and not c.gateway.public_url,
        says=lambda c: (
            f"is unset, and gateway.host {c.gateway.host} isn't an address that agents could use; set it to "
            "http://HOST:PORT, as agents reach it"
        ),
    ),
    Rule(
        "train_env_manager.group_size_redundancy",
        when=lambda c: c.deterministic and c.train_env_manager.group_size_redundancy,
        says=lambda c: "lets the quickest episodes win, which deterministic: true forbids; set it to 0",
    ),
    Rule(
        "actor_infer.strategy_args.strategy_name",
        when=lambda c: c.deterministic and c.actor_infer.strategy_args.strategy_name not in IN_PROCESS,
        says=lambda c: (
            f"{c.actor_infer.strategy_args.strategy_name} schedules by time, which deterministic: true "
            "forbids; use embedded"
        ),
    ),
)
