"""Which GPUs the processes of an inference engine see."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_NAME = "CUDA_VISIBLE_DEVICES"


@contextmanager
def only_visible(devices: Sequence[str], count: int) -> Iterator[None]:
    """In this context, new processes see `count` GPUs: the `devices` (torch's names) in their order, or the
    ones from the first on if only that is named. Nothing changes if it isn't a GPU."""
    outer = os.environ.get(_NAME)
    if not devices[0].startswith("cuda"):
        yield
        return
    os.environ[_NAME] = visible(devices, count, outer)
    try:
        yield
    finally:
        del os.environ[_NAME]
        if outer is not None:
            os.environ[_NAME] = outer


def visible(devices: Sequence[str], count: int, outer: str | None) -> str:
    """The value of CUDA_VISIBLE_DEVICES. Devices are counted among those that its outer value names.

    >>> visible(("cuda:4", "cuda:6"), 2, None), visible(("cuda:1",), 2, "7,5,3")
    ('4,6', '5,3')
    """
    numbers = [int(device.partition(":")[2] or 0) for device in devices]
    if len(numbers) != count:
        numbers = list(range(numbers[0], numbers[0] + count))
    if not outer:
        return ",".join(map(str, numbers))
    names = outer.split(",")
    return ",".join(names[number] for number in numbers if number < len(names))
