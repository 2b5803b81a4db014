"""``python -m benchmarks [NAME ...] [--json FILE]``: run them and print a table for each.

Exit status 1 when a bar was missed.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from rich.console import Console

from .harness import machine, write

NAMES = ("latency", "tensors", "lag", "pending", "gloo")


def main() -> int:
    """Run the benchmarks that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run at all?")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in NAMES]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}: there are {', '.join(NAMES)}")
    console = Console()
    here = machine()
    console.print(", ".join(f"{key} {value}" for key, value in here.items()), highlight=False)
    outcomes = []
    for name in arguments.names or NAMES:
        module = importlib.import_module(f"{__package__}.{name}")
        outcome = module.run(quick=arguments.quick)
        outcome.show(console)
        outcomes.append(outcome)
    if arguments.json:
        write(arguments.json, outcomes)
    return 0 if all(outcome.met for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
