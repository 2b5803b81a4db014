"""Where a worker can be dialled: the record that it puts on the board, and this host's identity.

The board is no trusted place, so a record is bounded and checked field by field when it is read.
Knows nothing of sockets or of the board.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import json
import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ..errors import AuthenticationError, ProtocolError

MAX_RECORD = 4096
"""Bytes of a record, at most."""

_MAX_TEXT = 512
_MAX_UNIX = 100
_MAX_SECRET = 256


@cache
def host_identity() -> str:
    """Name of this host and network namespace: within it abstract Unix sockets meet.

    Containers of one host share the boot id and not the namespace. Empty where it is not known.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, repr=False)
class Endpoint:
    """How to reach one worker in its present life.

    Args:
        incarnation: unique name of this life of the worker.
        host_id: ``host_identity()`` where it lives.
        unix: name of its abstract Unix socket, without the leading zero byte; empty for none.
        host: numeric address of its TCP socket.
        port: port of its TCP socket.
        secret: the secret of its links; empty where ``AIOCOMM_SECRET`` is used.
    """

    incarnation: str
    host_id: str
    unix: str
    host: str
    port: int
    secret: bytes

    def __repr__(self) -> str:
        where = f"{self.host}:{self.port}"
        return f"<Endpoint {where} unix={self.unix!r} incarnation={self.incarnation!r}>"

    def to_bytes(self) -> bytes:
        """The record for the board."""
        record = {
            "incarnation": self.incarnation,
            "host_id": self.host_id,
            "unix": self.unix,
            "host": self.host,
            "port": self.port,
            "secret": base64.b64encode(self.secret).decode(),
        }
        return json.dumps(record, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Endpoint:
        """Read a record of the board.

        Raises:
            ProtocolError: it is not one.
        """
        if len(data) > MAX_RECORD:
            raise ProtocolError(
                f"a worker's record on the board has {len(data)} bytes, more than {MAX_RECORD}"
            )
        try:
            record = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ProtocolError("a worker's record on the board is not JSON") from error
        if not isinstance(record, dict):
            raise ProtocolError("a worker's record on the board is not a JSON object")
        texts = {}
        for name in ("incarnation", "host_id", "unix", "host", "secret"):
            text = record.get(name)
            if not isinstance(text, str) or len(text) > _MAX_TEXT:
                raise ProtocolError(f"a worker's record on the board has no usable {name!r}")
            texts[name] = text
        if not texts["unix"].isascii() or len(texts["unix"]) > _MAX_UNIX:
            raise ProtocolError("a worker's record on the board has no usable 'unix'")
        port = record.get("port")
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
            raise ProtocolError("a worker's record on the board has no usable 'port'")
        return cls(
            incarnation=texts["incarnation"],
            host_id=texts["host_id"],
            unix=texts["unix"],
            host=_numeric(texts["host"]),
            port=port,
            secret=_decode_secret(texts["secret"]),
        )

    def without_unix(self) -> Endpoint:
        """The same worker, reachable by TCP only."""
        return replace(self, unix="")


def _numeric(host: str) -> str:
    try:
        ipaddress.ip_address(host)
    except ValueError as error:
        raise ProtocolError("a worker's record on the board has no numeric 'host'") from error
    return host


def _decode_secret(text: str) -> bytes:
    try:
        secret = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ProtocolError("a worker's record on the board has no usable 'secret'") from error
    if len(secret) > _MAX_SECRET:
        raise ProtocolError("a worker's record on the board has no usable 'secret'")
    return secret


def configured_secret() -> bytes | None:
    """The secret of ``AIOCOMM_SECRET``; None where it is not set or empty."""
    text = os.environ.get("AIOCOMM_SECRET")
    return text.encode("utf-8", "surrogateescape") if text else None


def secret_for(endpoint: Endpoint) -> bytes:
    """The secret to dial this endpoint with.

    Raises:
        AuthenticationError: the worker uses a configured one, and none is configured here.
    """
    secret = configured_secret() or endpoint.secret
    if not secret:
        raise AuthenticationError(
            "the peer uses AIOCOMM_SECRET and it is not set here: set the same on both sides, or "
            "on none"
        )
    return secret
