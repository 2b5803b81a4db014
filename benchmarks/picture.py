"""The throughput of all peers by size, as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .throughput import size_name

if TYPE_CHECKING:
    from collections.abc import Mapping

OURS = ("tab:red", "tab:orange", "firebrick", "salmon")
THEIRS = (
    "tab:blue",
    "tab:green",
    "tab:purple",
    "tab:brown",
    "tab:cyan",
    "tab:olive",
    "tab:pink",
    "navy",
    "darkgreen",
)
MARKERS = "v^sDPXd*<>"


def draw(path: str, rates: Mapping[str, Mapping[int, float]], caption: str) -> None:
    """Write a PNG.

    Args:
        path: of the file.
        rates: bytes per second by name and size.
        caption: what the machine is.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 6.5), dpi=150)
    colours = {True: iter(OURS), False: iter(THEIRS)}
    for number, (name, by_size) in enumerate(rates.items()):
        ours, bound = name.startswith("aiocomm"), name.startswith("memcpy")
        colour = "0.6" if bound else next(colours[ours], "black")
        axes.plot(
            list(by_size),
            [rate / 1e9 for rate in by_size.values()],
            label=name,
            color=colour,
            linewidth=2.8 if ours else 1.4,
            linestyle="--" if bound else "-",
            marker="o" if ours else MARKERS[number % len(MARKERS)],
            markersize=7 if ours else 5,
            zorder=3 if ours else 2,
        )
    sizes = sorted({size for by_size in rates.values() for size in by_size})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [size_name(size) for size in sizes])
    ticks = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50]
    values = [rate / 1e9 for by_size in rates.values() for rate in by_size.values()]
    near = [tick for tick in ticks if min(values) / 2.5 < tick < max(values) * 2.5]
    axes.set_yticks(near, [f"{tick:g}" for tick in near])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_xlabel("size of each tensor")
    axes.set_ylabel("GB/s")
    axes.set_title("Tensors streamed one way between two processes, into ready buffers")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.text(0.01, 0.01, caption, fontsize=7, color="0.35", wrap=True)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path)
    pyplot.close(figure)
