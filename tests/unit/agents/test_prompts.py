"""EnvPrompt: messages from observations."""

from __future__ import annotations

import numpy as np
import pytest

from turnwise.agents.prompts import EnvPrompt
from turnwise.errors import ConfigError
from turnwise.spec import DEFAULT_TURN_TEMPLATE
from turnwise.types import Media, Message, Observation


def messages(prompt: EnvPrompt, text: str, turn_idx: int = 1, **more: str) -> list[Message]:
    return prompt.messages(
        Observation(text), turn_idx=turn_idx, actions_left=5, max_response_length=32, **more
    )


def test_the_first_turn_opens_with_system_message_and_rules_and_later_ones_do_not() -> None:
    prompt = EnvPrompt(
        "Be {brief}.", "[{turn_idx}/{actions_left}/{max_response_length}] {observation}{suffix}"
    )
    assert messages(prompt, "P _ G", env_instruction="Walk.") == [
        {"role": "system", "content": "Be {brief}."},
        {"role": "user", "content": "Walk.\n[1/5/32] P _ G"},
    ]
    assert messages(prompt, "_ P G", turn_idx=2, env_instruction="Walk.", suffix="!") == [
        {"role": "user", "content": "[2/5/32] _ P G!"}
    ]


def test_empty_templates_and_rules_leave_nothing_behind() -> None:
    assert messages(EnvPrompt("", "{observation}"), "P G") == [{"role": "user", "content": "P G"}]


def test_a_template_may_place_the_rules_itself() -> None:
    prompt = EnvPrompt("", "{observation} ({env_instruction})")
    assert messages(prompt, "P G", env_instruction="Walk.")[0]["content"] == "P G (Walk.)"


def test_what_an_environment_returns_is_never_read_as_a_template() -> None:
    hostile = "{turn_idx} {observation.__class__} {0} }{ %s"
    assert messages(EnvPrompt("", "{{x}} {observation}"), hostile)[0]["content"] == "{x} " + hostile


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{observaton}", r"Did you mean 'observation'"),
        ("{observation} {history}", "belongs to mode: step"),
        ("{observation.text}", "isn't a placeholder"),
        ("{observation!r}", "isn't a placeholder|without formats"),
        ("{turn_idx:03d}", "without formats"),
        ('{"action": "Left"}', "twice"),
        ("{observation", "twice"),
        ("{}", "isn't a placeholder"),
    ],
)
def test_a_template_that_cannot_be_filled_is_refused_at_once(template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EnvPrompt("", template)


def test_the_default_template_is_one() -> None:
    assert "P G" in messages(EnvPrompt("", DEFAULT_TURN_TEMPLATE), "P G")[0]["content"]


def test_pictures_come_before_the_text_as_content_parts() -> None:
    picture = np.zeros((2, 2, 3), np.uint8)
    observation = Observation("Look.", (Media("image", picture),))
    [user] = EnvPrompt("", "{observation}").messages(
        observation, turn_idx=1, actions_left=1, max_response_length=1
    )
    assert user["content"] == [{"type": "image", "image": picture}, {"type": "text", "text": "Look."}]
