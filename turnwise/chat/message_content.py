"""Reads the parts of messages: their images, and the text of the last one."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from turnwise.types import Media, Message


def media_of(messages: Sequence[Message]) -> tuple[Media, ...]:
    """The images in the messages' parts `{"type": "image", "image": Media or uint8 [H, W, 3]}`, in order."""
    images = [part.get("image") for part in _parts(messages) if part.get("type") == "image"]
    return tuple(
        image if isinstance(image, Media) else Media("image", np.asarray(image, np.uint8)) for image in images
    )


def text_of_last(messages: Sequence[Message]) -> str:
    """The text of the last message; "" if there is none."""
    if not messages:
        return ""
    content = messages[-1]["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in _parts(messages[-1:]))


def _parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [
        part
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
    ]
