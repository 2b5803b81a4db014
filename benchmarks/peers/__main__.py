"""A peer's process: ``python -m benchmarks.peers MODULE VARIANT RANK FOLDER [LOOP]``.

Connects to the socket ``control`` in the folder, says its rank, and does what the lines of JSON
that come from there ask for, until there are no more. What the libraries print does not matter, so
their output is not used. RANK ``mpi`` is asked from MPI.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import uvloop

if TYPE_CHECKING:
    from .end import End


async def serve(end: End) -> None:
    """Answer until the other side of the control socket hangs up."""
    reader, writer = await asyncio.open_unix_connection(str(end.folder / "control"))

    def answer(**content: Any) -> None:
        writer.write(json.dumps(content).encode() + b"\n")

    answer(rank=end.rank)
    try:
        await end.open()
        answer(ready=True)
        while line := await reader.readline():
            command = json.loads(line)
            call = end.exchange if command.pop("do") == "exchange" else end.stream
            answer(seconds=await call(**command))
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        answer(error=f"{type(error).__name__}: {text[-1]}")
        raise
    finally:
        await writer.drain()
        await end.close()
        writer.close()


def main() -> None:
    module, variant, rank, folder = sys.argv[1:5]
    peer = importlib.import_module(f".{module}", __package__).Peer
    if rank == "mpi":
        from mpi4py import MPI

        rank = str(MPI.COMM_WORLD.Get_rank())
    torch.set_num_threads(1)
    # What the imports made is never garbage; one look through it takes 60 ms, whoever is measured.
    gc.collect()
    gc.freeze()
    factory = asyncio.new_event_loop if "asyncio" in sys.argv[5:] else uvloop.new_event_loop
    Path(folder).mkdir(exist_ok=True)
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(peer(int(rank), folder, variant)))


if __name__ == "__main__":
    main()
