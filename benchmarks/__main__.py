"""``python -m benchmarks [NAME ...]``: run them, print a table for each, and hold them to the bars.

Exit status 1 when a bar was missed, unless it was a quick run. docs/benchmarks.md says what each
line is.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console

from .contest import Scores, measure
from .harness import Settings, machine
from .outcome import Outcome, in_words, write_json, write_markdown
from .peers.lines import LINES, chosen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .peers.lines import Line

NAMES = (
    "latency",
    "throughput",
    "tensors",
    "weights",
    "lag",
    "pending",
    "events",
    "groups",
    "gloo",
    "ray",
    "channel",
)


def main() -> int:
    """Run the benchmarks that the command line names."""
    arguments = read(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # peers end in order
    console, errors = Console(), Console(stderr=True)
    here = machine()
    console.print(in_words(here), highlight=False)
    settings = Settings(quick=arguments.quick)
    names = arguments.names or NAMES
    start = time.monotonic()

    def say(text: str) -> None:
        errors.print(f"{time.monotonic() - start:5.0f} s  {text}", highlight=False, style="dim")

    outcomes, scores = run(names, settings, chosen(arguments.peers), say)
    if arguments.json:
        write_json(arguments.json, here, outcomes)
    if arguments.markdown:
        write_markdown(arguments.markdown, here, outcomes)
    if arguments.picture:
        from .picture import draw
        from .throughput import rates

        draw(arguments.picture, rates(scores["throughput"], settings), in_words(here))
    for outcome in outcomes:
        outcome.show(console)
    return 0 if settings.quick or all(outcome.met for outcome in outcomes) else 1


def run(
    names: Sequence[str], settings: Settings, lines: Sequence[Line], say: Callable[[str], None]
) -> tuple[list[Outcome], dict[str, Scores]]:
    """The outcomes in the order of the names, and the peers' scores by name.

    A module has ``run`` for what aiocomm does alone, ``plan`` and ``report`` for what all peers do,
    or all three.
    """
    modules: dict[str, Any] = {
        name: importlib.import_module(f"{__package__}.{name}") for name in names
    }
    found: dict[str, list[Outcome]] = {}
    for name, module in modules.items():
        if hasattr(module, "run"):
            say(name)
            outcomes = module.run(settings)
            found[name] = outcomes if isinstance(outcomes, list) else [outcomes]
    plans = {n: m.plan(settings) for n, m in modules.items() if hasattr(m, "plan")}
    scores = measure(plans, lines, say=say)
    for name in plans:
        found.setdefault(name, []).append(modules[name].report(scores[name], settings))
    return [outcome for name in names for outcome in found[name]], scores


def read(words: Sequence[str]) -> argparse.Namespace:
    """The command line; leaves with status 2 when it cannot be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run at all?")
    parser.add_argument(
        "--peers",
        default="",
        metavar="LIST",
        help="only aiocomm and those whose names contain one of these, with commas between: "
        + ", ".join(line.name for line in LINES if line.module != "ours"),
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--markdown", metavar="FILE", help="write the tables and bars there")
    parser.add_argument("--picture", metavar="FILE", help="draw the throughput as a PNG there")
    arguments = parser.parse_args(words)
    unknown = [name for name in arguments.names if name not in NAMES]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}: there are {', '.join(NAMES)}")
    arguments.peers = [word.strip() for word in arguments.peers.split(",") if word.strip()]
    try:
        chosen(arguments.peers)
    except ValueError as error:
        parser.error(str(error))
    if arguments.picture:
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("--picture needs matplotlib: pip install matplotlib")
        if arguments.names and "throughput" not in arguments.names:
            parser.error("--picture shows the throughput: name it too")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
