"""Builds the health checks of a run, and the random player with which they compare the policy."""

from functools import partial
from statistics import fmean

from turnwise.assemble.rollouts import seeded_tasks
from turnwise.config import AgenticConfig
from turnwise.envs.checks.luck import random_outcomes
from turnwise.examine.envs import env_factory
from turnwise.tracking.health import LENGTH_KEY, Health, Outcomes
from turnwise.training.state import GlobalRandomState

NUM_EPISODES = 200
"""Maximum episodes of the random player per tag."""
BUDGET_S = 2.0
"""Maximum seconds that the random player plays, all tags together."""


def build_health(config: AgenticConfig, is_playing: bool, run: str) -> Health:
    """The health checks of a run, whose advice names the keys of its kind of task. They compare the policy
    with a random player if the run plays only environments, none of them in
    workers (`max_env_num_per_worker`) or threads (`use_thread_lock`), and `data.reward` is unset."""
    manager = config.env_manager("train")
    if manager.has_rows:
        return Health(length_key="actor_infer.generating_args.max_new_tokens", run=run)
    has_locks = any(config.custom_envs[tag].use_thread_lock for tag in manager.env_tags)
    are_apart = bool(manager.max_env_num_per_worker) or has_locks
    if not is_playing or are_apart or config.data.reward:
        return Health(length_key=LENGTH_KEY, run=run)
    return Health(partial(_play_at_random, config), LENGTH_KEY, run)


def _play_at_random(config: AgenticConfig) -> Outcomes | None:
    """Success of a random player on the first training tasks of each tag; None unless it can be measured for
    every tag. Leaves the state of the global random generators unchanged."""
    manager = config.env_manager("train")
    source = seeded_tasks(config, "train")
    generators = GlobalRandomState()
    seeds: dict[str, list[int]] = {tag: [] for tag in manager.env_tags}
    for index in range(NUM_EPISODES * len(seeds)):
        task = source.task(index)
        seeds[task.tag].append(task.seed)
    generator_states = generators.state_dict()
    outcomes = []
    try:
        for tag, seeds_of_tag in seeds.items():
            make_env = partial(env_factory(config, tag, "train"), source.task(0))
            max_steps = config.custom_envs[tag].max_steps
            budget_s = BUDGET_S / len(seeds)
            outcomes.append(
                random_outcomes(
                    make_env,
                    seeds_of_tag[:NUM_EPISODES],
                    max_steps,
                    budget_s,
                )
            )
    finally:
        generators.load_state_dict(generator_states)
    if not all(outcomes):
        return None
    return Outcomes(fmean(fmean(of_tag) for of_tag in outcomes), sum(map(len, outcomes)))
