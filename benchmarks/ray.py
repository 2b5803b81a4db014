"""Round trips between two async Ray actors: by a call of Ray, and by aiocomm, in the same two.

The clock is in one of the actors, so a call of Ray goes from actor to actor as well, and no driver
takes part. All ways take turns. An array is what a careful user of Ray would send in the place of a
tensor; the bars are on the same object both ways.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from aiocomm.demo.figures import median

from .local_ray import local_ray
from .outcome import Outcome, ratios

if TYPE_CHECKING:
    from .harness import Settings

MIB = 1 << 20
SMALL, TENSOR, ARRAY = "dict", f"tensor:{16 * MIB}", f"array:{16 * MIB}"
TITLES = {SMALL: "small dict", TENSOR: "16 MiB tensor", ARRAY: "16 MiB numpy array"}
CALL, OBJECT, BUFFER = "Ray actor call", "aiocomm send and recv", "aiocomm send_tensor"
NEAR, FAR = "near", "far"
BAR = 5.0


def run(settings: Settings) -> Outcome:
    """Measure; the bars are on the small dict and on the tensor as objects."""
    outcome = Outcome(
        "round trip between two async Ray actors", ("", "by", "us", "times aiocomm's")
    )
    if importlib.util.find_spec("ray") is None:
        outcome.rows.append(("Ray", "not installed: pip install ray", "", ""))
        judge(outcome, {})
        return outcome
    seconds = measure(settings)
    for (way, name), each in seconds.items():
        ours = seconds[OBJECT, TENSOR if name == ARRAY else name]
        outcome.rows.append(
            (TITLES[name], way, f"{median(each) * 1e6:.0f}", f"{ratios(each, ours):.2f}")
        )
        outcome.figures[f"{way}, {TITLES[name]}"] = each
    judge(outcome, seconds)
    return outcome


def judge(outcome: Outcome, seconds: dict[tuple[str, str], list[float]]) -> None:
    """Hold the figures to the bars; none for a payload that was not measured."""
    for name in (SMALL, TENSOR):
        faster = ratios(seconds[CALL, name], seconds[OBJECT, name]) if seconds else None
        outcome.at_least(f"faster than a Ray actor call with the same {TITLES[name]}", faster, BAR)


def measure(settings: Settings) -> dict[tuple[str, str], list[float]]:
    """Seconds of a round trip, by way and payload, on a Ray of its own."""
    import ray

    from aiocomm.worker import launch

    from .ray_actors import Far, Near

    small, large = (50, 3) if settings.quick else (300, 10)
    cells = [
        (CALL, SMALL, small),
        (OBJECT, SMALL, small),
        (CALL, TENSOR, large),
        (CALL, ARRAY, large),
        (OBJECT, TENSOR, large),
        (BUFFER, TENSOR, large),
    ]
    with (
        local_ray(),
        launch(Near, 1, group=NEAR) as near,
        launch(Far, 1, group=FAR) as far,
    ):
        found: dict[tuple[str, str], list[float]] = ray.get(
            near[0].compare.remote(far[0], cells, 3 if settings.quick else 11)
        )
    return found
