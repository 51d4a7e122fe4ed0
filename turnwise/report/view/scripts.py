"""Data as classic script files: a page that was opened from disk may load these, and nothing else."""

import json
from typing import Any

from turnwise.report.view.step_data import finite


def script(function: str, *arguments: Any) -> bytes:
    """A script that calls `turnwise.FUNCTION` with the arguments, each a text of JSON. In a text of
    JavaScript, no name is special, such as `__proto__` is in an object.

    >>> script("step", 3, {"text": "it's </script>"}).decode()
    'turnwise.step(\\'3\\',\\'{"text":"it\\\\\\'s </script>"}\\');\\n'
    """
    quoted = [_quoted(_json(argument)) for argument in arguments]
    # A text may have lone surrogates, which UTF-8 can't encode.
    return f"turnwise.{function}({','.join(quoted)});\n".encode(errors="replace")


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(finite(value), ensure_ascii=False, separators=(",", ":"))


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
