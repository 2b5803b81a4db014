"""Which bulk routes there are, in which order they are tried, and how one is made.

The one place that a new backend is entered in. Small messages never come here: they ride in
their envelope, and between two members of one process every message is handed over by the link.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..device import here
from ..errors import ProtocolError, RouteError
from .cuda_ipc.receive import CudaIpcReceiver
from .cuda_ipc.send import CudaIpcSender
from .gloo import GlooRoute
from .nccl import NcclRoute
from .shm.receive import ShmReceiver
from .shm.send import ShmSender
from .stream import StreamRoute

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from ..options import Options
    from .base import Link, ReceivingRoute, SendingRoute
    from .device_base import DeviceReceivingRoute, DeviceSendingRoute
    from .shm.copies import OffLoop

ROUTES = (ShmSender.name, GlooRoute.name, StreamRoute.name)
"""Names of all bulk routes for CPU memory, the best first."""

DEVICE_ROUTES = (NcclRoute.name, CudaIpcSender.name)
"""Names of all bulk routes for memory of a device, in the order in which they are tried."""

RING_FROM = 16 * 1024
"""Bytes above which a message is better off in shared memory than in its envelope: what the ring
costs in Python is less than the socket's two copies."""


def candidates(pinned: str | None, *, same_host: bool) -> tuple[str, ...]:
    """The routes to propose, in order: the pinned one alone, or all that the placement allows."""
    if pinned is not None:
        return (pinned,)
    return ROUTES if same_host else ROUTES[1:]


def eager_limit(option: int, route: str) -> int:
    """Bytes up to which a message rides in its envelope.

    Args:
        option: as in ``Options``.
        route: the bulk route that there is, or will be.
    """
    return min(option, RING_FROM) if route == ShmSender.name else option


def device_candidates(pinned: str | None) -> tuple[str, ...]:
    """The same for memory of a device. None of them (``"staged"``) sends it by way of the host."""
    if pinned is None:
        return DEVICE_ROUTES
    return (pinned,) if pinned in DEVICE_ROUTES else ()


def is_device_route(name: str) -> bool:
    """Whether a route is one for memory of a device."""
    return name in DEVICE_ROUTES


def make_route(
    name: str,
    *,
    label: str,
    link: Link,
    loop: asyncio.AbstractEventLoop,
    sending: bool,
    publish: Callable[[str, bytes], None],
    off_loop: OffLoop,
    shm_bytes: int,
    stall_timeout: float,
) -> SendingRoute | ReceivingRoute:
    """Make one end of a route, not set up yet.

    Args:
        name: one of ``ROUTES``.
        label: names the direction, the same at both ends.
        link: the control link of the two.
        loop: the loop of the runtime.
        sending: which end it is.
        publish: hands a key and its value to the peer's end.
        off_loop: see ``Runtime.off_loop``.
        shm_bytes: as in ``Options``.
        stall_timeout: likewise.

    Raises:
        ProtocolError: the peer proposed a route that this version does not have.
    """
    if name == ShmSender.name:
        if sending:
            return ShmSender(
                label, link, loop, publish=publish, off_loop=off_loop, shm_bytes=shm_bytes
            )
        return ShmReceiver(label, link, loop, publish=publish, off_loop=off_loop)
    if name == GlooRoute.name:
        return GlooRoute(
            label,
            sending=sending,
            local_host=link.local_host,
            loop=loop,
            publish=publish,
            stall_timeout=stall_timeout,
        )
    if name == StreamRoute.name:
        return StreamRoute(link, loop, sending=sending)
    raise ProtocolError(f"the peer proposes a route {name!r} that is not known here")


def make_device_route(
    name: str,
    *,
    label: str,
    loop: asyncio.AbstractEventLoop,
    sending: bool,
    publish: Callable[[str, bytes], None],
    off_loop: OffLoop,
    index: int | None,
    options: Options,
) -> DeviceSendingRoute | DeviceReceivingRoute:
    """Make one end of a route for memory of a device, not set up yet.

    Args:
        name: one of ``DEVICE_ROUTES``.
        label: names the direction, the same at both ends.
        loop: the loop of the runtime.
        sending: which end it is.
        publish: hands a key and its value to the peer's end.
        off_loop: see ``Runtime.off_loop``.
        index: the device of this end; None takes the one on which received tensors are made.
        options: of the runtime.

    Raises:
        RouteError: there is no such device here.
        ProtocolError: the peer proposed a route that this version does not have.
    """
    if name not in DEVICE_ROUTES:
        raise ProtocolError(f"the peer proposes a route {name!r} that is not known here")
    if index is None:
        index = receiving_device(options)
    if name == NcclRoute.name:
        return NcclRoute(
            label, sending=sending, loop=loop, publish=publish, index=index, options=options
        )
    if sending:
        return CudaIpcSender(label, loop=loop, publish=publish, index=index)
    return CudaIpcReceiver(
        label,
        loop=loop,
        publish=publish,
        index=index,
        off_loop=off_loop,
        stall_timeout=options.stall_timeout,
    )


def receiving_device(options: Options) -> int:
    """The device on which received tensors are made.

    Raises:
        RouteError: there is no such device here.
    """
    count = here.accelerator.count()
    index = options.device
    if not count:
        raise RouteError("there is no CUDA device on this side")
    if index is None:
        return here.accelerator.current()
    if index >= count:
        raise RouteError(f"option device is {index}, and there are {count} CUDA devices")
    return index
