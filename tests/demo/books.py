"""Books of an imagined run, for the tests of what is made of them."""

from __future__ import annotations

from aiocomm.demo.lag import Lag
from aiocomm.demo.records import Books, Carried, Received, Role, Sent, Settings

MS = 1_000_000
SETTINGS = Settings(steps=2, trajectories=2)


def books(
    role: Role, sent: list[tuple[str, int]], received: list[tuple[str, int]], nbytes: int = 1000
) -> Books:
    """Books with these checksums and times in ms."""
    return Books(
        role=role,
        address=f"worker:{role}",
        pid=100 + role,
        loop="uvloop.Loop",
        sent=tuple(Sent(digest, at * MS) for digest, at in sent),
        received=tuple(Received(digest, at * MS) for digest, at in received),
        routes={"gloo": Carried(len(sent), nbytes)} if sent else {},
        threads=(7, 7) if role is Role.TRAINER else (7, 9),
        lag=Lag(10, 0.0001, 0.0002, 0.003),
    )


def run_of(received: list[tuple[str, int]]) -> list[Books]:
    """A trainer that sent weights a and b, and a rollout that received these."""
    trajectories = [("p", 12), ("q", 13), ("r", 50), ("s", 51)]
    arrived = [(digest, at + 2) for digest, at in trajectories]
    return [
        books(Role.TRAINER, [("a", 0), ("b", 40)], arrived),
        books(Role.ROLLOUT, trajectories, received),
    ]
