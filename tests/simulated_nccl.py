"""A ProcessGroupNCCL for the simulated device, whose two members are in this process.

It finds its peer by the store that it is given, as the real one does, and broadcasts when both
members' streams have come to the operation. Like the real one it refuses two members on one device,
blocks in its first operation until the peer is there too, and an abort ends what never met, but not
the joining of the two. With ``old`` it has a stream of its own, as before torch 2.8.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import threading
import weakref
from typing import Any, ClassVar

import torch

from .simulated import SimEvent, Simulated
from .simulated_memory import SimStream


class Wire:
    """What two members have in common."""

    def __init__(self) -> None:
        self.members: dict[int, Any] = {}
        self.warm: set[int] = set()  # who has come to the first operation
        self.changed = threading.Condition()
        self.aborted = False


class Work:
    """What a broadcast returns."""

    def __init__(self, device: Simulated, event: SimEvent) -> None:
        self._device = device
        self._event = event

    def synchronize(self) -> None:
        device = self._device
        device.wait(device.current_stream(device.current()), self._event)


def nccl_of(device: Simulated) -> Any:
    """The class of process groups for a simulated device, with what happened to all of them."""

    class Config:
        blocking = 1
        min_ctas = max_ctas = -1

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = Config()
            self._timeout: Any = None

    class ProcessGroup:
        wires: ClassVar[dict[bytes, Wire]] = {}
        numbers = itertools.count()
        made: ClassVar[list[Any]] = []
        hang: threading.Event | None = None  # the two are not joined before that
        refuse: str | None = None  # connecting fails with this
        broken: str | None = None  # a broadcast fails with this
        old: bool = False

        def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
            assert size == 2
            self.store, self.rank, self.options = store, rank, options
            self.stream: SimStream | None = None
            self.wire: Wire | None = None
            self.sent: list[int] = []  # sizes of the broadcasts
            self.works: list[weakref.ref[Work]] = []  # what was returned for them
            self.joining = False
            self.aborts = 0
            self.given_up = threading.Event()
            self._queue: list[tuple[int, int]] = []  # where the head of this member's stream is
            self.made.append(self)

        def eager_connect_single_device(self, home: torch.device) -> None:
            assert device.current() == home.index
            self.joining = True
            if self.hang is not None:
                self.hang.wait(20)
            if self.refuse:
                raise RuntimeError(self.refuse + "\nand a stack of C++")
            if self.rank == 0:
                name = str(next(self.numbers)).encode()
                self.wires[name] = Wire()
                self.store.set("id", name)
            else:
                name = self.store.get("id")
            wire = self.wire = self.wires[name]
            self.stream = device.stream(home.index)
            with wire.changed:
                wire.members[self.rank] = self
                wire.changed.notify_all()
                assert wire.changed.wait_for(lambda: len(wire.members) == 2, timeout=20), (
                    "an abort does not end this"
                )
            if len({member.stream.index for member in wire.members.values()}) == 1:
                raise RuntimeError("ncclInvalidUsage: Duplicate GPU detected")

        def _set_up(self, wire: Wire) -> None:
            assert asyncio._get_running_loop() is None, "the first operation would block the loop"
            with wire.changed:
                wire.warm.add(self.rank)
                wire.changed.notify_all()
                wire.changed.wait_for(lambda: len(wire.warm) == 2 or wire.aborted, timeout=20)
            if len(wire.warm) != 2:
                raise RuntimeError("NCCL communicator was aborted")

        def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work | None:
            if self.broken:
                raise RuntimeError(self.broken)
            (tensor,) = tensors
            assert (options.rootRank, options.rootTensor) == (0, 0)
            wire, stream = self.wire, self.stream
            assert wire is not None
            assert stream is not None
            assert device.device_of(tensor).index == stream.index
            place = device.content(tensor), tensor.nbytes
            if len(wire.warm) == 2:
                self.sent.append(tensor.nbytes)
            else:
                self._set_up(wire)
            operation = Operation(self, wire, place)
            current = device.current_stream(stream.index)
            if not self.old and not options.asyncOp:
                device.queue(current, operation.step)
                return None
            device.wait(stream, device.record(current))
            device.queue(stream, operation.step)
            work = Work(device, device.record(stream))
            self.works.append(weakref.ref(work))
            return work

        def abort(self) -> None:
            self.aborts += 1
            self.given_up.set()
            if self.wire is not None:
                self.wire.aborted = True
                with self.wire.changed:
                    self.wire.changed.notify_all()
            device.nudge()

    ProcessGroup.Options = Options  # type: ignore[attr-defined]
    return ProcessGroup


class Operation:
    """One member's part of one broadcast."""

    def __init__(self, member: Any, wire: Wire, place: tuple[int, int]) -> None:
        self._member = member
        self._wire = wire
        self._place = place
        self.met = False

    def step(self) -> bool:
        """Carried out when both members have come here; the second one moves the bytes."""
        if self.met or self._member.given_up.is_set():
            return True
        self._member.operation = self
        other = self._wire.members[1 - self._member.rank]
        theirs = getattr(other, "operation", None)
        if theirs is None or theirs.met:
            return False
        ends = {self._member.rank: self, other.rank: theirs}
        (source, size), (target, room) = ends[0]._place, ends[1]._place
        assert size == room, "NCCL would hang, or write past the end"
        ctypes.memmove(target, source, size)
        self.met = theirs.met = True
        return True
