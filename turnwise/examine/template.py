"""Tries the chat template of a config's policy as a run uses it."""

from itertools import islice
from pathlib import Path
from typing import Any

from turnwise.chat.folder_tokenizer import FolderTokenizer
from turnwise.chat.template import ChatTemplate
from turnwise.chat.tool_calls import find_parser
from turnwise.chat.trial import tried
from turnwise.config import AgenticConfig, SFTConfig
from turnwise.data.prompts import prompt_of
from turnwise.errors import ChatTemplateError
from turnwise.examine.examined import Examined
from turnwise.examine.rows import splits_with_rows
from turnwise.model_files.folder import base_of_adapter, folder_here, has_tokenizer
from turnwise.spec import TOOL_AGENTS


def try_rows_template(examined: Examined) -> None:
    """Tries the template of a policy that plays rows: its variables, the parser of tool calls, the first
    prompt with tools, and whether any prompt leaves room for a response. Raises the TurnwiseError of the
    first fault."""
    config = examined.config
    template = examined.policy().template
    len(template.stop_token_ids)  # asks how it ends a turn
    schemas = examined.tools.schemas
    for split in splits_with_rows(config):
        rows = examined.rows(split).rows
        with_tools = (row.payload for _, row in rows if row.agent in TOOL_AGENTS)
        for columns in islice(with_tools, 1):
            template.start(prompt_of(columns, config.data.prompt_key, schemas), schemas)
        examined.prompt_limit(split).require_one(rows)
    if schemas:
        find_parser(config.agent.tool_parser, template)


def try_template(config: AgenticConfig | SFTConfig, folder: Path) -> None:
    """Renders the template in `folder` with messages like those of demonstrations or environments, without
    transformers. Raises ChatTemplateError for a fault."""
    if not has_tokenizer(folder):
        base = base_of_adapter(folder)
        base_folder = None if base is None else folder_here(base)
        if base_folder is not None:
            try_template(config, base_folder)
        return
    tokenizer: Any = FolderTokenizer(folder)
    template = tried(ChatTemplate(tokenizer, template_kwargs=config.template_kwargs))
    template.opens_thinking  # noqa: B018  # renders one turn after another
    if isinstance(config, SFTConfig):
        return
    for tag in config.train_env_manager.env_tags:
        env = config.custom_envs[tag]
        if env.agent_name == "env_agent" and env.agent_system_template:
            messages = [
                {"role": "system", "content": env.agent_system_template},
                {"role": "user", "content": "a"},
            ]
            try:
                template.renderer.shown((), messages)
            except ChatTemplateError as error:
                raise ChatTemplateError(f"custom_envs.{tag}.agent_system_template: {error}") from error
