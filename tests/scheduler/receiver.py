"""A receiving lane whose link, route, copies and peer are the test's."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from aiocomm.errors import AiocommError, ClosedError, PeerLostError
from aiocomm.packing import inline
from aiocomm.payload import Packed, as_bytes, pack, pack_tensor, spec_of
from aiocomm.scheduler import RecvLane, RecvWork

from .lanes import CONTEXT, FakeLink, FakeRoute, Move, StillRuntime, envelope

CLOSED = ClosedError("closed")
LOST = PeerLostError("lost")


class Receiver:
    """The lane, and both sides of it."""

    def __init__(self, **settings: Any) -> None:
        self.runtime = StillRuntime(**settings)
        self.broken: list[AiocommError] = []
        self.lane = RecvLane(self.runtime, broken=self.broken.append, context=CONTEXT)
        self.link, self.route = FakeLink(), FakeRoute()
        self.lane.link_up(self.link)  # type: ignore[arg-type]
        self.lane.route_up(self.route)  # type: ignore[arg-type]
        self.sequence = 0

    @property
    def moves(self) -> list[Move]:
        return self.route.moves

    # the caller's side

    def recv(self) -> RecvWork:
        work = RecvWork(loop=asyncio.get_running_loop())
        work._lane = self.lane
        self.lane.submit(work)
        return work

    def recv_tensor(self, buffer: torch.Tensor) -> RecvWork:
        work = RecvWork(loop=asyncio.get_running_loop())
        work._lane = self.lane
        work._buffer, work._bytes, work._spec = buffer, as_bytes(buffer), spec_of(buffer)
        self.lane.submit(work)
        return work

    # the peer's side

    def _arrive(self, packed: Packed, body: Any, *, bulk: bool) -> Packed:
        frame = envelope(packed, self.sequence, body, bulk=bulk)
        self.sequence += 1
        self.lane.envelope_received(frame)
        return packed

    def inline(self, obj: object) -> Packed:
        packed = pack(obj)
        return self._arrive(packed, inline(packed.buffers), bulk=False)

    def inline_tensor(self, tensor: torch.Tensor) -> Packed:
        packed = pack_tensor(tensor)
        return self._arrive(packed, inline(packed.buffers), bulk=False)

    def by_reference(self, packed: Packed) -> Packed:
        return self._arrive(packed, tuple(packed.buffers), bulk=False)

    def bulk(self, obj: object) -> Packed:
        return self._arrive(pack(obj), b"", bulk=True)

    def bulk_tensor(self, tensor: torch.Tensor) -> Packed:
        return self._arrive(pack_tensor(tensor), b"", bulk=True)
