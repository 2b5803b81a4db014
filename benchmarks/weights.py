"""Round trips of a model's weights as a dict of tensors, through every peer.

The weights are those of all-MiniLM-L6-v2 where its package is installed, and else those of a fresh
decoder of about as many parameters; the table says which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .contest import Cell, Plan
from .payloads import make, weights_file

if TYPE_CHECKING:
    from .contest import Scores
    from .harness import Settings
    from .outcome import Outcome


def plan(settings: Settings) -> Plan:
    """One cell."""
    count = 1 if settings.quick else 2
    cell = Cell("ms", "exchange", {"payload": "weights", "count": count})
    return Plan([cell], 1 if settings.quick else 5)


def report(scores: Scores, settings: Settings) -> Outcome:
    """Milliseconds there and back."""
    weights = make("weights").values()
    nbytes = sum(tensor.nbytes for tensor in weights)
    model = "a fresh decoder" if weights_file() is None else "all-MiniLM-L6-v2"
    outcome = scores.table(
        f"round trip of the weights of {model}, {len(weights)} tensors, {nbytes / 1e6:.0f} MB "
        "(and times aiocomm's)",
        plan(settings).cells,
        lambda _, seconds: f"{seconds * 1e3:.1f}",
    )
    outcome.figures["bytes"] = nbytes
    return outcome
