"""Messages between two processes, with large arrays beside them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Pipe
from typing import Any

import numpy as np
import pytest
import torch

from turnwise.cluster.messages import pack, unpack
from turnwise.cluster.wire import ConnectionWire, Message

LARGE = 2**18  # bytes: more than a socket takes at once


def arrived(value: Any) -> Any:
    """What another process would get."""
    ours, theirs = map(ConnectionWire, Pipe())
    with ThreadPoolExecutor(1) as thread:
        received = thread.submit(theirs.receive)
        ours.send(pack(value))
        message = received.result(timeout=30)
    ours.close()
    theirs.close()
    return unpack(message)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(LARGE, dtype=np.int64),
        np.arange(LARGE, dtype=np.float32).reshape(-1, 64),
        np.asfortranarray(np.arange(LARGE, dtype=np.float32).reshape(-1, 64)),
        np.arange(2 * LARGE, dtype=np.int16)[::2],
        np.zeros((0, 3), np.float32),
        np.arange(7, dtype=np.float64),
        np.array(["text"] * LARGE, dtype=object),
        np.zeros(LARGE, np.dtype([("a", np.int8), ("b", np.float64)])),
    ],
    ids=["large", "two axes", "by columns", "not contiguous", "empty", "small", "objects", "records"],
)
def test_arrays_of_any_kind_arrive_whole(array: np.ndarray) -> None:
    copy = arrived({"first": 1, "array": array, "last": [2.5]})
    assert (copy["first"], copy["last"]) == (1, [2.5])
    assert copy["array"].dtype == array.dtype and copy["array"].shape == array.shape
    assert (copy["array"] == array).all()
    assert copy["array"].flags.writeable


def test_what_may_not_be_written_stays_so_and_what_is_one_array_stays_one() -> None:
    array = np.arange(LARGE)
    array.flags.writeable = False
    first, second = arrived([array, array])
    assert first is second and not first.flags.writeable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_large_tensors_are_copies_that_can_be_changed(dtype: torch.dtype) -> None:
    tensor = torch.ones(LARGE, dtype=dtype)
    copy = arrived(tensor)
    copy[0] = 0
    assert torch.equal(copy[1:], tensor[1:]) and tensor[0] == 1 and copy.dtype == dtype


def test_only_large_arrays_travel_beside_the_message() -> None:
    array = np.zeros(LARGE, np.uint8)
    message = pack([array, np.zeros(10)])
    assert [buffer.nbytes for buffer in message.buffers] == [LARGE] and len(message.content) < 1000
    array[0] = 1
    assert message.buffers[0][0] == 1, "nothing is copied before it is sent"


def test_messages_of_several_threads_do_not_mix() -> None:
    ours, theirs = map(ConnectionWire, Pipe())
    num_messages = 20

    def send(number: int) -> None:
        for _ in range(num_messages):
            ours.send(pack((number, np.full(LARGE, number, np.uint8))))
            ours.send(Message(b"log"))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    messages = [theirs.receive() for _ in range(2 * 3 * num_messages)]
    for thread in threads:
        thread.join()
    numbers = []
    for message in messages:
        if message.content != b"log":
            number, array = unpack(message)
            assert (array == number).all()
            numbers.append(number)
    assert sorted(numbers) == sorted([0, 1, 2] * num_messages)


def test_an_end_in_the_middle_of_a_message_is_an_end() -> None:
    ours, theirs = Pipe()
    size = (100).to_bytes(8, "little")
    ours.send_bytes(b"buf" + (1).to_bytes(4, "little") + size + b"content")
    ours.close()
    with pytest.raises(EOFError):
        ConnectionWire(theirs).receive()
