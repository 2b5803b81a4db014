"""What goes wrong, goes wrong in one call: the next message is there, whole and in order."""

from __future__ import annotations

import asyncio
import logging
import sys

import torch

import aiocomm
from aiocomm.errors import PairingError, PayloadError, PeerClosedError


async def careless(group: aiocomm.CollectiveGroup) -> None:
    assert await group.recv() == "you may begin"
    await group.send("late, but not lost")
    await group.send_tensor(torch.zeros(3))  # the other side expects four
    try:
        group.send(torch.zeros(4, 4).t())  # refused at the call: the text says how to mend it
    except PayloadError as error:
        print(error)
    await group.send("the next one is intact")


async def careful(group: aiocomm.CollectiveGroup) -> list[str]:
    log = []
    try:
        async with asyncio.timeout(0.05):
            await group.recv()
    except TimeoutError:
        log.append("a time-out")
    await group.send("you may begin")
    log.append(await group.recv())  # what the cancelled call would have got

    try:
        await group.recv_tensor(torch.zeros(4))
    except PairingError as error:
        print(error)
        log.append("a mismatch")
    log.append(await group.recv())

    try:
        await group.recv()
    except PeerClosedError:
        log.append("goodbye")
    return log


async def work(collective: aiocomm.Collective, rank: int) -> list[str] | None:
    # The send that met the wrong buffer had completed: its side gets a warning, no exception.
    logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
    group = collective.create_collective_group(["worker:0", "worker:1"])
    return await (careful(group) if rank == 0 else careless(group))


if __name__ == "__main__":
    log, _ = aiocomm.run_local(work, 2)
    print(", ".join(log))
