"""Checks of one process: the poller on real events, NCCL with one member, a peer that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics
import subprocess
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import aiocomm
from aiocomm.device import here
from aiocomm.errors import PeerLostError, RouteError
from aiocomm.transport.completion import poller_of
from aiocomm.transport.nccl_pair import ENVIRONMENT, FOR_EVER

from .checks import LARGE, Notes
from .chip import Chip, cuda, hold

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiocomm import Collective

EVENTS = 5000


async def poller(collective: Collective, rank: int, kind: str) -> Notes:
    """10,000 real events on two streams: done in order, the loop is free, and seen at once."""
    Chip(kind).begin()
    device, loop = here.accelerator, asyncio.get_running_loop()
    own = poller_of(loop)
    ended: list[tuple[int, int]] = []

    def note(line: int, number: int, _: asyncio.Future[None]) -> None:
        ended.append((line, number))

    lines = [device.stream(0) for _ in range(2)]
    futures = []
    for line, stream in enumerate(lines):
        with device.using(stream):
            cuda._sleep(int(100 * 1.5e6))
        for number in range(EVENTS):
            future = own.watch(device.record(stream))
            future.add_done_callback(partial(note, line, number))
            futures.append(future)
    late = await _lateness(asyncio.gather(*futures))
    for line in range(2):
        seen = [number for this, number in ended if this == line]
        hold(seen == list(range(EVENTS)), f"the events of stream {line} were not done in order")
    hold(own.pending == 0, "events are left")
    delays = []
    for _ in range(50):
        first, last = (cuda.Event(enable_timing=True) for _ in range(2))
        cuda.synchronize()
        start = time.perf_counter()
        first.record()
        cuda._sleep(int(0.3 * 1.5e6))
        last.record()
        await own.watch(here.mark())
        took = time.perf_counter() - start
        delays.append(took - first.elapsed_time(last) / 1e3)
    return {"latest_us": 1e6 * late, "event_to_future_us": 1e6 * statistics.median(delays)}


async def _lateness(waiting: asyncio.Future[list[None]]) -> float:
    """By how many seconds a timer of 1 ms was late at most, until something is done."""
    latest = 0.0
    while not waiting.done():
        due = time.perf_counter() + 1e-3
        await asyncio.sleep(1e-3)
        latest = max(latest, time.perf_counter() - due)
    await waiting
    return latest


async def nccl_alone(collective: Collective, rank: int, kind: str) -> Notes:
    """A group of one member, made as the route makes its own: streams, events, abort."""
    import os

    import torch
    from torch._C._distributed_c10d import BroadcastOptions, HashStore, PrefixStore

    chip = Chip(kind)
    chip.begin()
    device = here.accelerator
    native = device.process_group
    hold(native is not None, "this torch has no NCCL")
    stream = device.stream(0, high_priority=True)
    options = native.Options(True)
    options._timeout = FOR_EVER
    options.config.blocking = 1
    options.config.max_ctas = 8
    os.environ.update(ENVIRONMENT)
    with device.using(stream):
        group = native(PrefixStore("alone", HashStore()), 0, 1, options)
        group.eager_connect_single_device(torch.device("cuda", 0))
    broadcast = BroadcastOptions()
    broadcast.rootRank = broadcast.rootTensor = 0
    broadcast.timeout = FOR_EVER
    broadcast.asyncOp = False
    source = chip.values(LARGE, 1)
    expected = source.clone()
    device.wait(stream, here.mark())
    with device.using(stream):
        work = group.broadcast([source], broadcast)
        if work is not None:
            work.synchronize()
    await poller_of(asyncio.get_running_loop()).watch(device.record(stream), keep=work)
    hold(torch.equal(source, expected), "a broadcast to oneself changed the bytes")
    start = time.perf_counter()
    await asyncio.get_running_loop().run_in_executor(None, group.abort)
    version = ".".join(map(str, cuda.nccl.version()))
    return {"nccl": version, "abort_ms": 1e3 * (time.perf_counter() - start)}


VICTIM = """
import sys
sys.path[:0] = {path!r}
import asyncio, aiocomm
from benchmarks.on_chip.alone import victim
asyncio.run(victim({port}, {kind!r}))
"""


async def victim(port: int, kind: str) -> None:
    """The other side of ``peer_death``: sends, says so, and waits to be killed."""
    chip = Chip(kind)
    chip.begin()
    async with aiocomm.open("victim:0", store=aiocomm.TCPBoard("127.0.0.1", port)) as collective:
        group = collective.create_collective_group(["killer:0", "victim:0"])
        await group.send(chip.values(LARGE, 1))
        tensor = chip.values(LARGE, 2)
        chip.synchronize()
        with chip.side_stream():
            chip.spin(4000)
            tensor.add_(1)
            work = group.send(tensor)  # the device of the other side waits for this
        receiving = group.recv()
        await asyncio.gather(work, receiving)


async def peer_death(collective: Collective, rank: int, kind: str) -> Notes:
    """A peer that is killed in the middle: typed errors in seconds, and nothing is left."""
    chip = Chip(kind)
    chip.begin()
    async with aiocomm.TCPBoard(port=0, serve=True) as board:
        async with aiocomm.open("killer:0", store=board) as ours:
            group = ours.create_collective_group(["killer:0", "victim:0"])
            code = VICTIM.format(path=sys.path, port=board.port, kind=kind)
            child = subprocess.Popen([sys.executable, "-c", code])
            try:
                first = await group.recv()
                hold(first.numel() == LARGE, "the first message is not whole")
                del first
                gc.collect()
                before = chip.allocated()
                receiving = group.recv()
                await asyncio.sleep(0.7)
                child.kill()
                start = time.perf_counter()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([receiving], timeout=20)
                hold(receiving.done(), "a receive hangs 20 s after its peer was killed")
                took, error = time.perf_counter() - start, receiving.exception()
                if error is not None:  # else the message had come whole
                    typed = isinstance(error, (PeerLostError, RouteError))
                    hold(typed, f"the receive failed with {error!r}")
                del receiving
            finally:
                child.kill()
                child.wait(20)
        gc.collect()
        hold(await _settles(chip), "the device still waits for the event of the peer that is dead")
        gone = await _comes_true(lambda: chip.allocated() <= before, 2)  # the poller lets go
        hold(gone, "memory is left of the message that never came whole")
    return {"seconds_to_error": took, "error": type(error).__name__ if error else "came whole"}


async def _settles(chip: Chip) -> bool:
    """Whether the device comes to an end of what is queued, within some seconds."""
    if not chip.real:
        return True
    # A daemon: what never comes back must not keep the process alive.
    thread = threading.Thread(target=chip.synchronize, daemon=True)
    thread.start()
    return await _comes_true(lambda: not thread.is_alive(), 8)


async def _comes_true(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it does in time; for what nothing announces."""
    for _ in range(int(100 * seconds)):
        if condition():
            return True
        await asyncio.sleep(0.01)
    return condition()
