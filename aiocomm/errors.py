"""The exceptions of aiocomm, and what each is called for.

One tree, split by whose fault it is. Every error says what happened, and carries the group,
direction, peer and message sequence where there is one; its text says how to mend it.

::

    AiocommError
    +-- UsageError                     the caller did something that cannot work
    |   +-- AddressError  (ValueError)     not a member, not two of them, an empty name
    |   +-- PayloadError  (ValueError)     cannot be sent; refused before anything is queued
    |   +-- PairingError                   send met recv_tensor, or the specs of both differ
    |   +-- WrongLoopError (RuntimeError)  used from another event loop, or in a forked child
    |   +-- WouldBlockError (RuntimeError) a blocking wait on the thread of an event loop
    |   +-- MissingPackageError (ImportError)  an optional package is not installed
    +-- ClosedError                    closed on this side
    +-- DeviceError   (RuntimeError)   an accelerator of this side failed
    +-- PeerError                      the other side did something, or is gone
    |   +-- PeerLostError (ConnectionError)   died, reset, silent, or its host vanished
    |   |   +-- PeerClosedError               said goodbye
    |   +-- DecodeError                       its object cannot be rebuilt here
    |   +-- ProtocolError                     its bytes break the protocol
    |   +-- HandshakeError (ConnectionError)  no link could be agreed on
    |       +-- AuthenticationError           it does not know the secret
    |       +-- RefusedError                  it refused, with a code
    +-- NetworkError (ConnectionError) the network between
    |   +-- RouteError                     a bulk route could not be set up, or broke
    +-- RendezvousError                the board
    |   +-- RendezvousTimeout (TimeoutError)  waited for a worker or a key in vain
    +-- ChannelError                   a channel's answer
        +-- ChannelFull                    no room, and the call was not to wait
        +-- ChannelEmpty                   nothing there, and the call was not to wait
        +-- ChannelClosed                  closed, by whomever
        +-- ChannelExistsError             its name is taken
        +-- ChannelLostError (PeerLostError)  the actor that held it is gone
"""

from __future__ import annotations

import copy
import enum
from typing import Self, TypedDict


class Context(TypedDict):
    """Where an error happened: given as keywords to any of them."""

    group: str
    peer: str


class AiocommError(Exception):
    """Root of every exception that aiocomm raises on purpose.

    Args:
        message: what happened and how to mend it.
        group: name of the group, if any.
        direction: ``"send"`` or ``"recv"``, if any.
        peer: address of the other member, if any.
        sequence: number of the message in its direction, from 0, if any.
    """

    def __init__(
        self,
        message: str = "",
        *,
        group: str | None = None,
        direction: str | None = None,
        peer: str | None = None,
        sequence: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.group = group
        self.direction = direction
        self.peer = peer
        self.sequence = sequence

    def __str__(self) -> str:
        named = (
            ("group", self.group),
            ("direction", self.direction),
            ("peer", self.peer),
            ("message", self.sequence),
        )
        where = ", ".join(f"{name} {value}" for name, value in named if value is not None)
        return f"{self.message} [{where}]" if where else self.message

    def again(self) -> Self:
        """The same error for one more who waits.

        One exception raised in several places would collect the frames of all, and with them what
        they hold, for as long as whatever ended keeps it.
        """
        other = copy.copy(self).with_traceback(self.__traceback__)
        other.__cause__ = self.__cause__
        return other

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only context would be lost by BaseException's own reduction (a worker's error
        # crosses a process boundary in run_local).
        return (_rebuild, (type(self), self.message, dict(self.__dict__)))


def _rebuild(cls: type[AiocommError], message: str, state: dict[str, object]) -> AiocommError:
    error = cls.__new__(cls, message)
    error.args = (message,)
    error.__dict__.update(state)
    return error


class UsageError(AiocommError):
    """The caller asked for something that cannot work; the next call still does."""


class AddressError(UsageError, ValueError):
    """A worker address, or a set of them, is not usable; the text names the one at fault."""


class PayloadError(UsageError, ValueError):
    """The object cannot be sent. Raised by the call itself, before anything is queued."""


class PairingError(UsageError):
    """The two sides called what does not fit; that message is dropped, the next one is intact."""


class WrongLoopError(UsageError, RuntimeError):
    """Used from an event loop other than the one it was opened in, or in a forked child."""


class WouldBlockError(UsageError, RuntimeError):
    """A blocking wait was called on the thread of an event loop; ``await`` the work instead."""


class MissingPackageError(UsageError, ImportError):
    """A package that this part of aiocomm needs is not installed; the text has the command."""


class ClosedError(AiocommError):
    """The work, group or runtime was closed on this side."""


class DeviceError(AiocommError, RuntimeError):
    """An accelerator of this side failed; whatever was queued in that stream is lost."""


class PeerError(AiocommError):
    """The other member is at fault, or gone."""


class PeerLostError(PeerError, ConnectionError):
    """The other member died, was reset, fell silent, or its host vanished."""


class PeerClosedError(PeerLostError):
    """The other member said goodbye: it closed on purpose."""


class DecodeError(PeerError):
    """An object arrived whole but could not be rebuilt here; the cause is chained."""


class ProtocolError(PeerError):
    """The bytes of the other member break the protocol; nothing was allocated for them."""


class HandshakeError(PeerError, ConnectionError):
    """No link could be agreed on with the other member."""


class AuthenticationError(HandshakeError):
    """The other end does not know the secret; set ``AIOCOMM_SECRET`` alike on both or on none."""


class Refusal(enum.Enum):
    """Why a worker refuses a link."""

    CROSSED = "crossed"  # both dialled at once, the other link wins
    LINKED = "linked"  # the two are linked already
    NOT_A_MEMBER = "not a member"
    STALE = "stale"  # meant for an earlier incarnation of this worker
    CLOSED = "closed"
    BAD_REQUEST = "bad request"


class RefusedError(HandshakeError):
    """The other member refused the link; ``code`` says why."""

    def __init__(self, code: Refusal, message: str = "", **context: str | int | None) -> None:
        super().__init__(message or code.value, **context)  # type: ignore[arg-type]
        self.code = code


class NetworkError(AiocommError, ConnectionError):
    """The network between the members failed."""


class RouteError(NetworkError):
    """A bulk route could not be set up, or broke in the middle."""


class RendezvousError(AiocommError):
    """The board on which workers find one another failed."""


class RendezvousTimeout(RendezvousError, TimeoutError):
    """Waited in vain; the text names who or what was waited for, and how long."""


class ChannelError(AiocommError):
    """A channel could not do what it was asked; the text names the channel."""


class ChannelFull(ChannelError):
    """There is no room for the item, or none can ever come of what the callers wait for."""


class ChannelEmpty(ChannelError):
    """There is no item, and the call was not to wait for one."""


class ChannelClosed(ChannelError):
    """The channel was closed: nothing can be put, and nothing is left to get."""


class ChannelExistsError(ChannelError):
    """A channel of that name is there already."""


class ChannelLostError(ChannelError, PeerLostError):
    """The actor that held the channel died, and with it the items that nobody had taken."""
