"""The work of a receive: what it was given is nobody's until somebody has taken it.

A result that was delivered can still miss its caller: the awaiting task is cancelled before it
runs, or every branch of ``then`` is. What it was then goes back to where it came from, so that no
cancellation loses anything. May not know what was delivered, nor where it goes back to: the owner
sets ``_delivered`` before the result, and overrides ``_put_back``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from .base import AsyncWork

if TYPE_CHECKING:
    from collections.abc import Generator


class DeliveredWork(AsyncWork[Any]):
    """Completes with something that exists once.

    Cancellation: loses nothing, even when the result was there already and neither the awaiting
    task nor the function of ``then`` had run yet. A function that has begun has it.
    """

    _delivered: Any = None  # until somebody took the result
    _given_back: bool = False
    _parked: int = 0  # awaiting tasks that were not woken yet
    _claims: int = 0  # branches that were not cancelled before they began

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the result.

        Cancellation: see the class.
        """
        self._parked += not self.done()
        try:
            value = yield from _work_await(self)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                self._give_back()
            del self  # the traceback holds this frame; it shall not hold the work, and a buffer
            raise
        if self._given_back:  # by another task that awaited it
            raise asyncio.CancelledError(_GIVEN_BACK)
        self._delivered = None
        return value

    def result(self) -> Any:
        """The object, or the buffer; CancelledError when it went to another call."""
        if self._given_back:
            raise asyncio.CancelledError(_GIVEN_BACK)
        if self._parked:
            # asyncio asks once for each task that it wakes, before the task runs. That one may
            # still be cancelled, and then what was delivered is nobody's.
            self._parked -= 1
        else:
            self._delivered = None
        try:
            return _work_result(self) if self._traceback is not None else _future_result(self)
        except BaseException:
            del self  # as above
            raise

    @property
    def _falls_with_its_branch(self) -> bool:
        return True

    def _claim(self) -> None:
        self._claims += 1

    def _unclaim(self) -> None:
        self._claims -= 1
        if not self._claims and not self._parked:
            self._give_back()  # where it was delivered: its branches were all that waited

    def _abandon(self) -> None:
        if not self._cancel():
            self._give_back()

    def _give_back(self) -> None:
        delivered, self._delivered = self._delivered, None
        if delivered is not None:
            self._given_back = True
            self._put_back(delivered)

    def _put_back(self, delivered: Any) -> None:
        """Called on the loop: the caller does not get what was delivered."""


# As in ``handles/base.py``: these are on the path of every message.
_work_await, _work_result = AsyncWork.__await__, AsyncWork.result
_future_result = asyncio.Future.result

_GIVEN_BACK = "cancelled; what was delivered here went to the next call"
