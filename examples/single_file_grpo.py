"""GRPO on FrozenLake in one file: what turnwise does, said as plainly as it can be.

    python examples/frozen_lake/quickstart.py && python examples/single_file_grpo.py runs/quickstart/sft_model
    --steps 3

It needs torch, transformers and the environment, and nothing else of turnwise. From the same model and seed
it samples the very tokens of `turnwise train examples/frozen_lake/agentic.yaml max_steps=3`, and its losses
agree with the library's to 1e-5 (tests/parity/test_single_file.py). Read it to learn what the library does,
or to check that it does nothing else.

It plays one episode after another and trains on one sequence at a time. So there is no padding, no mask
between sequences and no scheduler to understand, and it is several times slower. That large batches give the
same numbers is the library's claim.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor
from torch.optim import AdamW
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from turnwise.envs.frozen_lake.env import FrozenLakeEnv


@dataclass(frozen=True)
class Settings:
    """The values of examples/frozen_lake/agentic.yaml, and of the library's defaults where that file is
    silent."""

    steps: int = 80
    seed: int = 42
    # One batch of episodes: `group_size` of them for each of `num_groups` tasks.
    num_groups: int = 16
    group_size: int = 8
    # An episode: how large the lake is, and how much the model may say.
    lake_size: int = 4
    max_turns: int = 10
    max_tokens_per_turn: int = 8
    sequence_length: int = 512
    system_prompt: str = "Walk to the goal G and avoid the holes O."
    temperature: float = 1.0
    # The loss.
    clip: float = 0.2
    dual_clip: float = 3.0
    entropy_coef: float = 0.005
    # The optimiser: AdamW, one step for every `samples_per_step` episodes.
    samples_per_step: int = 128
    learning_rate: float = 3e-4
    warmup_steps: int = 5
    adam_beta2: float = 0.95
    max_grad_norm: float = 1.0

    @property
    def num_optimizer_steps(self) -> int:
        """Optimiser steps of the whole run; the last one of a batch may have fewer samples than the
        others."""
        return self.steps * -(-self.num_groups * self.group_size // self.samples_per_step)


# Chance: every random choice is a hash of what it is for, never the next number of a generator that others
# draw from too. So it depends neither on the order in which things happen nor on what else is going on.


def derive_seed(*parts: str | int) -> int:
    """A seed from a stable hash of its parts, the same in every process."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def splitmix64(x: int) -> int:
    """The output function of SplitMix64 (Steele, Lea & Flood 2014): scrambles 64 bits."""
    x %= 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that decides token `index` of the response with this seed."""
    golden = 0x9E3779B97F4A7C15
    return (splitmix64(splitmix64(seed + golden) + (index + 1) * golden) >> 40) / 2**24


# Text and tokens: encoding doesn't undo decoding, since the model may spell a word in tokens that no
# tokenizer would choose. If the history were rendered as text and encoded anew, the model would be trained on
# tokens that it never sampled. So a context only grows: between a response and the next one what is missing
# is encoded and appended, and nothing else is touched.


class Chat:
    """Writes prompts as token ids with the model's own chat template, and reads responses."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        self.tokenizer = tokenizer
        self.end_of_turn = self.following([], "")[0]
        eos = model.generation_config.eos_token_id
        self.stop_ids = {self.end_of_turn, tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}

    def first(self, system: str, observation: str) -> list[int]:
        """The prompt of the first response."""
        return self.encode(self.render(("system", system), ("user", observation)))

    def following(self, response: list[int], observation: str) -> list[int]:
        """What stands between a response and the next one: the end of its turn, the observation, the next
        turn's header.

        The template renders a short made-up conversation, whose part behind a marker is exactly that.
        """
        ids = self.encode(
            self.render(("user", "a"), ("assistant", "MARKER"), ("user", observation)).partition("MARKER")[2]
        )
        # Most responses have sampled the token that ends their turn; one that ran out of its budget hasn't.
        return ids[1:] if response and response[-1] == self.end_of_turn else ids

    def action(self, response: list[int]) -> str:
        """The action in a response, outside of thoughts; "" where there is none, which the environment takes
        as invalid."""
        text = self.tokenizer.decode(
            response, skip_special_tokens=True, clean_up_tokenization_spaces=False
        ).lower()
        text = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL).rpartition("</think>")[2]
        found = re.search(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
        return found.group(1).strip() if found and "<think>" not in text else ""

    def render(self, *turns: tuple[str, str]) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


# Rollouts


@dataclass
class Episode:
    """One episode as the model saw it: lists with one entry for each token of its context, and what came of
    it."""

    ids: list[int] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    """True for the model's own tokens, the only ones that are trained on; False for prompts and
    observations."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probs of the sampled tokens when they were sampled, for comparison; 0 elsewhere."""
    score: float = 0.0
    advantage: float = 0.0
    old_logprobs: Tensor | None = None
    """Log-probs [R] of the sampled tokens under the policy before this batch changed it."""

    def append(self, token: int, is_sampled: bool = False, logprob: float = 0.0) -> None:
        self.ids.append(token)
        self.is_sampled.append(is_sampled)
        self.logprobs.append(logprob)


@torch.no_grad()
def play(model: PreTrainedModel, chat: Chat, task_seed: int, sibling: int, settings: Settings) -> Episode:
    """Plays one task to its end. Siblings meet the same lake, and differ in the tokens that they draw."""
    env = FrozenLakeEnv(
        settings.lake_size, is_slippery=False, observation="coordinates", env_instruction="", split="train"
    )
    observation, _ = env.reset(seed=task_seed)
    seed = derive_seed(derive_seed(task_seed, "tokens", sibling), "context", 0)
    # Keys and values of all tokens so far. They stay valid for the whole episode, because the context only
    # grows.
    cache = DynamicCache()
    episode, response = Episode(), []
    for turn in range(settings.max_turns):
        prompt = (
            chat.following(response, observation) if turn else chat.first(settings.system_prompt, observation)
        )
        room = settings.sequence_length - len(episode.ids) - len(prompt)
        if room < 1:
            break
        for token in prompt:
            episode.append(token)
        budget = min(settings.max_tokens_per_turn, room)
        response = respond(model, chat, episode, cache, derive_seed(seed, turn), budget, settings.temperature)
        observation, reward, is_terminated, is_truncated, _ = env.step(chat.action(response))
        episode.score += reward
        if is_terminated or is_truncated:
            break
    return episode


def respond(
    model: PreTrainedModel,
    chat: Chat,
    episode: Episode,
    cache: DynamicCache,
    seed: int,
    budget: int,
    temperature: float,
) -> list[int]:
    """Samples tokens onto the episode until one ends the turn or the budget is spent, and returns them."""
    response: list[int] = []
    while len(response) < budget and not (response and response[-1] in chat.stop_ids):
        unseen = episode.ids[cache.get_seq_length() :]
        logits = model(torch.tensor([unseen]), past_key_values=cache).logits[0, -1]
        logprobs = torch.log_softmax(logits / temperature, -1)
        # The tokens' probabilities lie side by side; the one that the random number falls into is drawn.
        cumulative = logprobs.exp().cumsum(-1)
        threshold = uniform(seed, len(response)) * cumulative[-1]
        token = int(torch.searchsorted(cumulative, threshold, right=True))
        episode.append(token, True, logprobs[token].item())
        response.append(token)
    return response


# Credit


def group_advantages(scores: Tensor) -> Tensor:
    """How much better each episode was than its siblings, in their standard deviations (Shao et al. 2024).

    `scores` [groups, siblings]. Where all siblings score the same nothing can be learnt from comparing them:
    0.
    """
    std = scores.std(-1, keepdim=True)
    return torch.where(std > 1e-6, (scores - scores.mean(-1, keepdim=True)) / (std + 1e-6), 0.0)


# Training: R is the number of sampled tokens of an episode.


def forward(model: PreTrainedModel, episode: Episode, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs [R] of the sampled tokens, and entropies [R] of the distributions that they were drawn from.

    The temperature is the sampler's, since that distribution is the policy whose actions are judged.
    """
    ids, is_sampled = torch.tensor(episode.ids), torch.tensor(episode.is_sampled)
    # The output at position t − 1 is what predicts token t.
    logits = model(ids[None]).logits[0, :-1][is_sampled[1:]] / temperature
    logprobs = torch.log_softmax(logits, -1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, ids[is_sampled][:, None])[:, 0], entropies


def ppo_loss(logprobs: Tensor, episode: Episode, settings: Settings) -> Tensor:
    """Losses [R] of single tokens (Schulman et al. 2017): no reward for leaving [1 − clip, 1 + clip] in the
    good direction.

    That leaves a bad token whose probability has *grown* with an unbounded loss; `dual_clip` bounds it (Ye et
    al. 2020).
    """
    advantage, ratio = episode.advantage, (logprobs - episode.old_logprobs).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - settings.clip, 1 + settings.clip) * advantage)
    return -gain.clamp(min=settings.dual_clip * advantage) if advantage < 0 else -gain


def optimizer_step(
    model: PreTrainedModel, optimizer: AdamW, episodes: list[Episode], settings: Settings
) -> dict[str, float]:
    """One step of AdamW on all of the episodes.

    Each loss is divided by the sampled tokens of the *whole* step, so that every token counts the same and it
    doesn't matter how the step is cut into forward passes. A mean over means would weigh the tokens of short
    episodes more.
    """
    num_tokens = sum(sum(episode.is_sampled) for episode in episodes)
    total = {"pg_loss": 0.0, "entropy": 0.0}
    for episode in episodes:
        logprobs, entropies = forward(model, episode, settings.temperature)
        pg_loss = ppo_loss(logprobs, episode, settings).sum() / num_tokens
        entropy = entropies.sum() / num_tokens
        (pg_loss - settings.entropy_coef * entropy).backward()  # gradients add up until the step is taken
        total["pg_loss"] += pg_loss.item()
        total["entropy"] += entropy.item()
    total["grad_norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm).item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def learning_rate(num_done: int, settings: Settings) -> float:
    """Up to the peak in `warmup_steps` optimiser steps, then down in a straight line that reaches 0 after the
    last one."""
    if num_done < settings.warmup_steps:
        return settings.learning_rate * num_done / settings.warmup_steps
    left, decaying = (
        settings.num_optimizer_steps - num_done,
        settings.num_optimizer_steps - settings.warmup_steps,
    )
    return settings.learning_rate * left / max(decaying, 1)


# The loop


def train(
    model: PreTrainedModel, chat: Chat, settings: Settings
) -> Iterator[tuple[list[Episode], dict[str, float]]]:
    """Plays, gives credit, trains; `settings.steps` times. Changes the model in place.

    Yields the episodes of each step in the order of their tasks, and its metrics as means over its optimiser
    steps.
    """
    optimizer = AdamW(model.parameters(), betas=(0.9, settings.adam_beta2), weight_decay=0.0)
    num_done = 0
    for step in range(settings.steps):
        # 1. Rollouts: the policy that plays is the one that is about to be trained.
        tasks = [
            derive_seed(settings.seed, "train", "FrozenLake", group, step, 0)
            for group in range(settings.num_groups)
        ]
        siblings = range(settings.group_size)
        groups = [[play(model, chat, task, sibling, settings) for sibling in siblings] for task in tasks]
        episodes = [episode for group in groups for episode in group]

        # 2. Credit: one number an episode, shared by all of its tokens.
        scores = torch.tensor([[episode.score for episode in group] for group in groups], dtype=torch.float64)
        for episode, advantage in zip(episodes, group_advantages(scores).flatten().tolist(), strict=True):
            episode.advantage = advantage

        # 3. Log-probs before the update, by the trainer's own forward pass, so that the ratio compares like
        # with like.
        for episode in episodes:
            with torch.no_grad():
                episode.old_logprobs, _ = forward(model, episode, settings.temperature)

        # 4. The update: the episodes in a seeded order, cut into optimiser steps.
        shuffle = derive_seed(
            "optimizer_steps", derive_seed(settings.seed, "actor_train", "shuffle", step), 0
        )
        order = np.random.default_rng(shuffle).permutation(len(episodes)).tolist()
        results = []
        for start in range(0, len(order), settings.samples_per_step):
            optimizer.param_groups[0]["lr"] = learning_rate(num_done, settings)
            chosen = [episodes[index] for index in order[start : start + settings.samples_per_step]]
            results.append(optimizer_step(model, optimizer, chosen, settings))
            num_done += 1
        metrics = {name: sum(result[name] for result in results) / len(results) for name in results[0]}
        yield episodes, {"score": scores.mean().item(), **metrics}


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on FrozenLake in one file.")
    parser.add_argument(
        "model_dir", help="a Hugging Face model folder, such as the one that `make quickstart` fine-tunes"
    )
    for setting in fields(Settings):
        parser.add_argument(
            f"--{setting.name.replace('_', '-')}", type=type(setting.default), default=setting.default
        )
    options = vars(parser.parse_args())
    model = AutoModelForCausalLM.from_pretrained(options["model_dir"], dtype=torch.float32).eval()
    chat = Chat(AutoTokenizer.from_pretrained(options.pop("model_dir")), model)
    for step, (episodes, metrics) in enumerate(train(model, chat, Settings(**options))):
        num_tokens = sum(sum(episode.is_sampled) for episode in episodes)
        numbers = "  ".join(f"{name} {value:8.5f}" for name, value in metrics.items())
        print(f"step {step:3}  {numbers}  sampled tokens {num_tokens}", flush=True)


if __name__ == "__main__":
    main()
