"""The works of a channel's calls: handles whose cancellation reaches the client they belong to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..handles.base import AsyncWork
from ..handles.delivered import DeliveredWork

if TYPE_CHECKING:
    from collections.abc import Generator

    from ..payload import Packed
    from .client import ChannelClient


class PutWork(AsyncWork[None]):
    """An item on its way into a channel; completes when the channel has it.

    Cancellation: an item whose turn has not come is withdrawn. One that has left is put.
    """

    _client: ChannelClient
    _number: int = -1  # until it is known to the server
    _packed: Packed | None = None  # until it leaves
    _key: str
    _weight: float

    @property
    def _whereabouts(self) -> str:
        return f"a put into channel {self._client.name!r}, key {self._key!r}"

    @property
    def _falls_with_its_branch(self) -> bool:
        return True

    def _withdraw(self) -> bool:
        return self._packed is not None and self._cancel()

    def _on_cancel(self) -> None:
        self._client.put_cancelled(self)


class GetWork(DeliveredWork):
    """A call that waits for an item, or for a batch of them.

    Cancellation: loses no item. What would have come here stays in the channel, and what had come
    and was not taken goes back to its place.
    """

    _client: ChannelClient
    _number: int = -1  # until it is known to the server
    _key: str
    _batch: bool = False
    _owes: bool = False  # word to the server of what became of the items

    @property
    def _whereabouts(self) -> str:
        what = "get_batch" if self._batch else "get"
        return f"a {what} from channel {self._client.name!r}, key {self._key!r}"

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the item.

        Cancellation: see the class.
        """
        value = yield from super().__await__()
        self._note_taken()
        return value

    def result(self) -> Any:
        """The item; CancelledError when it went back into the channel."""
        value = super().result()
        self._note_taken()
        return value

    def _note_taken(self) -> None:
        if self._owes and self._delivered is None:
            self._owes = False
            self._client.taken(self._number)

    def _put_back(self, delivered: Any) -> None:
        self._owes = False
        self._client.give_back(self._number)

    def _on_cancel(self) -> None:
        self._client.get_cancelled(self)

    def __del__(self) -> None:
        # Nobody can take it any more; left with this consumer it would take up room for ever.
        if self._owes:
            self._client.forgotten(self._number)
        super().__del__()


class CallWork(AsyncWork[Any]):
    """A question to the channel, or the request to close it.

    Cancellation: the answer is ignored.
    """

    _client: ChannelClient

    @property
    def _whereabouts(self) -> str:
        return f"a call of channel {self._client.name!r}"
