"""Builds the manager of the rewards that a config's `data.reward` names."""

from copy import copy
from dataclasses import replace

from turnwise.assemble.reward_model import build_judge, build_reward_model
from turnwise.chat.template import ChatTemplate
from turnwise.cluster.hosts import Hosts
from turnwise.data.reward_functions import FunctionReward
from turnwise.data.rewards import DecodeCompletion, RewardManager, WeightedReward
from turnwise.examine.examined import Examined
from turnwise.examine.rewards import judges_of
from turnwise.inference.judge import Judge
from turnwise.inference.served_chat import ServedChat
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.placement import Placement
from turnwise.types import Trajectory


def build_reward_manager(
    examined: Examined,
    placement: Placement,
    template: ChatTemplate | None,
    event_loop: WatchedRunner,
    hosts: Hosts | None = None,
) -> RewardManager | None:
    """A manager that scores by `data.reward`; None if that is unset. `template` is None if episodes have no
    tokens. `hosts` starts the process of the reward role's model; without it, or where Ray isn't used, the
    model is in this process."""
    config = examined.config
    if not config.data.reward:
        return None
    rewards = list(examined.rewards)
    if template is not None:
        rewards = [_decoding(weighted, response_reader(template)) for weighted in rewards]
    if any(judge.chat is None for judge in judges_of(rewards)):
        chat = build_judge(config, placement, event_loop, hosts)
        rewards = [_served(weighted, chat) for weighted in rewards]
    for position, entry in enumerate(config.data.reward):
        if entry.name == "reward_model":
            model = build_reward_model(config, placement, event_loop, hosts)
            rewards.insert(position, WeightedReward(entry.name, entry.weight, model))
    return RewardManager(rewards, config.data.reward_timeout_s, event_loop.watchdog)


def _decoding(weighted: WeightedReward, completion: DecodeCompletion) -> WeightedReward:
    """The reward, which reads responses by `completion` if it is a function of them."""
    reward = weighted.reward
    if not isinstance(reward, FunctionReward):
        return weighted
    return replace(weighted, reward=reward.reading(completion))


def _served(weighted: WeightedReward, chat: ServedChat) -> WeightedReward:
    """The reward; if it is a judge without a model, a copy that asks `chat`, which ends with this run."""
    reward = weighted.reward
    if not isinstance(reward, FunctionReward) or not isinstance(reward.function, Judge):
        return weighted
    if reward.function.chat is not None:
        return weighted
    judge = copy(reward.function)
    judge.chat = chat
    reward = copy(reward)
    reward.function = judge
    return replace(weighted, reward=reward)


def response_reader(template: ChatTemplate) -> DecodeCompletion:
    """A function that returns a trajectory's final answer, without the tokens that begin or end a turn."""

    def read(trajectory: Trajectory) -> str:
        if trajectory.answer is not None:
            return trajectory.answer
        turn = trajectory.final_turn
        ids: list[int] = turn.response_ids.tolist()
        text_ids = ids
        if turn.finish_reason == "stop":
            text_ids = ids[:-1]  # the text of a response lacks its stop token
        if template.turn_token_ids.isdisjoint(text_ids):
            return turn.text
        return template.decode(ids)

    return read
