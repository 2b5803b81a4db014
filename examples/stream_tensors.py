"""A stream of tensors between an async generator and ``async for``, slowed down by its consumer."""

from collections.abc import AsyncIterator

import torch

import aiocomm

COUNT = 200
WINDOW = 8  # messages that may wait unreceived; past that, sends wait


async def produce() -> AsyncIterator[torch.Tensor]:
    for number in range(COUNT):
        yield torch.full((1024,), float(number))


async def send_all(group: aiocomm.CollectiveGroup, stream: AsyncIterator[torch.Tensor]) -> None:
    async for tensor in stream:
        await group.send(tensor)  # here the producer waits for the consumer
    await group.send(None)  # the end


async def receive_all(group: aiocomm.CollectiveGroup) -> AsyncIterator[torch.Tensor]:
    while (tensor := await group.recv()) is not None:
        yield tensor


async def work(collective: aiocomm.Collective, rank: int) -> tuple[float, int]:
    group = collective.create_collective_group(["worker:0", "worker:1"])
    if rank == 0:
        await send_all(group, produce())
        return 0.0, 0
    total, longest = 0.0, 0
    async for tensor in receive_all(group):
        total += float(tensor[0])
        longest = max(longest, group.statistics().unreceived)
    return total, longest


if __name__ == "__main__":
    options = aiocomm.Options(window_messages=WINDOW)
    _, (total, longest) = aiocomm.run_local(work, 2, options=options)
    assert total == sum(range(COUNT))
    assert longest <= WINDOW
    print(f"{COUNT} tensors, never more than {WINDOW} in waiting")
