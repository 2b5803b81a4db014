"""The handshake without I/O: proofs, pieces, lies of every kind."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from aiocomm.errors import AuthenticationError, HandshakeError, Refusal, RefusedError
from aiocomm.transport.base import Hello
from aiocomm.transport.handshake import (
    DENIAL,
    GREETING_SIZE,
    MAX_HELLO,
    NONCE_SIZE,
    PREAMBLE,
    PROOF_SIZE,
    Acceptor,
    Dialer,
    decode_hello,
    encode_hello,
)

HELLO = Hello(group="g", sender="a:0", recipient="b:0", incarnation="x", target="y", heartbeat=0.5)
ANSWER = Hello(group="g", sender="b:0", recipient="a:0", incarnation="y", target="x")
CLAIM = NONCE_SIZE + PROOF_SIZE + 4


def claim_of(dialer: Dialer, acceptor: Acceptor) -> bytes:
    return dialer.receive(acceptor.greeting)


@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_both_sides_learn_of_each_other(piece: int) -> None:
    acceptor, dialer = Acceptor(b"secret"), Dialer(b"secret", HELLO)
    claim = b""
    assert not dialer.started
    for start in range(0, GREETING_SIZE, piece):
        claim += dialer.receive(acceptor.greeting[start : start + piece])
    assert dialer.started
    heard = None
    for start in range(0, len(claim), piece):
        assert heard is None
        heard = acceptor.receive(claim[start : start + piece])
    assert heard == HELLO
    answer = acceptor.welcome(ANSWER)
    for start in range(0, len(answer), piece):
        assert dialer.answer is None
        assert dialer.receive(answer[start : start + piece]) == b""
    assert dialer.answer == ANSWER
    assert dialer.rest == b""


def test_frames_right_behind_the_answer_are_kept() -> None:
    acceptor, dialer = Acceptor(b"secret"), Dialer(b"secret", HELLO)
    acceptor.receive(claim_of(dialer, acceptor))
    dialer.receive(acceptor.welcome(ANSWER) + b"frames")
    assert dialer.rest == b"frames"


def test_a_dialer_without_the_secret() -> None:
    acceptor, dialer = Acceptor(b"secret"), Dialer(b"guess", HELLO)
    with pytest.raises(AuthenticationError, match="AIOCOMM_SECRET"):
        acceptor.receive(claim_of(dialer, acceptor))
    with pytest.raises(AuthenticationError, match="AIOCOMM_SECRET"):
        dialer.receive(DENIAL)
    assert dialer.answer is None


def test_an_acceptor_without_the_secret() -> None:
    acceptor, dialer = Acceptor(b"secret"), Dialer(b"secret", HELLO)
    acceptor.receive(claim_of(dialer, acceptor))
    acceptor._secret = b"guess"
    with pytest.raises(AuthenticationError):
        dialer.receive(acceptor.welcome(ANSWER))
    assert dialer.answer is None


def test_the_hello_is_not_read_before_it_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    acceptor, dialer = Acceptor(b"secret"), Dialer(b"guess", HELLO)
    monkeypatch.setattr("aiocomm.transport.handshake.json.loads", lambda data: pytest.fail("read"))
    with pytest.raises(AuthenticationError):
        acceptor.receive(claim_of(dialer, acceptor))


def test_a_recorded_claim_proves_nothing_to_another_connection() -> None:
    first, dialer = Acceptor(b"secret"), Dialer(b"secret", HELLO)
    recorded = claim_of(dialer, first)
    assert first.receive(recorded) == HELLO
    with pytest.raises(AuthenticationError):
        Acceptor(b"secret").receive(recorded)


def test_a_recorded_answer_proves_nothing_to_another_connection() -> None:
    acceptor, dialer = Acceptor(b"secret"), Dialer(b"secret", HELLO)
    acceptor.receive(claim_of(dialer, acceptor))
    recorded = acceptor.welcome(ANSWER)
    other = Dialer(b"secret", HELLO)
    other.receive(acceptor.greeting)
    with pytest.raises(AuthenticationError):
        other.receive(recorded)


def test_a_claim_sent_back_is_no_answer() -> None:
    acceptor, dialer = Acceptor(b"secret"), Dialer(b"secret", HELLO)
    claim = claim_of(dialer, acceptor)
    proof = claim[NONCE_SIZE : NONCE_SIZE + PROOF_SIZE]
    hello = claim[CLAIM:]
    with pytest.raises(AuthenticationError):
        dialer.receive(proof + b"\x01" + len(hello).to_bytes(4, "big") + hello)


@pytest.mark.parametrize("place", [0, NONCE_SIZE, CLAIM, -1])
def test_a_claim_changed_on_the_way(place: int) -> None:
    acceptor, dialer = Acceptor(b"secret"), Dialer(b"secret", HELLO)
    claim = bytearray(claim_of(dialer, acceptor))
    claim[place] ^= 1
    with pytest.raises(AuthenticationError):
        acceptor.receive(bytes(claim))


def test_a_verdict_changed_on_the_way() -> None:
    acceptor, dialer = Acceptor(b"secret"), Dialer(b"secret", HELLO)
    acceptor.receive(claim_of(dialer, acceptor))
    answer = bytearray(acceptor.refuse(Refusal.CROSSED))
    answer[PROOF_SIZE] = 1
    with pytest.raises(AuthenticationError):
        dialer.receive(bytes(answer))


def test_an_oversized_hello_is_refused_by_its_length_alone() -> None:
    acceptor = Acceptor(b"secret")
    claim = bytes(NONCE_SIZE + PROOF_SIZE)
    with pytest.raises(HandshakeError, match=str(MAX_HELLO + 1)):
        acceptor.receive(claim + (MAX_HELLO + 1).to_bytes(4, "big"))


def test_an_oversized_answer_is_refused_by_its_length_alone() -> None:
    acceptor, dialer = Acceptor(b"secret"), Dialer(b"secret", HELLO)
    dialer.receive(acceptor.greeting)
    with pytest.raises(HandshakeError, match="announces"):
        dialer.receive(bytes(PROOF_SIZE) + b"\x01\xff\xff\xff\xff")


def test_going_on_before_the_welcome_is_refused() -> None:
    acceptor, dialer = Acceptor(b"secret"), Dialer(b"secret", HELLO)
    with pytest.raises(HandshakeError, match="before it was welcome"):
        acceptor.receive(claim_of(dialer, acceptor) + b"!")


@pytest.mark.parametrize("code", list(Refusal))
def test_every_refusal_arrives_with_code_and_text(code: Refusal) -> None:
    acceptor, dialer = Acceptor(b"secret"), Dialer(b"secret", HELLO)
    acceptor.receive(claim_of(dialer, acceptor))
    with pytest.raises(RefusedError, match="because") as caught:
        dialer.receive(acceptor.refuse(code, "because"))
    assert caught.value.code is code


def test_a_refusal_of_a_later_version() -> None:
    acceptor, dialer = Acceptor(b"secret"), Dialer(b"secret", HELLO)
    acceptor.receive(claim_of(dialer, acceptor))
    with pytest.raises(HandshakeError, match="moonlight"):
        dialer.receive(acceptor._answer(2, json.dumps({"code": "moonlight"}).encode()))


def test_an_unknown_verdict() -> None:
    acceptor, dialer = Acceptor(b"secret"), Dialer(b"secret", HELLO)
    acceptor.receive(claim_of(dialer, acceptor))
    with pytest.raises(HandshakeError, match="verdict, 9"):
        dialer.receive(acceptor._answer(9, b""))


@pytest.mark.parametrize("opening", [b"HTTP/1.1 400", PREAMBLE[:-1] + b"\x02", b"\0", b"aioX"])
def test_something_else_answers(opening: bytes) -> None:
    with pytest.raises(HandshakeError, match="no aiocomm worker"):
        Dialer(b"secret", HELLO).receive(opening)


def test_hello_comes_back_as_it_went() -> None:
    odd = replace(HELLO, group='q"\\\n\u00e9\U0001f600', heartbeat=3.0)
    assert decode_hello(encode_hello(odd)) == odd


@pytest.mark.parametrize("name", ["group", "sender", "recipient", "incarnation"])
def test_a_name_too_long_is_refused_by_name(name: str) -> None:
    long = replace(HELLO, **{name: "\U0001f600" * 2000})
    with pytest.raises(HandshakeError, match=f"the {name} .* shorter"):
        encode_hello(long)


def test_the_longest_hello_fits() -> None:
    long = "n" * 2046
    hello = Hello(
        group=long, sender=long, recipient=long, incarnation=long, target=long, heartbeat=1 / 3
    )
    assert len(encode_hello(hello)) <= MAX_HELLO
    assert decode_hello(encode_hello(hello)) == hello


@pytest.mark.parametrize(
    "change",
    [
        {"group": 3},
        {"group": None},
        {"sender": "x" * 5000},
        {"heartbeat": 0},
        {"heartbeat": -1.0},
        {"heartbeat": True},
        {"heartbeat": float("nan")},
        {"heartbeat": float("inf")},
        {"heartbeat": 10**400},
        {"heartbeat": "1"},
        {"target": None},
    ],
    ids=str,
)
def test_a_hello_with_a_bad_field(change: dict[str, object]) -> None:
    fields = json.loads(encode_hello(HELLO)) | change
    with pytest.raises(HandshakeError, match=next(iter(change))):
        decode_hello(json.dumps(fields).encode())


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xfe", b"[]", b"null", b"3", b"{", b"[" * 9000, b"1" * 5000]
)
def test_a_hello_that_is_none(data: bytes) -> None:
    with pytest.raises(HandshakeError, match="JSON"):
        decode_hello(data)


def test_every_connection_has_a_nonce_of_its_own() -> None:
    assert Acceptor(b"s").greeting != Acceptor(b"s").greeting
    assert len(Acceptor(b"s").greeting) == GREETING_SIZE
