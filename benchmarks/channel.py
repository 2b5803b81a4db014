"""From put to get between two actors: through a channel, and through Ray's own queue.

One actor puts into a first queue, the other gets from it and puts into a second one, from which
the first one gets: half of that round trip is a put and a get, with the clock in one process. All
kinds are used by the same lines in the same two actors, and take turns. Then fifty producers and
fifty consumers share one channel, and every item is to come exactly once.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from aiocomm.demo.figures import median

from .local_ray import local_ray
from .outcome import Outcome, ratios

if TYPE_CHECKING:
    from .harness import Settings

MIB = 1 << 20
SMALL, TENSOR = "dict", f"tensor:{MIB}"
TITLES = {SMALL: "small dict", TENSOR: "1 MiB tensor"}
QUEUE, OPEN, BOUNDED = "ray.util.queue.Queue", "aiocomm Channel", "aiocomm Channel, maxsize=100"
BAR = 5.0
PRODUCERS, CONSUMERS, ITEMS = 50, 50, 10_000


def run(settings: Settings) -> Outcome:
    """Measure; the bars are on the small dict, and on every item's coming once."""
    outcome = Outcome("from put to get between two actors", ("", "by", "us", "times aiocomm's"))
    if importlib.util.find_spec("ray") is None:
        outcome.rows.append(("Ray", "not installed: pip install ray", "", ""))
        judge(outcome, {}, None)
        return outcome
    seconds, spread = measure(settings)
    for (way, name), each in seconds.items():
        times = f"{ratios(each, seconds[OPEN, name]):.2f}"
        outcome.rows.append((TITLES[name], way, f"{median(each) * 1e6:.0f}", times))
        outcome.figures[f"{way}, {TITLES[name]}"] = each
    took, _ = spread
    title = f"{PRODUCERS} producers, {CONSUMERS} consumers"
    outcome.rows.append((title, BOUNDED, f"{took / ITEMS * 1e6:.0f}", ""))
    outcome.figures[title] = took
    judge(outcome, seconds, spread)
    return outcome


def judge(
    outcome: Outcome,
    seconds: dict[tuple[str, str], list[float]],
    spread: tuple[float, list[int]] | None,
) -> None:
    """Hold the figures to the bars; None and nothing for what was not measured."""
    faster = ratios(seconds[QUEUE, SMALL], seconds[OPEN, SMALL]) if seconds else None
    outcome.at_least("faster than ray.util.queue.Queue with a small dict", faster, BAR)
    if spread is not None:
        once = sorted(spread[1]) == list(range(ITEMS))
        outcome.bar(f"{ITEMS:,} items of {PRODUCERS} producers came exactly once", once)


def measure(
    settings: Settings,
) -> tuple[dict[tuple[str, str], list[float]], tuple[float, list[int]]]:
    """On a Ray of its own: seconds by way and payload; then seconds and items of the many."""
    import ray

    from . import channel_actors

    small, large = (30, 5) if settings.quick else (200, 20)
    cells = [
        *((way, SMALL, small) for way in (QUEUE, OPEN, BOUNDED)),
        *((way, TENSOR, large) for way in (QUEUE, OPEN, BOUNDED)),
    ]
    actors: Any = channel_actors  # whose classes Ray has wrapped
    with local_ray():
        near, far = actors.Near.remote(), actors.Far.remote()
        rounds = 3 if settings.quick else 11
        seconds = ray.get(near.compare.remote(far, cells, rounds))
        return seconds, ray.get(near.spread.remote(far))
