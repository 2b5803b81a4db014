"""Which loop aiocomm starts."""

from __future__ import annotations

import asyncio
import sys

import pytest
import uvloop

from aiocomm.loops import has_uvloop, new_event_loop


def test_uvloop_where_it_is_installed() -> None:
    loop = new_event_loop()
    loop.close()
    assert isinstance(loop, uvloop.Loop)
    assert has_uvloop()


def test_asyncio_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = new_event_loop()
    loop.close()
    assert isinstance(loop, asyncio.SelectorEventLoop)
    assert not has_uvloop()
