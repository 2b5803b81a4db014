"""What a tensor costs in a message of many: round trips of 1 to 10,000 tensors of 1 KiB.

Two processes, everything on, the same structure every time as in a training loop. Each tensor goes
there and back, so its cost is half of a round trip's by the number of tensors: packing, the copy
into a transfer, the wire, and rebuilding. What a message costs by itself, the round trip of one
tensor, is subtracted; what is left should grow as the number does. The last column is the time of
the CPU that both ends take of it without wire and loop, the best of the rounds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from aiocomm.demo.figures import median
from aiocomm.packing import gather, plan, scatter, sizes_of
from aiocomm.payload import assemble, pack
from aiocomm.payload_table import read_object

from .harness import MEMBERS, Outcome, run_pair

if TYPE_CHECKING:
    from aiocomm import Collective

COUNTS = (1, 10, 100, 1000, 10_000)
MOST = 2e-3
"""Seconds that the round trip of a dict of 200 tensors may take."""
BENT = 2.0
"""How much more a tensor may cost among 10,000 than among 1,000."""


@dataclass
class Batch:
    """What a user's class might be."""

    step: int
    tensors: list[torch.Tensor]


def message(form: str, count: int) -> Any:
    """So many tensors of 1 KiB in one object."""
    tensors = [torch.full((16, 16), float(number)) for number in range(count)]
    named = {f"layers.{number}.weight": tensor for number, tensor in enumerate(tensors)}
    forms = {
        "dict": named,
        "list": tensors,
        "nested": {"step": 17, "weights": named},
        "dataclass": Batch(17, tensors),
    }
    return forms[form]


FORMS = ("dict", "list", "nested", "dataclass")


def alone(form: str, count: int, rounds: int) -> float:
    """Seconds that both ends work on a message whose structure is known, the best of the rounds."""
    obj, took = message(form, count), []
    table = read_object(pack(obj).meta)
    for _ in range(rounds + 2):
        start = time.thread_time()
        packed = pack(obj)
        blocks = plan(sizes_of(packed.buffers))
        staged = gather(blocks, packed.buffers)
        stream = packed.meta[packed.structure :] if table.has_values else table.stream
        assemble(table, stream, scatter(blocks, staged, table.sizes))
        took.append(time.thread_time() - start)
    return min(took)


async def main(collective: Collective, rank: int, plan: list[tuple[str, int, int]]) -> Any:
    """Rank 0 measures the round trips of the plan, rank 1 echoes; seconds by form and count."""
    group = collective.create_collective_group(MEMBERS)
    seconds: dict[str, dict[int, float]] = {}
    for form, count, rounds in plan:
        if rank == 1:
            for _ in range(rounds + 2):
                await group.send(await group.recv())
            continue
        obj, took = message(form, count), []
        for _ in range(rounds + 2):
            start = time.perf_counter()
            await group.send(obj)
            await group.recv()
            took.append(time.perf_counter() - start)
        seconds.setdefault(form, {})[count] = median(took[2:])
    return seconds


def run(*, quick: bool = False) -> Outcome:
    """Measure; the bars are on the dict of 200 and on how straight the line is."""
    counts = (1, 10, 100) if quick else COUNTS
    rounds = 5 if quick else 30
    plan = [(form, count, rounds) for form in FORMS for count in counts]
    seconds = run_pair(main, [*plan, ("dict", 200, rounds * 3)])[0]
    outcome = Outcome(
        "cost of a tensor of 1 KiB in a message, each way (us)",
        ("form", "message of 1", *(f"{count:,}" for count in counts[1:]), "both ends alone"),
    )
    for form in FORMS:
        one = seconds[form][1]
        each = {n: (seconds[form][n] - one) / 2 / (n - 1) * 1e6 for n in counts[1:]}
        both = alone(form, counts[-1], rounds) / counts[-1] * 1e6
        line = (f"{one / 2 * 1e6:.0f}", *(f"{us:.2f}" for us in each.values()), f"{both:.2f}")
        outcome.rows.append((form, *line))
        outcome.figures[form] = {"seconds": seconds[form], "us per tensor": each, "alone": both}
        if not quick:
            bent = each[10_000] / each[1000]
            text = f"{form}: a tensor among 10,000 costs at most {BENT} x one among 1,000"
            outcome.bar(f"{text}: {bent:.2f} x", bent <= BENT)
    took = seconds["dict"][200]
    outcome.figures["dict of 200, seconds"] = took
    outcome.bar(f"dict of 200 and back in at most {MOST * 1e3} ms: {took * 1e3:.2f}", took <= MOST)
    return outcome
