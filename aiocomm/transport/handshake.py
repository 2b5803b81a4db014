"""How two ends of a connection prove to each other that they know the secret, without I/O.

::

    acceptor  -> magic, version, nonce
    dialer    -> nonce, proof, length, hello           proof: HMAC-SHA256 over all that went before
    acceptor  -> proof, verdict, length, answer        answer: a hello, or why it refuses

Either side's nonce is in both proofs, so nothing recorded can be replayed, and each proof names its
direction, so nothing can be reflected. Besides fixed-size fields, which are bounded before they are
believed, nothing is interpreted before its proof holds. The machines take bytes in any pieces and
say what to write; they know no socket, clock or event loop.

Rejected: TLS (certificates for workers that live minutes; who needs secrecy on the wire runs over a
network that has it), and pickle in the hello.
"""

from __future__ import annotations

import hmac
import json
import secrets
import struct
from dataclasses import asdict
from typing import Final

from ..errors import AuthenticationError, HandshakeError, Refusal, RefusedError
from .base import Hello

PREAMBLE: Final = b"aiocomm\x01"
"""Magic and version of the handshake; the version counts up with any change of it."""

NONCE_SIZE: Final = 32
PROOF_SIZE: Final = 32
MAX_HELLO: Final = 16 * 1024
"""Bytes of a hello or an answer, at most."""

GREETING_SIZE: Final = len(PREAMBLE) + NONCE_SIZE

_LENGTH: Final = struct.Struct(">I")
_VERDICT: Final = struct.Struct(">BI")
_CLAIM_SIZE: Final = NONCE_SIZE + PROOF_SIZE + _LENGTH.size
_ANSWER_SIZE: Final = PROOF_SIZE + _VERDICT.size
_WELCOME: Final = 1
_REFUSED: Final = 2
_DENIED: Final = 3  # the proof did not hold; carries no proof itself

_TEXTS: Final = ("group", "sender", "recipient", "incarnation", "target")
MAX_TEXT: Final = 2048
"""Bytes of JSON that each text of a hello may take."""

_MAX_SECONDS: Final = 86400.0


def _proof(secret: bytes, direction: bytes, *parts: bytes) -> bytes:
    mac = hmac.new(secret, PREAMBLE + direction, "sha256")
    for part in parts:
        mac.update(_LENGTH.pack(len(part)))
        mac.update(part)
    return mac.digest()


def encode_hello(hello: Hello) -> bytes:
    """The hello as bytes.

    Raises:
        HandshakeError: a name in it is too long.
    """
    fields = asdict(hello)
    for name in _TEXTS:
        # Bounded so that a hello, and the answer that swaps its names, always fit.
        if len(json.dumps(fields[name])) > MAX_TEXT:
            raise HandshakeError(
                f"the {name} {fields[name][:40]!r}... is too long for a hello, {MAX_TEXT} bytes "
                "fit: give a shorter name"
            )
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_hello(data: bytes) -> Hello:
    """Read and check a hello whose proof holds.

    Raises:
        HandshakeError: it is not one.
    """
    fields = _read_object(data)
    texts = {}
    for name in _TEXTS:
        text = fields.get(name)
        if not isinstance(text, str) or len(json.dumps(text)) > MAX_TEXT:
            raise HandshakeError(f"the peer's hello has no usable {name!r}")
        texts[name] = text
    heartbeat = fields.get("heartbeat")
    if (
        isinstance(heartbeat, bool)
        or not isinstance(heartbeat, int | float)
        or not 0 < heartbeat <= _MAX_SECONDS
    ):
        raise HandshakeError("the peer's hello has no usable 'heartbeat'")
    return Hello(**texts, heartbeat=float(heartbeat))


def _read_object(data: bytes) -> dict[str, object]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise HandshakeError("the peer's hello is not JSON") from error
    if not isinstance(fields, dict):
        raise HandshakeError("the peer's hello is not a JSON object")
    return fields


def _too_long(size: int) -> HandshakeError:
    return HandshakeError(
        f"the peer announces a hello of {size} bytes, at most {MAX_HELLO} are due"
    )


DENIAL: Final = bytes(PROOF_SIZE) + _VERDICT.pack(_DENIED, 0)
"""What the acceptor writes to one who does not know the secret; it proves nothing itself."""


class Acceptor:
    """The end that was dialled: write ``greeting``, feed what comes until it returns a hello.

    Attributes:
        greeting: the bytes that open the connection.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._received = bytearray()
        self._transcript: tuple[bytes, ...] = ()
        self.greeting = PREAMBLE + secrets.token_bytes(NONCE_SIZE)

    def receive(self, data: bytes | memoryview) -> Hello | None:
        """Take bytes of the dialer; returns its hello once that is whole and its proof holds.

        Raises:
            AuthenticationError: the dialer does not know the secret; write ``DENIAL`` and close.
            HandshakeError: what came is no hello; close.
        """
        received = self._received
        received += data
        if len(received) < _CLAIM_SIZE:
            return None
        (size,) = _LENGTH.unpack_from(received, _CLAIM_SIZE - _LENGTH.size)
        if size > MAX_HELLO:
            raise _too_long(size)
        if len(received) < _CLAIM_SIZE + size:
            return None
        if len(received) > _CLAIM_SIZE + size:
            raise HandshakeError("the peer went on before it was welcome")
        nonce = bytes(received[:NONCE_SIZE])
        proof = bytes(received[NONCE_SIZE : NONCE_SIZE + PROOF_SIZE])
        hello = bytes(received[_CLAIM_SIZE:])
        due = _proof(self._secret, b"dial", self.greeting, nonce, hello)
        if not hmac.compare_digest(proof, due):
            raise AuthenticationError(
                "a peer that dialled does not know the secret: set the same AIOCOMM_SECRET on both "
                "sides, or on none"
            )
        self._transcript = (self.greeting, nonce, hello)
        return decode_hello(hello)

    def welcome(self, hello: Hello) -> bytes:
        """The bytes that accept the link; frames follow them."""
        return self._answer(_WELCOME, encode_hello(hello))

    def refuse(self, code: Refusal, text: str = "") -> bytes:
        """The bytes that refuse the link; the connection is closed after them."""
        body = {"code": code.value, "text": text[:MAX_TEXT]}
        return self._answer(_REFUSED, json.dumps(body).encode())

    def _answer(self, verdict: int, body: bytes) -> bytes:
        head = _VERDICT.pack(verdict, len(body))
        return _proof(self._secret, b"accept", *self._transcript, head, body) + head + body


class Dialer:
    """The end that dials: feed what comes, write what it returns, until ``answer`` is there.

    Attributes:
        answer: the acceptor's hello once it welcomed this side.
        rest: bytes of frames that came right behind the answer.
    """

    def __init__(self, secret: bytes, hello: Hello) -> None:
        self._secret = secret
        self._hello = encode_hello(hello)
        self._received = bytearray()
        self._transcript: tuple[bytes, ...] = ()
        self.answer: Hello | None = None
        self.rest = b""

    @property
    def started(self) -> bool:
        """Whether the acceptor has greeted and was answered."""
        return bool(self._transcript)

    def receive(self, data: bytes | memoryview) -> bytes:
        """Take bytes of the acceptor; returns the bytes to write, if any.

        Raises:
            AuthenticationError: the two do not share a secret.
            RefusedError: the acceptor refuses the link.
            HandshakeError: the other end does not speak this protocol.
        """
        received = self._received
        received += data
        if not self._transcript:
            known = bytes(received[: len(PREAMBLE)])
            if not PREAMBLE.startswith(known):
                raise HandshakeError(
                    f"the other end opens with {known!r} where {PREAMBLE!r} is due: it is no "
                    "aiocomm worker, or one of another version"
                )
            if len(received) < GREETING_SIZE:
                return b""
            greeting = bytes(received[:GREETING_SIZE])
            del received[:GREETING_SIZE]
            return self._claim(greeting)
        self._read_answer()
        return b""

    def _claim(self, greeting: bytes) -> bytes:
        nonce = secrets.token_bytes(NONCE_SIZE)
        self._transcript = (greeting, nonce, self._hello)
        proof = _proof(self._secret, b"dial", *self._transcript)
        return nonce + proof + _LENGTH.pack(len(self._hello)) + self._hello

    def _read_answer(self) -> None:
        received = self._received
        if len(received) < _ANSWER_SIZE:
            return
        verdict, size = _VERDICT.unpack_from(received, PROOF_SIZE)
        if verdict == _DENIED:
            raise AuthenticationError(
                "the peer says that this side does not know its secret: set the same "
                "AIOCOMM_SECRET on both sides, or on none"
            )
        if size > MAX_HELLO:
            raise _too_long(size)
        end = _ANSWER_SIZE + size
        if len(received) < end:
            return
        head, body = bytes(received[PROOF_SIZE:_ANSWER_SIZE]), bytes(received[_ANSWER_SIZE:end])
        due = _proof(self._secret, b"accept", *self._transcript, head, body)
        if not hmac.compare_digest(bytes(received[:PROOF_SIZE]), due):
            raise AuthenticationError(
                "the peer does not know the secret: set the same AIOCOMM_SECRET on both sides, or "
                "on none"
            )
        self.rest = bytes(received[end:])
        if verdict == _REFUSED:
            raise _read_refusal(body)
        if verdict != _WELCOME:
            raise HandshakeError(f"the peer answers with an unknown verdict, {verdict}")
        self.answer = decode_hello(body)


def _read_refusal(body: bytes) -> HandshakeError:
    fields = _read_object(body)
    try:
        code = Refusal(fields.get("code"))
    except ValueError:
        return HandshakeError(f"the peer refuses the link for {str(fields.get('code'))[:100]!r}")
    text = fields.get("text")
    return RefusedError(code, text if isinstance(text, str) else "")
