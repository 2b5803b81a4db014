"""No event loop in sight: plain code, whose calls block."""

from __future__ import annotations

import multiprocessing

import torch

import aiocomm
from aiocomm import blocking

MEMBERS = ["main:0", "helper:0"]


def helper(board: aiocomm.TCPBoard) -> None:
    with blocking.open("helper:0", store=board) as collective:
        group = collective.create_collective_group(MEMBERS)
        while (job := group.recv()) is not None:
            group.send(job["matrix"] @ job["vector"])


def main() -> None:
    board = aiocomm.TCPBoard(port=0, serve=True)  # any free port; it travels to the child
    with board, blocking.open("main:0", store=board) as collective:
        process = multiprocessing.get_context("spawn").Process(target=helper, args=(board,))
        process.start()
        group = collective.create_collective_group(MEMBERS)

        group.send({"matrix": torch.eye(3) * 2, "vector": torch.ones(3)})  # blocks
        work = group.recv(async_op=True)  # does not: the work is waited for when it is needed
        doubled = work.then(torch.sum)  # runs on the loop that is out of sight
        print(f"twice three ones make {doubled.wait():.0f}")

        group.send(None)
        process.join()


if __name__ == "__main__":
    main()
