"""Workers in event loops of one's own, which find one another on a board at a known port.

::

    python examples/own_loop.py             # starts both workers
    python examples/own_loop.py 29600       # on another port
    python examples/own_loop.py 29600 pong  # one of them, in a terminal of its own
"""

from __future__ import annotations

import asyncio
import subprocess
import sys

import aiocomm

PORT = 29511
MEMBERS = ["ping:0", "pong:0"]


async def work(name: str, port: int) -> None:
    board = aiocomm.TCPBoard("127.0.0.1", port)  # the same line in both; who comes first serves
    async with aiocomm.open(f"{name}:0", store=board) as collective:
        group = collective.create_collective_group(MEMBERS)
        await group.send(f"hello from {name}")
        print(f"{name} got: {await group.recv()}", flush=True)


def main() -> None:
    port = int(sys.argv[1]) if len(sys.argv) > 1 else PORT
    if len(sys.argv) > 2:
        asyncio.run(work(sys.argv[2], port))
        return
    workers = [
        subprocess.Popen([sys.executable, __file__, str(port), name]) for name in ("ping", "pong")
    ]
    statuses = [worker.wait() for worker in workers]
    if any(statuses):
        sys.exit("a worker failed")
    print("both are done")


if __name__ == "__main__":
    main()
