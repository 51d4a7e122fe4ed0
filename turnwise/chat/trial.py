"""Tests in another process whether rendering with a chat template ends: in this process nothing could stop an
endless loop."""

import json
import logging
import signal
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from turnwise.chat.rendering import GENERATION_TAG
from turnwise.chat.template import ChatTemplate
from turnwise.errors import ChatTemplateError

logger = logging.getLogger(__name__)

CPU_S = 5
"""Limit of the processor time in seconds; a usual template takes 0.1 s."""
_WALL_S = 60.0
_BYTES = 2 * 2**30
_PROGRAM = Path(__file__).with_name("trial_program.py")


def tried(template: ChatTemplate) -> ChatTemplate:
    """Returns the template after another process has rendered conversations of up to 100 turns with it.
    Raises ChatTemplateError, which names the template's file, if rendering doesn't end or takes too much
    memory."""
    renderer = template.renderer
    sources = [GENERATION_TAG.sub("", source) for source in renderer.sources()]
    task = {
        "sources": sources,
        "variables": renderer.variables,
        "cpu_s": CPU_S,
        "num_bytes": _BYTES,
    }
    if fault := _fault(json.dumps(task, default=str)):
        raise ChatTemplateError(
            f"{renderer.label} {fault} on conversations of up to 100 turns: it seems to loop; fix it, or "
            "give the model another chat template"
        )
    return template


@lru_cache(maxsize=64)
def _fault(task: str) -> str:
    try:
        process = subprocess.run(
            [sys.executable, "-P", str(_PROGRAM)],
            input=task,
            capture_output=True,
            text=True,
            timeout=_WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"doesn't end within {_WALL_S:g} s"
    except OSError as error:
        logger.warning("the chat template could not be tried in its own process: %s", error)
        return ""
    if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"doesn't end within {CPU_S} s of computing"
    if "MemoryError" in process.stderr:
        return f"takes more than {_BYTES // 2**30} GiB"
    if process.returncode:
        # A template that isn't valid Jinja is refused at its first use.
        _, _, last_line = process.stderr.strip().rpartition("\n")
        logger.warning("the chat template could not be tried: %s", last_line)
    return ""
