"""Which peers there are, what each needs, and what it can be measured at.

Data only; importing this imports no peer.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

OURS = "aiocomm"
FLOOR = "raw uvloop socket"
CEILING = "memcpy (memmove)"
BARE_GLOO = "bare Gloo broadcast"
SHARED = "aiocomm empty_shared"
ALIASED = "aiocomm empty_shared aliased"

BOTH = frozenset({"exchange", "stream"})
STREAM = frozenset({"stream"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the tables: a library, or one way to use it.

    Attributes:
        name: as in the tables.
        module: in this package.
        variant: what its ``Peer`` is told.
        processes: how many the benchmarks start and speak to.
        needs: modules that must be there.
        install: the command that brings them.
        does: which measurements it takes part in.
        stage: lines of one stage take turns; those that keep the machine busy while they rest have
            a stage of their own.
    """

    name: str
    module: str
    variant: str = ""
    processes: int = 2
    needs: tuple[str, ...] = ()
    install: str = ""
    does: frozenset[str] = BOTH
    stage: int = 0

    def missing(self) -> str | None:
        """Why it cannot be measured here, or None."""
        if all(importlib.util.find_spec(need) is not None for need in self.needs):
            return None
        return f"not installed: {self.install}"


RLINF = "pip install --no-deps rlinf==0.3.0 && pip install ray omegaconf hydra-core"

LINES = (
    Line(name=OURS, module="ours"),
    Line(name="aiocomm route=gloo", module="ours", variant="gloo"),
    # The sender's tensors lie in memory that the receiver can see: it copies straight out of that,
    Line(name=SHARED, module="ours", variant="shared", does=STREAM),
    # or reads it where it is.
    Line(name=ALIASED, module="ours", variant="aliased", does=STREAM),
    Line(name=FLOOR, module="raw"),
    Line(name=CEILING, module="memcpy", processes=1, does=STREAM),
    Line(name="memcpy (copy_)", module="memcpy", variant="torch", processes=1, does=STREAM),
    Line(name=BARE_GLOO, module="gloo"),
    Line(
        name="pyzmq asyncio",
        module="zeromq",
        needs=("zmq",),
        install="pip install pyzmq",
    ),
    Line(
        name="Dask comm",
        module="dask",
        needs=("distributed",),
        install="pip install distributed",
    ),
    Line(
        name="mpi4py",
        module="mpi",
        needs=("mpi4py", "numpy"),
        install="pip install mpi4py mpich",
    ),
    Line(
        name="ucxx",
        module="ucx",
        needs=("ucxx", "numpy"),
        install="pip install ucxx-cu12",
    ),
    Line(
        name="Ray actor",
        module="actor",
        processes=1,
        needs=("ray", "numpy"),
        install="pip install ray",
        stage=1,
    ),
    Line(
        name="RLinf",
        module="linf",
        processes=1,
        needs=("rlinf", "ray", "omegaconf", "hydra"),
        install=RLINF,
        stage=2,
    ),
)


def chosen(words: list[str]) -> list[Line]:
    """The lines whose names contain one of the words, and those of aiocomm; all for no words.

    Raises:
        ValueError: a word that no name contains.
    """
    for word in words:
        if not any(word.lower() in line.name.lower() for line in LINES):
            raise ValueError(
                f"no peer {word!r}: there are {', '.join(each.name for each in LINES)}"
            )
    if not words:
        return list(LINES)
    return [
        line
        for line in LINES
        if line.module == "ours" or any(word.lower() in line.name.lower() for word in words)
    ]
