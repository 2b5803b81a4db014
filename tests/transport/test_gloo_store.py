"""The store of a Gloo pair: keys of both sides, waits that end, and a peer that lies."""

from __future__ import annotations

import threading

import pytest

from aiocomm.errors import ProtocolError, RouteError
from aiocomm.transport.gloo_store import MAX_KEYS, MAX_VALUE, LinkStore, PairRecord


class TestLinkStore:
    def test_own_and_foreign_keys(self):
        published = []
        store = LinkStore(lambda *pair: published.append(pair), timeout=0.0)
        store.set("mine", "text")
        store.deliver("theirs", b"1")
        assert published == [("mine", b"text")]
        assert (store.get("mine"), store.get("theirs")) == (b"text", b"1")
        assert store.check(["mine", "theirs"])
        assert not store.check(["mine", "nobody's"])
        with pytest.raises(TimeoutError):
            store.wait(["nobody's"])
        assert isinstance(store.failure, TimeoutError)

    def test_waits_end_when_a_key_comes_and_when_it_is_given_up(self):
        store = LinkStore(lambda *_: None, timeout=60.0)
        outcomes: list[object] = []

        def wait(key: str) -> None:
            try:
                outcomes.append(store.get(key))
            except Exception as error:
                outcomes.append(error)

        for key, end in (("a", lambda: store.deliver("a", b"1")), ("b", None)):
            thread = threading.Thread(target=wait, args=(key,))
            thread.start()
            if end is not None:
                end()
            else:
                store.abort(RouteError("enough"))
            thread.join(10)
        assert outcomes[0] == b"1"
        assert str(outcomes[1].__cause__) == "enough"

    def test_a_peer_cannot_fill_it(self):
        store = LinkStore(lambda *_: None, timeout=1.0)
        with pytest.raises(ProtocolError):
            store.deliver("large", bytes(MAX_VALUE + 1))
        for number in range(MAX_KEYS):
            store.deliver(str(number), b"")
        store.deliver("0", b"again")
        with pytest.raises(ProtocolError):
            store.deliver("one more", b"")

    @pytest.mark.parametrize("blob", [b"", bytes(40), b"\xff" * 170, bytes(170), bytes(1000)])
    def test_unknown_layout_is_said(self, blob):
        with pytest.raises(RouteError, match="Gloo address"):
            PairRecord.parse(blob)
