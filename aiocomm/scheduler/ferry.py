"""Bytes between the memory of the host and that of a device, for one lane, in streams of its own.

Small messages need it, since an envelope is host memory, and so do large ones where no route joins
the two devices. Goes by pinned memory: a copy from or to any other would block the loop. Knows
neither messages nor routes. A copy that takes too long fails: it waits for what the user queued
before, or the device is lost.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from ..device import here
from ..errors import DeviceError
from ..packing import fill_block, plan_device, scatter, sizes_of
from ..runtime import COPY_LIMIT
from ..transport.completion import poller_of
from ..transport.device_blocks import gather_on_device, give_away

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    import torch

    from ..device.base import Event, Stream
    from ..packing import Block
    from ..runtime import Runtime

T = TypeVar("T")


class Ferry:
    """The copies of one lane. Used on the loop's thread only.

    Args:
        runtime: the loop and the options.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._streams: dict[int, Stream] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def run(self, crossing: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run one of the methods below as a task, until ``close``."""
        task = self._runtime.loop.create_task(crossing)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits gets it; a cancelled send waits no more

    async def aclose(self) -> None:
        """Give up what is under way. The device goes on, and its memory is held until it has ended.

        Cancellation: safe.
        """
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def reach(self, event: Event) -> None:
        """Wait until an event is done.

        Raises:
            DeviceError: the device failed, or does not come there in time.

        Cancellation: safe.
        """
        await self._done(event, None)

    async def down(self, buffers: Sequence[torch.Tensor], after: Event) -> Sequence[torch.Tensor]:
        """Copies of buffers of a device, in memory of the host.

        Args:
            buffers: 1-D uint8, none empty, all on one device; held until the device is done.
            after: when it is done, they are full.

        Raises:
            DeviceError: as ``reach``.
            RuntimeError: there is not that much memory (torch's own error).

        Cancellation: the device goes on.
        """
        device, sizes = here.accelerator, sizes_of(buffers)
        stream = self._stream(here.device_of(buffers[0]).index)
        blocks = plan_device(sizes)
        memory = await self._pinned(blocks, ())
        device.wait(stream, after)
        joined, besides = gather_on_device(device, blocks, buffers, stream)
        for target, source in zip(memory, joined, strict=True):
            device.copy(target, source, stream)
        await self._done(device.record(stream), (buffers, joined, besides, memory))
        return scatter(blocks, memory, sizes)

    async def up(
        self,
        buffers: Sequence[torch.Tensor],
        index: int,
        *,
        into: torch.Tensor | None = None,
        after: Event | None = None,
    ) -> Sequence[torch.Tensor]:
        """Copies of buffers of the host, in memory of a device that is the receiver's then.

        Args:
            buffers: 1-D uint8, filled.
            index: the device.
            into: the memory for a single buffer, on that device; default: fresh memory.
            after: ``into`` may be written to when this is done, and not before.

        Raises:
            DeviceError, RuntimeError: as ``down``.

        Cancellation: the device goes on.
        """
        device, sizes = here.accelerator, sizes_of(buffers)
        stream = self._stream(index)
        blocks = plan_device(sizes)
        pinned = await self._pinned(blocks, buffers)
        if into is None:
            memory = [device.allocate(block.nbytes, stream) for block in blocks]
        else:
            memory = [into]
            if after is not None:
                device.wait(stream, after)
        for target, source in zip(memory, pinned, strict=True):
            device.copy(target, source, stream)
        await self._done(device.record(stream), (memory, pinned))
        if into is None:
            give_away(device, memory, index)
        return scatter(blocks, memory, sizes)

    async def copy(
        self, target: torch.Tensor, source: torch.Tensor, after: Event | None = None
    ) -> None:
        """Copy between two places on devices; the source is full, the target free after the event.

        Raises:
            DeviceError: as ``reach``.

        Cancellation: the device goes on.
        """
        device = here.accelerator
        stream = self._stream(here.device_of(source).index)
        if after is not None:
            device.wait(stream, after)
        device.copy(target, source, stream)
        await self._done(device.record(stream), (target, source))

    async def clone(self, source: torch.Tensor, after: Event | None = None) -> torch.Tensor:
        """A copy on the same device, that is the receiver's then.

        Raises:
            DeviceError, RuntimeError: as ``down``.

        Cancellation: the device goes on.
        """
        copy = self._clone(source, after)
        await self._done(here.accelerator.record(self._stream_of(source)), (copy, source))
        return copy

    def clone_now(self, source: torch.Tensor) -> torch.Tensor:
        """The same, and wait for it: some ms at most, where the order leaves no other way.

        Raises:
            DeviceError, RuntimeError: as ``down``.
        """
        copy = self._clone(source, None)
        here.accelerator.finish(here.accelerator.record(self._stream_of(source)))
        return copy

    def _clone(self, source: torch.Tensor, after: Event | None) -> torch.Tensor:
        device, stream = here.accelerator, self._stream_of(source)
        if after is not None:
            device.wait(stream, after)
        copy = device.allocate(source.numel(), stream)
        device.copy(copy, source, stream)
        give_away(device, [copy], stream.index)
        return copy

    def _stream_of(self, memory: torch.Tensor) -> Stream:
        return self._stream(here.device_of(memory).index)

    def _stream(self, index: int) -> Stream:
        stream = self._streams.get(index)
        if stream is None:
            stream = self._streams[index] = here.accelerator.stream(index)
        return stream

    async def _pinned(
        self, blocks: Sequence[Block], buffers: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Pinned memory for the blocks, filled from buffers of the host where there are any."""
        if sum(block.nbytes for block in blocks) <= COPY_LIMIT:
            return _pinned(blocks, buffers)
        # To pin memory takes longer than to copy it.
        return await self._runtime.off_loop(_pinned, blocks, buffers)

    async def _done(self, event: Event, keep: object) -> None:
        timeout = self._runtime.options.stall_timeout
        try:
            async with asyncio.timeout(timeout):
                await poller_of(self._runtime.loop).watch(event, keep)
        except TimeoutError as error:
            raise DeviceError(
                f"device cuda:{event.stream.index} did not come to a copy within {timeout:g} s "
                "(Options.stall_timeout): what was queued before it takes longer, or hangs"
            ) from error


def _pinned(blocks: Sequence[Block], buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    memory = [here.accelerator.pinned(block.nbytes) for block in blocks]
    if buffers:
        for block, target in zip(blocks, memory, strict=True):
            fill_block(block, buffers, target)
    return memory
