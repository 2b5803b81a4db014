"""The record on the board: there and back, and every way it can be wrong."""

from __future__ import annotations

import json
import os

import pytest

from aiocomm.errors import AuthenticationError, ProtocolError
from aiocomm.transport.endpoint import (
    MAX_RECORD,
    Endpoint,
    configured_secret,
    host_identity,
    secret_for,
)

ENDPOINT = Endpoint("life", "boot/1", "aiocomm-x", "127.0.0.1", 4711, bytes(range(32)))


def test_a_record_comes_back_as_it_went() -> None:
    assert Endpoint.from_bytes(ENDPOINT.to_bytes()) == ENDPOINT
    assert Endpoint.from_bytes(ENDPOINT.without_unix().to_bytes()).unix == ""


def test_repr_does_not_tell_the_secret() -> None:
    assert repr(ENDPOINT) == "<Endpoint 127.0.0.1:4711 unix='aiocomm-x' incarnation='life'>"


@pytest.mark.parametrize(
    "change",
    [
        {"incarnation": 1},
        {"host_id": None},
        {"unix": "\ud800"},
        {"unix": "x" * 101},
        {"host": "localhost"},
        {"host": "x" * 1000},
        {"host": ""},
        {"port": 0},
        {"port": 65536},
        {"port": -1},
        {"port": True},
        {"port": "80"},
        {"port": None},
        {"secret": "no base64!"},
        {"secret": "A" * 400},
        {"secret": 3},
    ],
    ids=str,
)
def test_a_record_with_a_bad_field(change: dict[str, object]) -> None:
    record = json.loads(ENDPOINT.to_bytes()) | change
    with pytest.raises(ProtocolError, match=next(iter(change))):
        Endpoint.from_bytes(json.dumps(record).encode())


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"[" * 4000, "not JSON"),
        (b" " * (MAX_RECORD + 1), f"more than {MAX_RECORD}"),
    ],
)
def test_a_record_that_is_none(data: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        Endpoint.from_bytes(data)


def test_the_host_is_told_by_boot_and_network() -> None:
    boot, _, network = host_identity().partition("/")
    with open("/proc/sys/kernel/random/boot_id") as file:
        assert boot == file.read().strip()
    assert int(network) == os.stat("/proc/self/ns/net").st_ino


def test_a_configured_secret_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOCOMM_SECRET", raising=False)
    assert configured_secret() is None
    assert secret_for(ENDPOINT) == ENDPOINT.secret
    monkeypatch.setenv("AIOCOMM_SECRET", "tell nobody")
    assert secret_for(ENDPOINT) == b"tell nobody"
    monkeypatch.setenv("AIOCOMM_SECRET", "")
    assert secret_for(ENDPOINT) == ENDPOINT.secret


def test_a_secret_configured_at_the_peer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOCOMM_SECRET", raising=False)
    there = Endpoint("life", "boot/1", "", "127.0.0.1", 4711, b"")
    with pytest.raises(AuthenticationError, match="not set here"):
        secret_for(there)
