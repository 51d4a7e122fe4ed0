"""Checks the models beside the policy that a config uses: judges and users behind a URL, and the reward
role's folder."""

from turnwise.errors import ConfigError, ServerError
from turnwise.examine.examined import Examined
from turnwise.examine.rewards import judges_of
from turnwise.inference.model_user import ModelUser
from turnwise.inference.openai_chat import OpenAIChat


def call_models(examined: Examined) -> None:
    """Sends a request to each model behind a URL that the config uses as a judge or simulated user. Raises
    ConfigError if nobody answers, or the key is refused."""
    chats = [("data.reward judge", judge.chat) for judge in judges_of(examined.rewards)]
    for name, user in examined.users.by_name.items():
        if isinstance(user, ModelUser):
            chats.append((f"the interaction {name}", user.chat))
    for label, chat in chats:
        if isinstance(chat, OpenAIChat):
            try:
                chat.call()
            except ServerError as fault:
                raise ConfigError(f"{label}: {fault}") from fault
