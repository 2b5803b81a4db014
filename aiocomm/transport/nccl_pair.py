"""The blocking half of an NCCL route: a ProcessGroupNCCL of two, made and aborted off the loop.

Knows nothing of event loops; ``NcclRoute`` is the other half. The group is connected when it is
made, not by its first operation: that one would block the loop, and two groups whose first
operations meet in opposite orders would wait for each other. It is always ended by an abort: all
that was announced as done has been received by then, and a ``shutdown`` waits for a peer that may
be dead. The communicator is a non-blocking one, so that an abort ends its construction too.

The group is injected, since a torch without CUDA has none: anything with the constructor, options
and methods of ``torch.distributed.ProcessGroupNCCL`` that are used here.

torch's own watchdog ends the whole process when an operation fails or takes too long. Here a peer
may die at any time and the route deals with it, so this group is made without that. It can only be
said by the environment, which is changed for the moment of the constructor. Rejected: asking users
to set the variable (their own groups would lose their watchdog).
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore

from ..errors import ClosedError
from .gloo_store import LinkStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..device.base import Accelerator, Stream
    from ..options import Options

FOR_EVER = datetime.timedelta(days=7)
"""The time-out of the group's own: longer than any of the route, which knows what it waits for."""
ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "0"}
"""What the constructor reads: no watchdog that ends the process, no ``synchronize`` that blocks."""

_environment = threading.Lock()


class NcclPair:
    """One process group of two ranks, rank 0 sending.

    Args:
        accelerator: whose ``process_group`` is used.
        name: the same on both sides, different for every pair of a link.
        rank: 0 sends, 1 receives.
        stream: in which the operations take their turn; its device is the pair's on this side.
        publish: as in ``LinkStore``.
        timeout: seconds that construction may wait for the peer's keys.
        options: of the runtime.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        name: str,
        rank: int,
        stream: Stream,
        publish: Callable[[str, bytes], None],
        timeout: float,
        options: Options,
    ) -> None:
        self.store = LinkStore(publish, timeout, "NCCL")
        self._accelerator = accelerator
        self._name = name
        self._rank = rank
        self._stream = stream
        self._options = options
        self._lock = threading.Lock()
        self._group: Any = None
        self._cut: BaseException | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._broadcast = BroadcastOptions()
        self._broadcast.rootRank = 0
        self._broadcast.rootTensor = 0
        self._broadcast.timeout = FOR_EVER

    def start(self, done: Callable[[BaseException | None], None]) -> None:
        """Construct and connect in a fresh thread (a pool would deadlock when pairs form a ring).

        Args:
            done: called from that thread with None or the error, as the last thing it does.
        """
        self.store.start_clock()

        def run() -> None:
            try:
                self._construct()
            except Exception as error:
                # C++ has flattened what the store raised to a text.
                done(self.store.failure or error)
            else:
                done(None)

        # A daemon: what cannot be interrupted must not keep the process alive.
        name = f"aiocomm-nccl-{self._name}"
        threading.Thread(target=run, name=name, daemon=True).start()

    def _construct(self) -> None:
        native = self._accelerator.process_group
        options = native.Options(self._options.high_priority)
        options._timeout = FOR_EVER
        config = options.config
        config.blocking = 0
        if self._options.nccl_min_ctas is not None:
            config.min_ctas = self._options.nccl_min_ctas
        if self._options.nccl_max_ctas is not None:
            config.max_ctas = self._options.nccl_max_ctas
        with self._accelerator.using(self._stream):
            with _without_watchdog():
                group = native(PrefixStore(self._name, self.store), self._rank, 2, options)
            with self._lock:
                if self._cut is not None:
                    raise ClosedError("the NCCL pair was given up") from self._cut
                self._group = group  # from here on a cut aborts it
                # A group whose operations never end would hold the end of the interpreter.
                self._finalizer = weakref.finalize(self, _abort, group)
            group.eager_connect_single_device(torch.device("cuda", self._stream.index))

    def broadcast(self, chunk: torch.Tensor) -> Any:
        """Queue one transfer in the stream; does not block.

        Args:
            chunk: uint8, 1-D, contiguous, on the device of the stream.

        Returns:
            What must be held until the stream has come past it.

        Raises:
            RuntimeError: NCCL refuses, or the pair is cut.
        """
        group = self._group
        if group is None:
            raise RuntimeError("the NCCL pair is closed")
        with self._accelerator.using(self._stream):
            work = group.broadcast([chunk], self._broadcast)
            work.synchronize()  # the stream waits for the group's own; the host does not
        return work

    def cut(self, reason: BaseException) -> None:
        """Abort whatever the group does, its construction included. May block: not on the loop.

        Idempotent.
        """
        self.store.abort(reason)
        with self._lock:
            self._cut = reason
            group, self._group = self._group, None
        if group is not None:
            assert self._finalizer is not None
            self._finalizer.detach()
            _abort(group)

    def cut_in_thread(self, reason: BaseException, done: Callable[[], None]) -> threading.Thread:
        """Cut, in a fresh thread, which calls ``done`` as the last thing it does."""

        def run() -> None:
            try:
                self.cut(reason)
            finally:
                done()

        name = f"aiocomm-nccl-close-{self._name}"
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):  # it had failed by itself
        group.abort()


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    with _environment:
        before = {name: os.environ.get(name) for name in ENVIRONMENT}
        os.environ.update(ENVIRONMENT)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
