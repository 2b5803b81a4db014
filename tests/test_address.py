"""Worker addresses: what is one, what is not, and how they are ordered."""

from __future__ import annotations

import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiocomm.address import WorkerAddress
from aiocomm.errors import AddressError, UsageError

names = st.text(min_size=1).filter(lambda text: text == text.strip() and "\0" not in text)
ranks = st.integers(min_value=0, max_value=2**40)
addresses = st.builds(WorkerAddress, names, ranks)


@given(addresses)
def test_text_and_back(address: WorkerAddress) -> None:
    assert WorkerAddress.parse(str(address)) == address
    assert hash(WorkerAddress.parse(str(address))) == hash(address)


@given(addresses)
def test_an_address_is_parsed_as_itself(address: WorkerAddress) -> None:
    assert WorkerAddress.parse(address) is address


@given(addresses)
def test_pickle_round_trip(address: WorkerAddress) -> None:
    assert pickle.loads(pickle.dumps(address)) == address


@given(addresses, addresses)
def test_order_is_by_name_then_rank(left: WorkerAddress, right: WorkerAddress) -> None:
    assert (left < right) == ((left.name, left.rank) < (right.name, right.rank))


def test_ranks_are_ordered_as_numbers() -> None:
    assert WorkerAddress("w", 2) < WorkerAddress("w", 10)


def test_a_name_may_hold_colons() -> None:
    assert WorkerAddress.parse("job:7:rollout:3") == WorkerAddress("job:7:rollout", 3)


@pytest.mark.parametrize("name", ["", " ", " a", "a ", "a\n", "a\0b", "a\udc00", None, 3, b"a"])
def test_unusable_names_are_named(name: object) -> None:
    with pytest.raises(AddressError, match=re.escape(repr(name))):
        WorkerAddress(name, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("group", ["rollout:0", ":7", "job:7:rollout:3"])
def test_a_group_that_reads_as_an_address_is_a_slip(group: str) -> None:
    with pytest.raises(AddressError, match=f"^{group!r} .*give name and rank apart"):
        WorkerAddress.of(group, 0)


@pytest.mark.parametrize("group", ["rollout", "job:7:rollout", "rollout:", "rollout:\u0663"])
def test_other_colons_are_part_of_the_name(group: str) -> None:
    assert WorkerAddress.of(group, 1) == WorkerAddress(group, 1)


@pytest.mark.parametrize("rank", [-1, 1.0, "1", None, True])
def test_unusable_ranks_are_named(rank: object) -> None:
    with pytest.raises(AddressError, match=f"rank {re.escape(repr(rank))}"):
        WorkerAddress("a", rank)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    ["", "a", "a:", ":", "a:-1", "a:x", "a: 1", "a:1 ", "a:\u0663", "a:\u00b2", None, 7, b"a:1"],
)
def test_unusable_texts_are_named(text: object) -> None:
    with pytest.raises(AddressError, match=re.escape(repr(text))):
        WorkerAddress.parse(text)  # type: ignore[arg-type]


def test_a_text_without_name_is_refused() -> None:
    with pytest.raises(AddressError, match="worker name ''"):
        WorkerAddress.parse(":0")


def test_the_error_is_a_value_error_of_the_caller() -> None:
    assert issubclass(AddressError, ValueError)
    assert issubclass(AddressError, UsageError)


def test_frozen_and_slotted() -> None:
    address = WorkerAddress("a", 0)
    with pytest.raises(AttributeError):
        address.rank = 1  # type: ignore[misc]
    assert not hasattr(address, "__dict__")
