"""What lies on a TCP board beside the values, and how a write finds those who wait for it.

It may not know threads or futures: plain calls on one connection.

Nobody polls, and a write wakes only those who wait for its key. A waiter adds a token to the list
``await/<key>`` and then looks at the key; a writer reads that list, writes the key's name into
``log/<watcher>`` of each token, then the value and ``wake/<watcher>`` in one message, and then
takes the list to see who came in between. Whichever order the server sees, one finds the other.
The name goes before the value so that a writer that dies in between leaves a hint too many at most.
``compare_set`` with a value that no key has is torch's only read that neither waits nor fails.

A server that closes says so: it adds ``GOODBYE`` to the log of every watcher on the list
``watchers``, wakes it, and waits a while until the list is empty.

Rejected: deleting the list of tokens when a key is written (a waiter may just have come in;
emptying it by comparison cannot miss one), and reading with torch's ``get``, which waits.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .connect import Client

PREFIX = "aiocomm/"
WATCHERS = f"{PREFIX}watchers"
GOODBYE = ""
"""In a log, where no key is empty: the server closes."""

GOODBYE_STEP = 0.002
"""Seconds between looks at who is left: torch's wait would print a warning at its time-out."""

_NOBODY = secrets.token_hex(16)


def value_of(key: str) -> str:
    return f"{PREFIX}value/{key}"


def await_of(key: str) -> str:
    return f"{PREFIX}await/{key}"


def log_of(watcher: str) -> str:
    return f"{PREFIX}log/{watcher}"


def wake_of(watcher: str) -> str:
    return f"{PREFIX}wake/{watcher}"


def read(store: Client, name: str) -> bytes | None:
    """The value of a key, or None; one round trip that never waits."""
    found = bytes(store.compare_set(name, _NOBODY, _NOBODY))
    return None if found == _NOBODY.encode() else found


def take(store: Client, name: str) -> bytes:
    """Read a text and empty it, atomically; its entries are unique, so equality means unchanged."""
    seen = read(store, name) or b""
    while seen:
        now = bytes(store.compare_set(name, seen.decode(), ""))
        if not now:
            return seen
        seen = now
    return b""


def tokens(text: bytes | None) -> frozenset[str]:
    return frozenset(token for token in (text or b"").decode().split(";") if token)


def hint(store: Client, key: str, tokens: Iterable[str]) -> list[str]:
    """Tell the watchers of these tokens which key to look at; returns their names."""
    watchers = sorted({token.partition(".")[0] for token in tokens})
    for name in watchers:
        store.append(log_of(name), f"{key}\0")
    return watchers


def take_log(store: Client, watcher: str) -> frozenset[str]:
    """Read and empty what was told to a watcher: keys, or ``GOODBYE``."""
    return frozenset(take(store, log_of(watcher)).decode().split("\0")[:-1])


def enter(store: Client, watcher: str) -> None:
    """Put a watcher on the list of those to whom the server says goodbye."""
    store.append(WATCHERS, f"{watcher};")


def leave(store: Client, watcher: str) -> None:
    """Take a watcher off the list; nothing happens if it is not on it."""
    seen = (read(store, WATCHERS) or b"").decode()
    while f"{watcher};" in seen:
        left = seen.replace(f"{watcher};", "")
        now = bytes(store.compare_set(WATCHERS, seen, left)).decode()
        if now == left:
            return
        seen = now


def say_goodbye(store: Client, timeout: float) -> None:
    """Tell all watchers that the server closes; wait so many seconds until they have left."""
    names = tokens(read(store, WATCHERS))
    for name in names:
        store.append(log_of(name), f"{GOODBYE}\0")
        store.set(wake_of(name), "")
    deadline = time.monotonic() + timeout
    while names & tokens(read(store, WATCHERS)) and time.monotonic() < deadline:
        time.sleep(GOODBYE_STEP)
