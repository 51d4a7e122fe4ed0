"""The chat template of a model folder, rendered without transformers, which takes seconds to import."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnwise.chat.rendering import GENERATION_TAG
from turnwise.chat.trial_program import environment
from turnwise.model_files.folder import read_object
from turnwise.types import Message


class FolderTokenizer:
    """Stands in for a model folder's tokenizer where `ChatTemplate` only renders texts: it can't encode or
    decode. Raises ModelError if tokenizer_config.json can't be read."""

    is_fast = False
    eos_token_id = None

    def __init__(self, folder: Path) -> None:
        settings, more = (
            folder / "tokenizer_config.json",
            (folder / "additional_chat_templates").glob("*.jinja"),
        )
        files = {"default": folder / "chat_template.jinja", **{file.stem: file for file in more}}
        own = {
            name: file.read_text(encoding="utf-8", errors="replace")
            for name, file in files.items()
            if file.is_file()
        }
        values = read_object(settings) if settings.is_file() else {}
        named = values.get("chat_template")
        if isinstance(named, list):
            named = {one.get("name"): one.get("template") for one in named if isinstance(one, dict)}
        self.chat_template = own["default"] if own.keys() == {"default"} else own or named
        self.name_or_path = str(folder)
        tokens = {key: value for key, value in values.items() if key.endswith("_token")}
        contents = {
            key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()
        }
        self.special_tokens_map = {key: value for key, value in contents.items() if isinstance(value, str)}

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Any,
        chat_template: str | None,
        tokenize: bool,
        **variables: Any,
    ) -> str:
        """The rendered messages as text. `tokenize` must be False, since there is no vocabulary."""
        source: Any = chat_template or self.chat_template
        if isinstance(source, dict):
            source = source["tool_use"] if tools is not None and "tool_use" in source else source["default"]
        template = environment().from_string(GENERATION_TAG.sub("", source))
        return template.render(messages=messages, tools=tools, **{**self.special_tokens_map, **variables})
