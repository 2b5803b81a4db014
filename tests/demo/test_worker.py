"""Both coroutines against each other in one loop, and the small parts that they are made of."""

from __future__ import annotations

import asyncio
import gc
import json
import socket

import pytest
import torch

import aiocomm
from aiocomm.demo.checksum import checksum
from aiocomm.demo.messages import make_trajectory
from aiocomm.demo.records import Direction, Role, Settings
from aiocomm.demo.report import make_report
from aiocomm.demo.worker import flip_bit, threads, work

SETTINGS = Settings(steps=1, trajectories=3, parameters=1e6, seed=5)
# In one process tensors are handed over and not copied: a second step would change the weights
# that the rollout is still looking at. More steps run in tests/demo/test_run.py.


@pytest.mark.asyncio
async def test_both_in_one_loop() -> None:
    torch_threads = torch.get_num_threads()
    board = aiocomm.TCPBoard(port=0, serve=True)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        with ours, theirs:
            theirs.setblocking(False)
            async with (
                aiocomm.open("worker:0", store=board) as trainer,
                aiocomm.open("worker:1", store=board) as rollout,
            ):
                books = await asyncio.gather(
                    work(trainer, 0, SETTINGS, theirs), work(rollout, 1, SETTINGS, theirs)
                )
            notes = [json.loads(ours.recv(4096)) for _ in range(1 + 1 + 1 + 3)]
    finally:
        gc.unfreeze()
        torch.set_num_threads(torch_threads)
    assert make_report(SETTINGS, books, 1.0).differences == ()
    assert [each.role for each in books] == [Role.TRAINER, Role.ROLLOUT]
    assert [len(each.sent) for each in books] == [1, 3]
    assert [len(each.received) for each in books] == [3, 1]
    # What arrived is what anybody can make from the seed.
    for number, received in enumerate(books[0].received):
        assert received.checksum == checksum(make_trajectory(5, 0, number))
    last = {note["direction"]: note["messages"] for note in notes}
    assert last == {Direction.WEIGHTS: 1, Direction.TRAJECTORIES: 3}


def test_one_bit_of_the_largest_tensor_is_flipped() -> None:
    weights = {"small": torch.zeros(3), "large": torch.zeros(5, 5)}
    flip_bit(weights)
    assert torch.equal(weights["small"], torch.zeros(3))
    changed = weights["large"].view(torch.uint8)
    assert int((changed != 0).sum()) == 1
    assert int(changed.max()) == 1


def test_threads_are_counted() -> None:
    import threading

    stop = threading.Event()
    before = threads()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert threads() == before + 1
    finally:
        stop.set()
        thread.join()
