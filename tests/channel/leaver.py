"""A driver of its own that leaves its cluster while works wait, and joins it again.

Run as a module, in the cluster of the tests. It prints what became of the works, which its test
reads.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import ray

from aiocomm.channel import AsyncChannelWork, Channel

from ..cluster import NAMESPACE


def join() -> None:
    ray.init(sys.argv[1], namespace=NAMESPACE, log_to_driver=False, configure_logging=False)


def wait() -> None:
    time.sleep(1000)


async def main() -> None:
    join()
    channel, mine = await asyncio.gather(Channel.connect("shared"), Channel.create("mine"))
    absent = Channel("absent", NAMESPACE)
    remote: Any = ray.remote(num_cpus=0)(wait)
    get, call = channel.get("never"), AsyncChannelWork(remote.remote())
    lost = [call, mine.get(), absent.get(), asyncio.create_task(Channel.connect("absent"))]
    await channel.qsize()
    ray.shutdown()
    for error in await asyncio.gather(*lost, return_exceptions=True):
        print(type(error).__name__, "ray.shutdown" in str(error))
    print("started another one:", ray.is_initialized())
    await absent.aclose()
    await mine.aclose()
    await channel.put("lives on")
    join()
    async with await Channel.connect("shared") as again:
        print(await again.get())
    get.cancel()
    await channel.aclose()


if __name__ == "__main__":
    asyncio.run(main())
