"""Which GPUs the processes of an inference engine see."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_NAME = "CUDA_VISIBLE_DEVICES"


@contextmanager
def only_visible(devices: Sequence[str], count: int) -> Iterator[None]:
    """In this context, new processes see `count` GPUs: the `devices` (torch's names) in their order, or the
    ones from the first on if only that is named. Nothing changes if it isn't a GPU."""
    before = os.environ.get(_NAME)
    if not devices[0].startswith("cuda"):
        yield
        return
    os.environ[_NAME] = visible(devices, count, before)
    try:
        yield
    finally:
        del os.environ[_NAME]
        if before is not None:
            os.environ[_NAME] = before


def visible(devices: Sequence[str], count: int, before: str | None) -> str:
    """The value of CUDA_VISIBLE_DEVICES. Devices are counted among those that its value `before` names.

    >>> visible(("cuda:4", "cuda:6"), 2, None), visible(("cuda:1",), 2, "7,5,3")
    ('4,6', '5,3')
    """
    numbers = [int(device.partition(":")[2] or 0) for device in devices]
    if len(numbers) != count:
        numbers = list(range(numbers[0], numbers[0] + count))
    if not before:
        return ",".join(map(str, numbers))
    names = before.split(",")
    return ",".join(names[number] for number in numbers if number < len(names))
