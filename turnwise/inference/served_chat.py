"""Chat completions of a model that this run serves, like `OpenAIChat` for a model behind a URL."""

from collections.abc import Sequence
from itertools import count

from turnwise.chat.conversation import TextAnswer, TokenConversation
from turnwise.chat.template import ChatTemplate
from turnwise.errors import ServerError
from turnwise.protocols import PolicyServer
from turnwise.types import Message, SamplingParams


class ServedChat:
    """A model behind a server of this run, with a context of `max_length` tokens. `url` names it in error
    messages."""

    def __init__(
        self,
        template: ChatTemplate,
        server: PolicyServer,
        url: str,
        max_length: int,
    ) -> None:
        self._template = template
        self._server = server
        self.url = url
        self._max_length = max_length
        self._numbers = count()

    async def complete(self, messages: Sequence[Message], sampling: SamplingParams) -> TextAnswer:
        """The model's answer to a conversation. Raises ServerError if the conversation leaves no room for an
        answer, or the server can't serve it; ChatTemplateError if the model's chat template refuses the
        messages."""
        name = f"{self.url} {next(self._numbers)}"
        conversation = TokenConversation(
            self._template,
            self._server,
            name,
            sampling,
            self._max_length,
            opens_episode=False,
        )
        try:
            reply = await conversation.generate(messages)
        finally:
            await conversation.close()
        if reply is None:
            raise ServerError(
                f"{self.url}: a conversation leaves no room for an answer in {self._max_length} tokens"
            )
        turn = conversation.turns[-1]
        return TextAnswer(turn.text, turn.finish_reason, turn.generate_s)
