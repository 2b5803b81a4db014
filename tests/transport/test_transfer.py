"""Chunks of a transfer: every byte once, in order, nothing for empty blocks, nothing kept."""

from __future__ import annotations

import weakref

import pytest
import torch

from aiocomm.errors import ProtocolError
from aiocomm.transport import transfer
from aiocomm.transport.transfer import Transfer, longest_chunk, pack_count, parse_count


def _chunks(transfer: Transfer) -> list[torch.Tensor]:
    found = []
    while not transfer.issued:
        found.append(transfer.next_chunk())
    return found


def _transfer(sizes: list[int], future: object = None) -> Transfer:
    blocks = [torch.arange(size).to(torch.uint8) for size in sizes]
    return Transfer(blocks, sizes, future)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "lengths"),
    [
        ([], []),
        ([0, 0], []),
        ([1], [1]),
        ([9, 10, 11], [9, 10, 10, 1]),
        ([0, 20, 0, 5, 0], [10, 10, 5]),
    ],
)
def test_blocks_are_cut_at_their_own_ends(
    sizes: list[int], lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CHUNK", 10)
    found = _chunks(_transfer(sizes))
    assert [chunk.numel() for chunk in found] == lengths
    expected = [byte for size in sizes for byte in range(size)]
    assert [byte for chunk in found for byte in chunk.tolist()] == expected


@pytest.mark.parametrize("sizes", [[7], [25, 0, 3]])
def test_a_discarded_message_goes_into_one_chunk(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CHUNK", 10)
    scratch = torch.empty(longest_chunk(sizes), dtype=torch.uint8)
    found = _chunks(Transfer((scratch,), sizes, None, scratch=True))  # type: ignore[arg-type]
    assert {chunk.data_ptr() for chunk in found} == {scratch.data_ptr()}
    assert sum(chunk.numel() for chunk in found) == sum(sizes)


def test_the_longest_chunk() -> None:
    assert [longest_chunk(sizes) for sizes in ([], [0], [5, 3])] == [0, 0, 5]
    assert longest_chunk([transfer.CHUNK + 1]) == transfer.CHUNK


def test_releasing_forgets_the_buffers() -> None:
    block = torch.zeros(3, dtype=torch.uint8)
    transfer = Transfer([block], [3], None)  # type: ignore[arg-type]
    gone = weakref.ref(block)
    del block
    assert gone() is not None
    transfer.release()
    assert gone() is None
    assert transfer.issued


def test_counts_only_grow() -> None:
    assert parse_count(pack_count(7), 7) == 7
    assert parse_count(pack_count(2**40), 7) == 2**40
    for value in (b"", bytes(7), bytes(9), pack_count(6)):
        with pytest.raises(ProtocolError):
            parse_count(value, 7)
