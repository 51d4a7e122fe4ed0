"""Checks the model of the `reward` role without loading its weights. Imports transformers."""

from turnwise.chat.template import ChatTemplate
from turnwise.chat.trial import tried
from turnwise.config import AgenticConfig
from turnwise.errors import ModelError
from turnwise.models.load import load_tokenizer
from turnwise.models.value_head import num_labels_here
from turnwise.types import Message

NO_HEAD = (
    "has no score head, so it would give every response the same score; name a sequence classifier "
    "with one label"
)
"""What is wrong with a reward model that has no head."""


def check_reward_role(config: AgenticConfig) -> None:
    """Checks the tokenizer, chat template and score head of the reward role's model without loading its
    weights. The model's folder must be on this machine. Raises ModelError or ChatTemplateError for a
    fault."""
    arguments = config.reward.model_args
    path = arguments.model_name_or_path
    trust = arguments.trust
    template = tried(ChatTemplate(load_tokenizer(path, trust)))
    messages: list[Message] = [{"role": "user", "content": "a"}]
    if not any(entry.name == "reward_model" for entry in config.data.reward):
        template.renderer.render(messages, opens_answer=True)
        return
    messages.append({"role": "assistant", "content": "b"})
    template.renderer.render(messages, opens_answer=False)
    num_labels = num_labels_here(path, trust)
    if num_labels in (1, None):
        return
    fault = f"its score head has {num_labels} labels; name a classifier with one label"
    if num_labels == 0:
        fault = NO_HEAD
    raise ModelError(f"reward_pretrain {path}: {fault}")
