"""What is right or wrong on a chip: two processes on one GPU, kinds, order, streams, refusals.

Every function here runs in each of its processes with the runtime open; rank 0 sends first.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .chip import DTYPES, Chip, hold, same

if TYPE_CHECKING:
    from aiocomm import Collective, CollectiveGroup

PAIR = ["worker:0", "worker:1"]
SMALL, LARGE = 24, 300_000  # elements: in the envelope, in bulk
ROUTE = "cuda_ipc"

Notes = dict[str, Any]


@dataclass
class Sample:
    """A dataclass with tensor fields."""

    weights: torch.Tensor
    step: int
    more: torch.Tensor | None = None


def group_of(collective: Collective, kind: str) -> tuple[Chip, CollectiveGroup]:
    """The chip, in use, and the group of the two."""
    chip = Chip(kind)
    chip.begin()
    return chip, collective.create_collective_group(PAIR)


def messages(chip: Chip, size: int, seed: int) -> list[tuple[str, Any]]:
    """An object of each kind that may be sent, and what it is called."""
    found: list[tuple[str, Any]] = [
        (f"tensor of {dtype}", chip.values(size, seed + number, dtype))
        for number, dtype in enumerate(DTYPES)
    ]
    one, two, three = (chip.values(size, seed + 100 + n, torch.float32) for n in range(3))
    many = {f"layer.{n}": chip.values(256, seed + n, torch.float32) for n in range(200)}
    nested = {"a": [one, {"b": (two, "text", 7)}], "c": Sample(three, 3, one[: size // 2])}
    return [
        *found,
        ("0-dimensional", one[3]),
        ("empty", torch.empty(0, 3, device=chip.device)),
        ("list", [one, two]),
        ("tuple", (one, two, three)),
        ("dict", {"z": one, "a": two}),
        ("dict of 200", many),
        ("dataclass", Sample(one, 1)),
        ("nested", nested),
        ("slice", one[size // 4 : size // 2]),
        ("2-dimensional", one.view(4, -1)),
    ]


async def kinds(collective: Collective, rank: int, kind: str) -> Notes:
    """Objects of all kinds, small and large, arrive as they went, on the device."""
    chip, group = group_of(collective, kind)
    count = 0
    for size in (SMALL, LARGE):
        for name, message in messages(chip, size, size):
            count += 1
            if rank == 0:
                await group.send(message)
                continue
            got = await group.recv()
            hold(same(got, message), f"{name} of {size} elements is not what was sent")
    if rank == 0:
        shared = chip.values(LARGE, 5)
        await group.send([shared, shared[100:]])
        weights = chip.values(LARGE, 6, torch.float32).nan_to_num().requires_grad_()
        await group.send(weights)
    else:
        whole, part = await group.recv()
        hold(whole[100:].data_ptr() == part.data_ptr(), "what shared memory shares it no more")
        hold(not (await group.recv()).requires_grad, "requires_grad did not arrive detached")
    for number, dtype in enumerate(DTYPES):
        for size in (SMALL, LARGE):
            source = chip.values(size, number, dtype)
            if rank == 0:
                await group.send_tensor(source)
            else:
                buffer = torch.empty_like(source)
                buffer.view(torch.uint8).zero_()  # no other kernel has every dtype
                await group.recv_tensor(buffer)
                hold(same(buffer, source), f"send_tensor of {dtype}, {size} elements")
    statistics = group.statistics()
    carried = statistics.sent if rank == 0 else statistics.received
    if chip.real:
        hold(ROUTE in carried, f"nothing went by {ROUTE}, but by {sorted(carried)}")
    return {"messages": count, "routes": {name: c.messages for name, c in carried.items()}}


async def order(collective: Collective, rank: int, kind: str) -> Notes:
    """1,000 mixed messages each way at once, in order and intact."""
    chip, group = group_of(collective, kind)
    total = 1000
    big = [chip.values(LARGE, seed) for seed in range(8)]
    host = [tensor.cpu() for tensor in big]

    def message(number: int) -> Any:
        tensor = big[number % 8]
        return (
            number,
            {"n": number, "x": tensor},
            tensor[:SMALL],
            [host[number % 8], number],
            (number, *(tensor[n * 50 : n * 50 + 40] for n in range(12))),
        )[number % 5]

    async def send() -> None:
        pending: list[Any] = []
        for number in range(total):
            pending.append(group.send(message(number)))
            if len(pending) == 16:
                await pending.pop(0)
        await asyncio.gather(*pending)

    async def receive() -> None:
        for number in range(total):
            got = await group.recv()
            hold(same(got, message(number)), f"message {number} is not the one that was due")

    await asyncio.gather(send(), receive())
    return {"messages": 2 * total}


async def streams(collective: Collective, rank: int, kind: str) -> Notes:
    """What is queued before ``send`` is sent, what is queued for a buffer comes before it."""
    chip, group = group_of(collective, kind)
    rounds = 20
    for number in range(rounds):
        size = (SMALL, LARGE)[number % 2]
        if rank == 0:
            with chip.side_stream():
                tensor = torch.zeros(size, device=chip.device)
                chip.spin(3)
                tensor.fill_(number + 1)  # queued, and not carried out yet
                work = group.send_tensor(tensor) if number % 4 > 1 else group.send(tensor)
                if number % 3 == 0:
                    del tensor
                    gc.collect()
                await work
                if number % 3:
                    tensor.fill_(-1)  # its memory is ours again
            continue
        expected = torch.full((size,), float(number + 1), device=chip.device)
        if number % 4 > 1:
            with chip.side_stream():
                buffer = torch.zeros(size, device=chip.device)
                chip.spin(3)
                buffer.fill_(-2)  # comes before the message, and is not seen after it
                receiving = group.recv_tensor(buffer)
            got = await receiving
        else:
            got = await group.recv()
        total = got + 0.0  # on a stream of our own, with no synchronisation
        hold(same(total, expected), f"round {number}: a stream did not wait for another")
    return {"rounds": rounds}


async def then_on_device(collective: Collective, rank: int, kind: str) -> Notes:
    """A callback that queues device work completes when that work has finished."""
    chip, group = group_of(collective, kind)
    rounds = 10
    for number in range(rounds):
        source = torch.full((LARGE,), float(number), device=chip.device)
        if rank == 0:
            await group.send(source)
            continue

        def slowly(got: torch.Tensor) -> torch.Tensor:
            with chip.side_stream():
                chip.spin(2)
                return got * 2 + 1

        doubled = await group.recv().then(slowly)
        hold(same(doubled + 0.0, source * 2 + 1), f"round {number}: used before it was finished")
    return {"rounds": rounds}


async def refusals(collective: Collective, rank: int, kind: str) -> Notes:
    """What cannot be sent is refused at the call, and mismatches are found; the next call works."""
    from aiocomm.errors import PairingError, PayloadError

    chip, group = group_of(collective, kind)
    square = chip.values(36, 1, torch.float32).view(6, 6)
    refused: list[Any] = [square.T, square[:, ::2]]
    if chip.real:
        refused.append([square, torch.zeros(3)])
    if rank == 0:
        for bad in refused:
            try:
                group.send(bad)
            except PayloadError:
                continue
            hold(False, "it was not refused at the call")
        for size in (SMALL, LARGE):
            work = group.send_tensor(chip.values(size, 2, torch.float32))
            await asyncio.wait([work])
            work.exception()
            await group.send(square)
        return {"refused": len(refused)}
    for size in (SMALL, LARGE):
        buffer = torch.zeros(size, dtype=torch.float64, device=chip.device)
        try:
            await group.recv_tensor(buffer)
        except PairingError:
            hold(same(buffer, torch.zeros_like(buffer)), "the buffer of a mismatch was written to")
        else:
            hold(False, "a mismatch of dtypes was not found")
        hold(same(await group.recv(), square), "the message after a mismatch is not intact")
    return {}


async def nccl_refuses(collective: Collective, rank: int, kind: str) -> Notes:
    """Pinned to NCCL, two members on one GPU go by the host, with one warning that says why."""
    chip, group = group_of(collective, kind)
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logger, listener = logging.getLogger("aiocomm"), Listener(logging.WARNING)
    logger.addHandler(listener)
    for number in range(3):
        source = chip.values(LARGE, number)
        if rank == 0:
            await group.send(source)
        else:
            hold(same(await group.recv(), source), "what went by the host is not what was sent")
    logger.removeHandler(listener)
    if rank == 1:
        return {}
    route = group.statistics().device_route
    hold(route == "staged", f"the route is {route!r} instead of 'staged'")
    hold(len(heard) == 1, f"{len(heard)} warnings instead of one: {heard}")
    hold("on one GPU" in heard[0], f"the warning does not say why: {heard[0]}")
    return {"warning": heard[0]}


async def expandable(collective: Collective, rank: int, kind: str) -> Notes:
    """Memory of the expandable-segments allocator arrives, by whatever route that reaches it."""
    chip, group = group_of(collective, kind)
    for number in range(5):
        source = chip.values(LARGE, number)
        if rank == 0:
            await group.send({"x": source})
        else:
            hold(same(await group.recv(), {"x": source}), "what arrived is not what was sent")
    return {"route": group.statistics().device_route} if rank == 0 else {}
