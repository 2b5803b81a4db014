"""The work of one or several ``torch.distributed`` operations.

Bridges the caller's own collectives (an ``all_reduce`` on the default group, say) into the same
handles as messages. How a native completion becomes a future is known only to
``transport.completion``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ..errors import UsageError
from ..transport.completion import watch
from .base import AsyncWork

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")


class AsyncCollWork(AsyncWork[T]):
    """Completes when all of the given works have.

    If some fail, it fails with the error of the first that failed, once all have ended: no
    operation touches a buffer any more when this work is done.

    Args:
        works: what ``dist.broadcast(..., async_op=True)`` and its like return; one or several.
        result: what the work completes with.

    Raises:
        UsageError: one of them is None (this rank is not in that group), or has no future (Gloo's
            isend and irecv).
        RuntimeError: no event loop is running.

    Cancellation: the operations go on, their end is ignored. The buffers are in use until then.
    """

    @overload
    def __init__(self: AsyncCollWork[None], works: dist.Work | Sequence[dist.Work]) -> None: ...
    @overload
    def __init__(self, works: dist.Work | Sequence[dist.Work], result: T) -> None: ...
    def __init__(self, works: dist.Work | Sequence[dist.Work], result: Any = None) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(loop=loop)
        listed = list(works) if isinstance(works, Sequence) else [works]
        if any(work is None for work in listed):
            raise UsageError("None is no work: this rank is not a member of that process group")
        self._result_value = result
        self._works = listed
        self._error: BaseException | None = None
        self._left = len(listed)
        for work in listed:
            watch(work, loop).add_done_callback(self._ended)
        if not listed:
            self._finish(result)

    def _ended(self, end: asyncio.Future[Any]) -> None:
        error = end.exception()
        if self._error is None:
            self._error = error
        elif error is not None:
            self._error.add_note(f"another of the operations failed too: {error}")
        self._left -= 1
        if self._left:
            return
        error, self._error = self._error, None
        result, self._result_value = self._result_value, None
        self._works = []
        if error is not None:
            self._fail(error)
        else:
            self._finish(result)

    def _state_text(self) -> str:
        state = super()._state_text()
        return state if self.done() else f"{state}: {self._left} of {len(self._works)} left"
