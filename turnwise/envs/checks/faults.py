"""Findings on one call: calls that broke, episodes that differ, and the picture of `render`."""

from typing import Any

import numpy as np

from turnwise.envs.checks.checked_env import BrokenCall
from turnwise.envs.checks.findings import Finding
from turnwise.envs.contract import is_picture


def broken_call(broken: BrokenCall) -> Finding:
    advice = ""
    if broken.hangs:
        advice = "give it its own time limit, or allow more with --timeout (env_step_timeout_s in training)"
    elif broken.is_raised and broken.method == "step":
        advice = "an exception fails the episode: answer with an observation, or with terminated"
    elif broken.is_raised:
        advice = "an exception there fails every episode"
    return Finding(broken.method, "error", broken.problem, advice, broken.trace)


def different_episodes(check: str, problem: str, difference: tuple[str, str], advice: str) -> Finding:
    """The finding on a `first_difference` of two episodes that should be the same."""
    name, description = difference
    if name == "state_key":
        advice = (
            "make the key of the state's content, not of an object or a counter: GiGPO compares turns "
            "with equal keys"
        )
    return Finding(check, "error", f"{problem}, {description}", advice)


def picture(rendered: Any) -> Finding:
    """Whether `render` returned a picture, a string, or None."""
    if rendered is None:
        return Finding("render", "ok", "draws nothing: pictures show the observation")
    if isinstance(rendered, str):
        return Finding("render", "ok", f"a string of {len(rendered.splitlines())} lines")
    if is_picture(rendered):
        height, width, _ = rendered.shape
        return Finding("render", "ok", f"a picture of {width} × {height}")
    shape = type(rendered).__name__
    if isinstance(rendered, np.ndarray):
        shape = f"{rendered.dtype} {list(rendered.shape)}"
    return Finding("render", "warning", f"returns {shape}", "return uint8 [H, W, 3], a string, or None")
