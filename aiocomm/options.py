"""What may be tuned, in one frozen place, with units.

Every default was chosen by measurement or by the reason that stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from .errors import UsageError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
LONGEST_STALL = 7 * 86400.0
LONGEST_INTERVAL = 86400.0  # of heartbeats: no handshake takes more
MOST_MESSAGES, MOST_BYTES = 2**32 - 1, 2**64 - 1  # of a window: what its frame can say
_SIZES = ("eager_limit", "window_bytes", "window_messages", "prefetch_bytes", "shm_bytes")
_CHOICES = (
    *("route", "device", "device_route", "nccl_min_ctas", "nccl_max_ctas"),
    "high_priority",
)
LEAST_SHM = 16 * KIB
DEVICE_ROUTES = ("nccl", "cuda_ipc", "staged")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of one runtime; the defaults suit workers on one host or one network.

    Args:
        eager_limit: messages up to this many bytes ride inside the envelope; where the two share
            memory, at most 16 KiB do, since more is quicker there.
        window_bytes: bytes of eager messages that may wait unreceived at the peer per direction;
            past that, sends wait.
        window_messages: the same, in messages, and how many bulk messages may wait there.
        prefetch_bytes: bytes of bulk messages that are taken in before a ``recv`` asks for them.
        shm_bytes: bytes of shared memory that each sending direction to a worker on the same host
            may take. Only what messages have touched is really taken, and what is not used for a
            minute is let go of. A message that finds no room waits, or goes in parts.
        connect_timeout: seconds to wait for the peer to appear and answer.
        heartbeat_interval: seconds between heartbeats on an idle link.
        peer_timeout: seconds of silence after which the peer is taken for lost. The death of a
            process is seen at once and that of a host by the kernel's keep-alive; this one is for
            peers that hang, so it must be longer than the longest stall of a healthy event loop.
        stall_timeout: seconds that a chunk of a bulk message may take on the gloo (16 MiB) or nccl
            (64 MiB) route, once both ends are at it, or that a device may take to come to a copy;
            then the direction is broken. For so long Gloo may hold the chunk in which a peer died,
            and its threads, past ``aclose`` too: nothing but its own time-out ends that. A busy
            loop delays the start of a chunk, so this too must be longer than the longest stall of
            a healthy one.
        close_timeout: seconds that ``aclose`` gives pending sends to reach the peer.
        route: carry every bulk message by this route (``"shm"``, ``"gloo"``, ``"link"``), for tests
            and diagnosis; None chooses by placement.
        device: index of the CUDA device on which received tensors are made; None takes the current
            device of the loop's thread when the first one arrives.
        device_route: carry every bulk message of CUDA tensors by this route (``"nccl"``,
            ``"cuda_ipc"``, ``"staged"``); None chooses by placement.
        nccl_min_ctas: thread blocks that an operation of the nccl route takes at least; None leaves
            it to NCCL.
        nccl_max_ctas: the same, at most. Fewer leave more of the chip to the computation beside it.
        high_priority: the streams of the nccl route go before those of the computation.
    """

    eager_limit: int = 64 * KIB
    window_bytes: int = 16 * MIB
    window_messages: int = 1024
    prefetch_bytes: int = 256 * MIB
    shm_bytes: int = GIB
    connect_timeout: float = 300.0
    heartbeat_interval: float = 1.0
    peer_timeout: float = 30.0
    stall_timeout: float = 40.0
    close_timeout: float = 10.0
    route: str | None = None
    device: int | None = None
    device_route: str | None = None
    nccl_min_ctas: int | None = None
    nccl_max_ctas: int | None = None
    high_priority: bool = False

    def __post_init__(self) -> None:
        self._check_kinds()
        for name in ("eager_limit", "prefetch_bytes"):
            if getattr(self, name) < 0:
                raise UsageError(f"option {name} is {getattr(self, name)!r}: give 0 or more bytes")
        for name in (
            "window_bytes",
            "window_messages",
            "connect_timeout",
            "heartbeat_interval",
            "peer_timeout",
            "stall_timeout",
            "close_timeout",
        ):
            if not getattr(self, name) > 0:
                raise UsageError(f"option {name} is {getattr(self, name)!r}: give more than 0")
        if not self.stall_timeout <= LONGEST_STALL:
            raise UsageError(
                f"option stall_timeout is {self.stall_timeout!r}: at most {LONGEST_STALL:g} s, "
                "Gloo cannot count further"
            )
        for name, most in (
            ("heartbeat_interval", LONGEST_INTERVAL),
            ("window_messages", MOST_MESSAGES),
            ("window_bytes", MOST_BYTES),
        ):
            if getattr(self, name) > most:
                raise UsageError(f"option {name} is {getattr(self, name)!r}: at most {most} works")
        if self.shm_bytes < LEAST_SHM:
            raise UsageError(f"option shm_bytes is {self.shm_bytes!r}: give at least {LEAST_SHM}")
        if self.eager_limit > 8 * MIB:
            raise UsageError(f"option eager_limit is {self.eager_limit}: at most 8 MiB fit a frame")
        if self.route not in (None, "shm", "gloo", "link"):
            raise UsageError(f"option route is {self.route!r}: give 'shm', 'gloo', 'link' or None")
        self._check_device()

    def _check_device(self) -> None:
        if self.device_route not in (None, *DEVICE_ROUTES):
            known = ", ".join(map(repr, DEVICE_ROUTES))
            raise UsageError(f"option device_route is {self.device_route!r}: give {known} or None")
        for name, least in (("device", 0), ("nccl_min_ctas", 1), ("nccl_max_ctas", 1)):
            value = getattr(self, name)
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < least
            ):
                raise UsageError(f"option {name} is {value!r}: give {least} or more, or None")
        if None not in (self.nccl_min_ctas, self.nccl_max_ctas) and (
            self.nccl_min_ctas > self.nccl_max_ctas  # type: ignore[operator]
        ):
            raise UsageError(
                f"option nccl_min_ctas is {self.nccl_min_ctas}, more than nccl_max_ctas, "
                f"{self.nccl_max_ctas}: give less"
            )
        if not isinstance(self.high_priority, bool):
            raise UsageError(f"option high_priority is {self.high_priority!r}: give True or False")

    def _check_kinds(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _CHOICES:
                continue
            if field.name in _SIZES:
                fit = isinstance(value, int) and not isinstance(value, bool)
                wanted = "an integer"
            else:
                fit = isinstance(value, int | float) and not isinstance(value, bool)
                wanted = "a number of seconds"
            if not fit:
                raise UsageError(f"option {field.name} is {value!r}: give {wanted}")
