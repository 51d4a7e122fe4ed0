"""Reads what a policy's folder says of itself, without its weights. Imports transformers."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from turnwise.chat.template import ChatTemplate
from turnwise.chat.trial import tried
from turnwise.config import AgenticConfig
from turnwise.models.load import load_tokenizer, policy_info
from turnwise.runtime.info import PolicyInfo


@dataclass(frozen=True, slots=True)
class PolicyFiles:
    """The description, tokenizer and chat template of a model's folder."""

    info: PolicyInfo
    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate


def read_policy(config: AgenticConfig, path: str) -> PolicyFiles:
    """Reads the policy at `path`, a folder or hub name, with the config's dtype, context and template
    variables. Raises ModelError or ChatTemplateError for a fault in its files."""
    arguments = config.actor_train.model_args
    dtype = config.actor_infer.model_args.dtype
    tokenizer = load_tokenizer(path, arguments.trust)
    info = policy_info(
        path,
        dtype,
        config.sequence_length,
        arguments.attn_implementation,
        arguments.trust,
    )
    template = ChatTemplate(
        tokenizer, template_kwargs=config.template_kwargs, eos_token_ids=info.stop_token_ids
    )
    return PolicyFiles(info, tokenizer, tried(template))
