"""Texts of a model, an environment or a user, as a terminal or a picture may show them."""


def printable(text: str) -> str:
    """The text with unprintable characters escaped, except newlines.

    >>> printable("a\\x1b[2Jb\\n")
    'a\\\\x1b[2Jb\\n'
    """
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)
