"""What the demo's processes tell one another: the settings, and the books that each end keeps.

Frozen and picklable. Knows nothing of how a figure is measured or shown.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .lag import Lag


class Direction(enum.StrEnum):
    """The two streams of messages."""

    WEIGHTS = "weights"
    TRAJECTORIES = "trajectories"


class Role(enum.IntEnum):
    """The two processes, by rank."""

    TRAINER = 0
    ROLLOUT = 1

    @property
    def sends(self) -> Direction:
        """What it sends; it receives the other."""
        return Direction.WEIGHTS if self is Role.TRAINER else Direction.TRAJECTORIES

    @property
    def receives(self) -> Direction:
        """What it receives."""
        return Direction.TRAJECTORIES if self is Role.TRAINER else Direction.WEIGHTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run.

    Args:
        steps: how many times the weights are sent.
        trajectories: messages sent back for each step.
        seed: of weights and trajectories.
        parameters: about how many the model has.
        weights: a safetensors file to send instead of the model.
        corrupt: of the weights of this step, flip one bit on arrival.
    """

    steps: int = 20
    trajectories: int = 8
    seed: int = 0
    parameters: float = 50e6
    weights: str | None = None
    corrupt: int | None = None

    def total(self, direction: Direction) -> int:
        """How many messages a direction carries."""
        return self.steps * (self.trajectories if direction is Direction.TRAJECTORIES else 1)


@dataclass(frozen=True, slots=True)
class Sent:
    """One message at its sender: its checksum, and when ``send`` was called (monotonic ns)."""

    checksum: str
    called: int


@dataclass(frozen=True, slots=True)
class Received:
    """One message at its receiver: its checksum, and when ``recv`` completed (monotonic ns)."""

    checksum: str
    completed: int


@dataclass(frozen=True, slots=True)
class Carried:
    """Messages and payload bytes that one route carried."""

    messages: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """What one process did.

    Args:
        role: which one.
        address: of the worker.
        pid: of the process.
        loop: module and class of its event loop.
        sent: by number of the message.
        received: by number of the message.
        routes: what its sends went by, as the group's statistics say.
        threads: least and most native threads, since the last route was set up.
        lag: of its event loop.
    """

    role: Role
    address: str
    pid: int
    loop: str
    sent: tuple[Sent, ...]
    received: tuple[Received, ...]
    routes: dict[str, Carried]
    threads: tuple[int, int]
    lag: Lag
