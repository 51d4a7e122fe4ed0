"""The tags with which the header of a response opens thinking, or turns thinking off."""

import re

_OPENED = re.compile(r"<(?!/|\W*end)[^<>]*think[^<>/]*>\s*\Z", re.IGNORECASE)
_CLOSED = re.compile(
    r"<(?!/|\W*end)[^<>]*think[^<>/]*>\s*<(?=/|\W*end)[^<>]*think[^<>/]*>\s*\Z", re.IGNORECASE
)
_CHANNEL_CLOSED = re.compile(r"<\|channel>thought\s*<channel\|>\s*\Z")
_TAG = re.compile("</?think>")
_TAGS = re.compile(r"\A(?:\s*<[^<>]*think[^<>]*>)+\s*", re.IGNORECASE)


def opened_by(header: str) -> str:
    """The tag with which a response's header opens thinking, with the white space after the tag; "" if it
    opens none."""
    tag = _OPENED.search(header)
    if tag is None:
        return ""
    return tag.group()


def closed_by(header: str) -> str:
    """The empty thinking with which a response's header turns thinking off; "" if it has none."""
    tags = _CLOSED.search(header) or _CHANNEL_CLOSED.search(header)
    if tags is None:
        return ""
    return tags.group()


def thinking_and_answer(text: str) -> list[str]:
    """The texts between thinking tags.

    >>> thinking_and_answer("<think>Well</think>Left")
    ['', 'Well', 'Left']
    """
    return _TAG.split(text)


def split_thinking(text: str, is_opened: bool) -> tuple[str, str]:
    """The thinking at the beginning of a response, with its tags, and the text after it. `is_opened`: whether
    the response's header has opened the thinking. Thinking that isn't closed is the whole text.

    >>> split_thinking("<think>Well</think>Left", is_opened=False)
    ('<think>Well</think>', 'Left')
    >>> split_thinking("Left", is_opened=False)
    ('', 'Left')
    """
    thinking, closing, answer = text.partition("</think>")
    if closing or is_opened or text.lstrip().startswith("<think>"):
        return thinking + closing, answer
    return "", text


def is_thinking_tag(token: str) -> bool:
    """Whether a token marks thinking, such as `<think>` or `<|START_THINKING|>`."""
    name = token.lower()
    return any(word in name for word in ("think", "thought", "reason"))


def without_tags(text: str) -> str:
    """The text without thinking tags at its beginning."""
    return _TAGS.sub("", text)


def behind_header(text: str, header: str) -> str | None:
    """What `text` says behind the header of a response. Where the header opens thinking, the text may have
    other white space after the tag; where it turns thinking off, the text may have no thinking at all. None
    if the text has another header.

    >>> behind_header("assistant: <think>Well</think>Left", "assistant: <think>\\n")
    'Well</think>Left'
    >>> behind_header("assistant: Left", "assistant: <think></think>")
    'Left'
    """
    if text.startswith(header):
        return text.removeprefix(header)
    opened = opened_by(header)
    closed = closed_by(header)
    base = header.removesuffix(opened or closed)
    if base == header or not text.startswith(base):
        return None
    response = text.removeprefix(base)
    if closed:
        has_thinking = without_tags(response) != response
        return None if has_thinking else response
    tag = opened.strip()
    if not response.startswith(tag):
        return None
    return response.removeprefix(tag).lstrip()
