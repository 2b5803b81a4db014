"""How a segment gets from one process to another: as a descriptor over a socket of its own.

An event loop's transport cannot carry a descriptor, so each direction has a courier at the sending
end and a mailbox at the other, an abstract Unix socket that is open until one courier has shown the
token that was agreed on over the control link. Nothing here ever waits: a descriptor that was sent
lies with the receiver, who looks for it when it is named on the link.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from typing import Final

from ...errors import ProtocolError, RouteError
from .segment import Segment

TOKEN_SIZE: Final = 16
_LABEL = struct.Struct("<IQ")  # number, bytes


class Courier:
    """Takes segments to the peer; the descriptor lies with the peer when ``send`` returns.

    Args:
        name: of the peer's mailbox.
        token: that the mailbox asks for.

    Raises:
        RouteError: the mailbox cannot be reached.
    """

    def __init__(self, name: str, token: bytes) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.setblocking(False)
            self._socket.connect(b"\0" + name.encode())
            self._socket.send(token)
        except OSError as error:
            self._socket.close()
            reason = error.strerror or error
            raise RouteError(
                f"the peer's mailbox for memory cannot be reached: {reason}"
            ) from error

    def send(self, number: int, segment: Segment) -> None:
        """Hand a segment over, under a number of the sender's choice.

        Raises:
            RouteError: the mailbox is full or gone.
        """
        try:
            label = _LABEL.pack(number, segment.nbytes)
            socket.send_fds(self._socket, [label], [segment.descriptor])
        except OSError as error:
            reason = error.strerror or error
            raise RouteError(f"shared memory cannot be handed over: {reason}") from error

    def close(self) -> None:
        """What was sent stays with the peer. Idempotent."""
        self._socket.close()


class Mailbox:
    """Where the peer's segments come in.

    Attributes:
        name: to be told to the peer.
        token: likewise, and to nobody else: whoever shows it is taken for the peer.

    Raises:
        RouteError: there are no such sockets here.
    """

    def __init__(self) -> None:
        self.name = f"aiocomm-mem-{secrets.token_hex(16)}"
        self.token = secrets.token_bytes(TOKEN_SIZE)
        self._socket: socket.socket | None = None
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except (AttributeError, OSError) as error:
            raise RouteError(f"descriptors cannot be passed on this system: {error}") from error
        try:
            self._listener.setblocking(False)
            self._listener.bind(b"\0" + self.name.encode())
            self._listener.listen(8)
        except OSError as error:
            self._listener.close()
            raise RouteError(f"a mailbox for memory cannot be made: {error}") from error

    def accept(self) -> None:
        """Take the courier in that has come; anybody else who came is turned away.

        Raises:
            RouteError: no courier with the token has come.
        """
        while self._socket is None:
            try:
                caller, _ = self._listener.accept()
            except OSError as error:
                raise RouteError("the peer's courier has not come to the mailbox") from error
            caller.setblocking(False)
            try:
                known = secrets.compare_digest(caller.recv(TOKEN_SIZE + 1), self.token)
            except OSError:
                known = False
            if known:
                self._socket = caller
            else:
                caller.close()
        self._listener.close()

    def collect(self) -> tuple[int, Segment] | None:
        """The next segment and its number; None where none has come.

        Raises:
            ProtocolError: what came is no segment.
            RouteError: it cannot be mapped, or this process has no descriptor left for it.
        """
        if self._socket is None:
            return None
        try:
            label, descriptors, flags, _ = socket.recv_fds(
                self._socket, _LABEL.size + 1, 8, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except OSError as error:
            raise RouteError(f"the mailbox for memory is broken: {error}") from error
        if not label and not descriptors:
            return None
        if len(label) != _LABEL.size or len(descriptors) != 1:
            for descriptor in descriptors:
                os.close(descriptor)
            if flags & socket.MSG_CTRUNC and not descriptors:
                raise RouteError("no descriptor is left here for the memory that the peer shares")
            raise ProtocolError("the peer hands over what is no memory")
        number, nbytes = _LABEL.unpack(label)
        return number, Segment.adopt(descriptors[0], nbytes)

    def close(self) -> None:
        """Idempotent; segments that were collected stay."""
        self._listener.close()
        if self._socket is not None:
            self._socket.close()
