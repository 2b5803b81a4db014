"""How the bytes of a message that arrives come to where they belong, by whose memory that is.

A ``HostMover`` moves what belongs in memory of the host, a ``DeviceMover`` what belongs in that of
a device: by a route of the device's, or by way of the host. Neither knows the order; each call
moves one message, and its future says when the bytes are there.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ..device import here
from ..errors import DecodeError, ProtocolError, RouteError
from ..packing import outline
from ..transport.select import receiving_device
from .arrival import Unbuildable
from .ferry import Ferry

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Sequence

    import torch

    from ..entries import Incoming
    from ..runtime import Runtime
    from ..transport.base import ReceivingRoute
    from ..transport.device_base import DeviceReceivingRoute
    from .arrival import Arrival
    from .works import RecvWork

STAGED = "staged"
"""What statistics call the way by the host and its bulk route."""


class HostMover:
    """Into memory of the host.

    Args:
        runtime: where large copies are made.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.route: ReceivingRoute | None = None
        self._runtime = runtime

    def route_of(self, message: Incoming) -> str:
        """How a message came, as statistics show it."""
        arrival: Arrival = message.owner
        if self.route is not None and (message.bulk or arrival.held is not None):
            return self.route.name
        return "memory" if arrival.in_process else "link"

    def end(self, arrived: Iterable[Incoming]) -> int | None:
        """No more messages will come: how many of these the route holds whole; see ``Route``."""
        if self.route is None:
            return None
        # Behind the first one that comes from the peer's device nothing can be had any more.
        reached = takewhile(lambda each: not each.owner.by_device, arrived)
        return self.route.end([each.owner.sizes for each in reached if not each.here])

    def admit(self, arrival: Arrival) -> bool:
        """Whether a bulk message that just came still has to move.

        Raises:
            ProtocolError: it comes by a route that was not agreed on.
        """
        if self.route is None:
            raise ProtocolError("the peer sends bulk, and no route was agreed on")
        if arrival.body and (held := self.route.hold(arrival.body, arrival.sizes)) is not None:
            arrival.held = held  # it is here, as if it had come along
            return False
        return True

    def take_in(self, arrival: Arrival, into: RecvWork | None) -> asyncio.Future[None]:
        """Move a bulk message into the buffer of a call, or into memory of its own.

        Raises:
            MemoryError, RuntimeError: there is not that much memory.
        """
        assert self.route is not None
        if into is not None:
            return self.route.receive([into._bytes])
        arrival.buffers, moved = self.route.fetch(arrival.sizes)
        return moved

    def copy(self, arrival: Arrival, work: RecvWork) -> asyncio.Future[Any]:
        """Copy a message that lies in memory of its own into the buffer of a call."""
        assert work._buffer is not None
        return self._runtime.off_loop(arrival.fill, work._buffer)

    def clone(self, memory: torch.Tensor) -> asyncio.Future[torch.Tensor]:
        """A copy of the bytes in the buffer of a call."""
        return self._runtime.off_loop(memory.clone)

    def clone_now(self, memory: torch.Tensor) -> torch.Tensor:
        """The same, at once."""
        return memory.clone()

    def discard(self, arrival: Arrival) -> asyncio.Future[None]:
        """Drain a message that nobody can take, and give back the memory that it lies in."""
        if arrival.sizes and arrival.held is None:
            assert self.route is not None
            return self.route.discard(arrival.sizes)
        arrival.release()
        return self.none()

    def none(self) -> asyncio.Future[None]:
        """The move of a message that is here already."""
        moved: asyncio.Future[None] = self._runtime.loop.create_future()
        moved.set_result(None)
        return moved


class DeviceMover:
    """Into memory of a device.

    Args:
        runtime: the loop and the options.
        host: moves what comes by way of the host.
    """

    def __init__(self, runtime: Runtime, host: HostMover) -> None:
        self.route: DeviceReceivingRoute | None = None
        self.ferry = Ferry(runtime)
        self._runtime = runtime
        self._host = host

    def admit(self, message: Incoming) -> None:
        """Tell the order what is different about a message that just came.

        Raises:
            ProtocolError: it comes by a route that was not agreed on.
        """
        arrival: Arrival = message.owner
        message.far = True
        if arrival.in_process:
            return
        if not message.bulk:
            message.bulk = message.here = True  # it still has to move: to the device
            return
        host = self._host.route
        if (self.route if arrival.by_device else host) is None:
            raise ProtocolError("the peer sends bulk, and no route was agreed on")
        if not arrival.by_device and host is not None:
            body, arrival.body = arrival.body, b""
            if body and (held := host.hold(body, arrival.sizes)) is not None:
                arrival.held, message.here = held, True

    def route_of(self, message: Incoming) -> str:
        """How a message came, as statistics show it."""
        arrival: Arrival = message.owner
        if arrival.in_process:
            return "memory"
        if arrival.by_device and self.route is not None:
            return self.route.name
        return "link" if arrival.body else STAGED

    def hand_over(self, arrival: Arrival, work: RecvWork) -> None:
        """A call gets the message, and its thread may use it in its stream, and drop it meanwhile.

        To the stream of the loop's thread the routes have lent it already. What a sender in this
        process has handed over is as that one made it.
        """
        home, device = work._home, here.accelerator
        if home is None or home.key == device.current_stream(home.index).key:
            return
        wholes = {each.untyped_storage().data_ptr(): each for each in arrival.buffers}
        for whole in wholes.values():
            if here.device_of(whole).index == home.index:
                device.lend(whole, home)

    def take_in(self, arrival: Arrival, into: RecvWork | None) -> asyncio.Future[Any]:
        """As ``HostMover``; what comes by way of the host is brought to the device."""
        if not arrival.by_device:
            return self._bring(arrival, into)
        route = self.route
        assert route is not None
        if into is not None and here.device_of(into._bytes).index == route.index:
            return route.receive(arrival.body, into._bytes, after=into._ready)
        buffers, moved = route.fetch(arrival.body, arrival.sizes)
        if into is None:
            arrival.buffers = buffers
            return moved

        async def pass_on(work: RecvWork) -> None:
            await moved
            await self.ferry.copy(work._bytes, buffers[0], work._ready)

        return self.ferry.run(pass_on(into))

    def copy(self, arrival: Arrival, work: RecvWork) -> asyncio.Future[Any]:
        """As ``HostMover``."""
        source = arrival.buffers[0] if arrival.buffers else arrival.body[0]
        return self.ferry.run(self.ferry.copy(work._bytes, source, work._ready))

    def clone(self, memory: torch.Tensor) -> asyncio.Future[torch.Tensor]:
        """As ``HostMover``."""
        return self.ferry.run(self.ferry.clone(memory))

    def clone_now(self, memory: torch.Tensor) -> torch.Tensor:
        """As ``HostMover``; waits for the device, which takes some ms at most."""
        return self.ferry.clone_now(memory)

    def discard(self, arrival: Arrival) -> asyncio.Future[None]:
        """As ``HostMover``."""
        if arrival.by_device:
            assert self.route is not None
            return self.route.discard(arrival.body, arrival.sizes)
        return self._host.none() if arrival.body else self._host.discard(arrival)

    def _bring(self, arrival: Arrival, into: RecvWork | None) -> asyncio.Future[Any]:
        # The route is asked here and now: the order of the calls is that of the messages.
        moved: asyncio.Future[None] | None = None
        buffers: Sequence[torch.Tensor] = ()
        if not arrival.body and arrival.held is None:
            assert self._host.route is not None
            buffers, moved = self._host.route.fetch(arrival.sizes)

        async def bring() -> None:
            host = buffers
            if moved is not None:
                await moved
            elif (held := arrival.held) is None:
                host = outline(arrival.body, arrival.sizes)
            else:
                host = outline(held.view, arrival.sizes)
                held.release()
                arrival.held = None
            if into is not None:
                index = here.device_of(into._bytes).index
                await self.ferry.up(host, index, into=into._bytes, after=into._ready)
                return
            try:
                index = receiving_device(self._runtime.options)
            except RouteError as error:
                text = f"the message has CUDA tensors: {error.message}"
                mend = "let the peer send tensor.cpu(), or mend that"
                arrival.value = Unbuildable(DecodeError(f"{text}; {mend}"))
            else:
                arrival.buffers = await self.ferry.up(host, index)

        return self.ferry.run(bring())
