"""The blocking half of an NCCL route: a ProcessGroupNCCL of two, made and aborted off the loop.

Knows nothing of event loops; ``NcclRoute`` is the other half. The group is connected when it is
made, and has carried one operation before anybody gets it: NCCL sets up the ways between the two
in the first one, which blocks its caller until the peer's has come. On the loop that would hold all
groups up, and for ever where two groups' first operations meet in opposite orders. It is always
ended by an abort: all that was announced as done has been received by then, and a ``shutdown``
waits for a peer that may be dead.

Rejected: a non-blocking communicator, so that an abort ends its construction too. Torch has no call
to wait until one is there, its first operation fails or blocks in some versions, and NCCL 2.26
hangs. An abort ends all but the joining of the two, which ends when the peer's process does; so
that begins when both threads are there.

The group is injected, since a torch without CUDA has none: anything with the constructor, options
and methods of ``torch.distributed.ProcessGroupNCCL`` that are used here.

torch's own watchdog ends the whole process when an operation or the device fails or takes too
long. Here a peer may die at any time and the route deals with it, so this group is made without
that. It can only be said by the environment, which is changed for the moment of the constructor.
Rejected: asking users to set the variables (their own groups would lose their watchdog).
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
ENVIRONMENT = dict.fromkeys(
    (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "TORCH_NCCL_ENABLE_MONITORING",
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "TORCH_NCCL_PROPAGATE_ERROR",
        "TORCH_NCCL_DESYNC_DEBUG",
        "TORCH_NCCL_BLOCKING_WAIT",
    ),
    "0",
)
"""What the constructor reads: no thread that ends the process or uses the store for news of its
own, no ``synchronize`` that blocks."""
PROBE = 64
"""Bytes of the first operation."""

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
        # In the current stream, where torch can (from 2.8): its own are few, and two routes that
        # share one wait for each other.
        self._broadcast.asyncOp = False

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
        config.blocking = 1
        if self._options.nccl_min_ctas is not None:
            config.min_ctas = self._options.nccl_min_ctas
        if self._options.nccl_max_ctas is not None:
            config.max_ctas = self._options.nccl_max_ctas
        # Nothing ends the joining of the two when one does not come: first both are about to.
        self.store.set(f"{self._name}/here/{self._rank}", b"")
        self.store.get(f"{self._name}/here/{1 - self._rank}")
        with self._accelerator.using(self._stream):
            with _without_watchdog():
                group = native(PrefixStore(self._name, self.store), self._rank, 2, options)
            with self._lock:
                if self._cut is not None:
                    raise ClosedError("the NCCL pair was given up") from self._cut
                self._group = group  # from here on a cut aborts it
                # A group whose operations never end would hold the end of the interpreter.
                self._finalizer = weakref.finalize(self, _abort, group)
            try:
                group.eager_connect_single_device(torch.device("cuda", self._stream.index))
                self._try(group)
            finally:
                if self._is_cut():  # before there was anything to be aborted
                    _abort(group)

    def _try(self, group: Any) -> None:
        """Carry out one operation, and wait for it; a cut ends that."""
        device = self._accelerator
        probe = device.zeros(PROBE, self._stream)
        held = self._queue(group, probe)
        device.finish(device.record(self._stream))
        del held
        if self._is_cut():
            raise ClosedError("the NCCL pair was given up") from self._cut

    def _is_cut(self) -> bool:
        with self._lock:
            return self._cut is not None

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
            return self._queue(group, chunk)

    def _queue(self, group: Any, chunk: torch.Tensor) -> Any:
        work = group.broadcast([chunk], self._broadcast)
        if work is not None:  # it is in a stream of the group's
            work.synchronize()  # this one waits for that; the host does not
        return work

    def cut(self, reason: BaseException) -> None:
        """Abort whatever the group does. May block: not on the loop.

        A construction that is joining the two ends when it is over; nobody waits for that.

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
    end = getattr(group, "abort", None) or group._shutdown  # its name before torch 2.6
    with contextlib.suppress(RuntimeError):  # it had failed by itself
        end()


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
