"""The chat template of a model folder, rendered without transformers, which takes seconds to import."""

from pathlib import Path
from typing import Any

from turnwise.chat.message_content import Messages
from turnwise.chat.rendering import GENERATION_TAG
from turnwise.chat.trial_program import environment
from turnwise.model_files.folder import read_object


class FolderTokenizer:
    """Stands in for a model folder's tokenizer where `ChatTemplate` only renders texts: it can't encode or
    decode. Raises ModelError if tokenizer_config.json can't be read."""

    is_fast = False
    eos_token_id = None

    def __init__(self, folder: Path) -> None:
        settings = folder / "tokenizer_config.json"
        values = read_object(settings) if settings.is_file() else {}
        configured = values.get("chat_template")
        if isinstance(configured, list):
            entries = [entry for entry in configured if isinstance(entry, dict)]
            configured = {entry.get("name"): entry.get("template") for entry in entries}
        in_files = _templates_in_files(folder)
        # An empty file is a template, and hides the one of the config.
        self.chat_template = configured if in_files is None or in_files == {} else in_files
        self.name_or_path = str(folder)
        self.special_tokens_map: dict[str, str] = {}
        for key, value in values.items():
            if isinstance(value, dict):
                value = value.get("content")
            if key.endswith("_token") and isinstance(value, str):
                self.special_tokens_map[key] = value

    def apply_chat_template(
        self,
        messages: Messages,
        tools: Any,
        chat_template: str | None,
        tokenize: bool,
        **variables: Any,
    ) -> str:
        """The rendered messages as text. `tokenize` must be False, since there is no vocabulary."""
        source: Any = chat_template or self.chat_template
        if isinstance(source, dict):
            name = "tool_use" if tools is not None and "tool_use" in source else "default"
            source = source[name]
        template = environment().from_string(GENERATION_TAG.sub("", source))
        variables = {**self.special_tokens_map, **variables}
        return template.render(messages=messages, tools=tools, **variables)


def _templates_in_files(folder: Path) -> str | dict[str, str]:
    """The text of the only template, or the texts by their names."""
    files = {"default": folder / "chat_template.jinja"}
    for file in (folder / "additional_chat_templates").glob("*.jinja"):
        files[file.stem] = file
    texts: dict[str, str] = {}
    for name, file in files.items():
        if file.is_file():
            texts[name] = file.read_text(encoding="utf-8", errors="replace")
    if texts.keys() == {"default"}:
        return texts["default"]
    return texts
