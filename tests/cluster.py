"""One local Ray for the whole test run, and how to tell what is Ray's from what is ours.

Started by the first test that is marked ``ray``; conftest.py puts those last, so that no other runs
beside it. It uses loopback and keeps its files in a folder that goes with it; ``stop`` fails if a
process of it is left. Ray keeps connections to actors that a test made, which are no leak of ours:
they are told by family and ports (gRPC makes IPv6 sockets, to ports that Ray's processes serve on
every interface; aiocomm does neither in these tests). Rejected: no check of sockets while Ray runs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

import ray
import ray._private.state

HOST = "127.0.0.2"  # Ray takes 127.0.0.1 to mean "find the interface"
NAMESPACE = "tests"
CPUS = 2

_LONGEST = 40  # characters of the folder's name: Ray makes Unix sockets deep in it
_END = 10.0  # seconds for Ray's processes to end
_WILDCARD = "0" * 32
_TABLE = Path("/proc/self/net/tcp6")
_LISTEN = "0A"

_ports: set[str] = set()  # hexadecimal, as in the kernel's table


def start(folder: str) -> Path:
    """Start Ray with its files below the folder; returns where they are."""
    if len(folder) > _LONGEST:
        folder = "/tmp"
    place = Path(tempfile.mkdtemp(prefix="ray", dir=folder))
    # No token in the user's home, nothing sent anywhere, and no other cluster by accident.
    os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    os.environ.pop("RAY_ADDRESS", None)
    ray.init(
        address="local",
        num_cpus=CPUS,
        namespace=NAMESPACE,
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=False,
        object_store_memory=256 << 20,
        _node_ip_address=HOST,
        _temp_dir=str(place),
    )
    return place


def stop(place: Path) -> None:
    """End Ray and see that all of it has ended."""
    processes = _descendants(os.getpid(), str(place))
    ray.shutdown()
    deadline = time.monotonic() + _END
    while left := [pid for pid in processes if _runs(pid)]:
        if time.monotonic() > deadline:
            raise AssertionError(f"Ray left processes behind: {left}")
        time.sleep(0.02)  # nothing signals the end of a grandchild
    shutil.rmtree(place)


def actors() -> frozenset[str]:
    """Every actor that is not dead, by name or class and id; none while Ray does not run."""
    if not ray.is_initialized():
        return frozenset()
    found = ray._private.state.actors().values()
    return frozenset(
        f"{each['Name'] or each['ActorClassName']} {each['ActorID']}"
        for each in found
        if each["State"] != "DEAD"
    )


def sockets() -> frozenset[str]:
    """The sockets of Ray, as ``leaks`` writes them, among all of this network namespace."""
    rows = [line.split() for line in _TABLE.read_text().splitlines()[1:]]
    ends = [(row[1].split(":"), row[2].split(":"), row[3], row[9]) for row in rows]
    _ports.update(local[1] for local, _, state, _ in ends if (local[0], state) == _SERVING)
    return frozenset(
        f"socket:[{inode}]"
        for local, remote, _, inode in ends
        if local[1] in _ports or remote[1] in _ports
    )


_SERVING = (_WILDCARD, _LISTEN)


def _descendants(root: int, place: str) -> list[int]:
    """Processes below this one that have Ray's folder in their command line or environment."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            text = (entry / "stat").read_text()
            parents[int(entry.name)] = int(text.rpartition(")")[2].split()[1])
    found = []
    for pid in parents:
        above = pid
        while above in parents and above != root:
            above = parents[above]
        if above == root and pid != root and place in _words(pid):
            found.append(pid)
    return found


def _words(pid: int) -> str:
    words = b""
    for name in ("cmdline", "environ"):
        with contextlib.suppress(OSError):
            words += Path(f"/proc/{pid}/{name}").read_bytes()
    return words.decode(errors="replace")


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
