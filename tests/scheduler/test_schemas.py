"""Structures by number: said once, never mistaken, forgotten alike on both sides."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiocomm.errors import ProtocolError
from aiocomm.packing import inline
from aiocomm.payload import Packed, pack, pack_tensor
from aiocomm.payload_table import Form, Table, write_object
from aiocomm.scheduler import schemas as schemas_module
from aiocomm.scheduler.arrival import Arrival
from aiocomm.scheduler.envelope import Envelope, numbered_head
from aiocomm.scheduler.schemas import LEAST, MOST, SCHEMAS, KeptSchemas, SentSchemas
from aiocomm.scheduler.works import SendWork
from aiocomm.transport.base import FrameKind
from tests.payloads import OBJECTS, by_bulk, same

from .lanes import ramp
from .receiver import Receiver
from .sender import Sender


class Ends:
    """Both sides of one direction, and a wire that loses nothing."""

    def __init__(self) -> None:
        self.sent, self.kept = SentSchemas(), KeptSchemas()

    def head(self, packed: Packed) -> bytes:
        return self.sent.head(packed, 0, bulk=False)

    def read(self, head: bytes, body: bytes) -> Arrival:
        return Arrival.of(Envelope.read(head), body, self.kept)[0]

    def carry(self, obj: object) -> tuple[Any, bytes]:
        packed = pack(obj)
        head = self.head(packed)
        return self.read(head, inline(packed.buffers)).rebuild(), head


def step(number: int, size: int = 4, count: int = 20) -> dict[str, Any]:
    weights = {f"layer.{name}": ramp(size, number) for name in range(count)}
    return {"step": number, "weights": weights, "loss": 1.0 / (number + 1)}


def test_every_step_of_a_loop_but_the_first_leaves_its_structure_out() -> None:
    ends = Ends()
    heads = []
    for number in range(5):
        got, head = ends.carry(step(number))
        assert same(got, step(number))
        heads.append(len(head))
    structure = pack(step(0)).structure
    assert structure > 20 * (8 + 8 + 2)
    assert heads[1:] == [heads[0] - structure + 4] * 4


@pytest.mark.parametrize("form", [dict, list, tuple])
def test_of_a_container_of_tensors_nothing_is_left_but_the_number(form: type) -> None:
    ends = Ends()
    for number in range(3):
        tensors = [ramp(5, number + place) for place in range(9)]
        obj = {f"k{place}": each for place, each in enumerate(tensors)}
        obj = obj if form is dict else form(tensors)
        got, head = ends.carry(obj)
        assert same(got, obj)
        assert (len(head) < 12) is (number > 0)


@pytest.mark.parametrize("name", OBJECTS)
def test_whatever_is_sent_twice_comes_back_twice(name: str) -> None:
    ends = Ends()
    for _ in range(3):
        obj = OBJECTS[name]()
        assert same(ends.carry(obj)[0], obj)


def test_keys_are_structure_until_they_are_too_many() -> None:
    for count, buffers in ((9000, 9000), (20_000, 20_001)):
        obj = {f"layers.{number}.weight": torch.ones(1) for number in range(count)}
        packed = pack(obj)
        assert len(packed.buffers) == buffers
        assert list(by_bulk(packed)) == list(obj)


def test_what_has_no_structure_has_no_number() -> None:
    sent = SentSchemas()
    for packed in (pack(1), pack("x" * 2000), pack(ramp(9)), pack_tensor(ramp(9))):
        for _ in range(2):
            assert Envelope.read(sent.head(packed, 0, bulk=False)).number == -1


def test_what_is_equal_but_for_one_thing_is_another_structure() -> None:
    a, b = ramp(4), ramp(4)
    others = [
        {"a": a, "b": b},
        {"b": a, "a": b},
        {"a": a, "c": b},
        {"a": a, "b": ramp(5)},
        {"a": a, "b": b.view(2, 2)},
        {"a": a, "b": b.view(torch.int8)},
        {"a": a.view(torch.int32), "b": b},
        {"a": a, "b": a[1:]},
        {"a": a, "b": a[2:]},
        [a, b],
        (a, b),
    ]
    ends = Ends()
    for _ in range(2):
        for other in others:
            assert same(ends.carry(other)[0], other)
    numbers = [Envelope.read(ends.head(pack(other))).number for other in others]
    assert len(set(numbers)) == len(others)


def test_the_longest_unused_gives_its_number_away() -> None:
    ends = Ends()
    objects = [[ramp(size), ramp(1)] for size in range(1, SCHEMAS + 2)]
    for obj in objects[:SCHEMAS]:
        ends.carry(obj)
    assert len(ends.carry(objects[0])[1]) < LEAST  # known, and used last
    _, head = ends.carry(objects[SCHEMAS])
    assert Envelope.read(head).number == 1
    got, head = ends.carry(objects[SCHEMAS])
    assert len(head) < LEAST
    assert same(got, objects[SCHEMAS])
    assert len(ends.carry(objects[0])[1]) < LEAST
    got, head = ends.carry(objects[1])
    assert len(head) > LEAST  # forgotten, and said again
    assert same(got, objects[1])
    assert len(ends.kept._kept) == len(ends.sent._numbers) == SCHEMAS


def test_what_is_too_long_is_not_kept() -> None:
    obj = [torch.empty([1] * 200) for _ in range(MOST // 1600 + 10)]
    ends = Ends()
    for _ in range(2):
        assert Envelope.read(ends.head(pack(obj))).number == -1
    meta = pack(obj).meta
    with pytest.raises(ProtocolError, match="to be kept, of at most"):
        ends.read(numbered_head(schemas_module.KEEP, 0, meta, 0), b"")


# --- a peer that lies ---


def test_numbers_that_cannot_be_are_the_peers_fault() -> None:
    ends = Ends()
    packed = pack([ramp(4), ramp(4)])
    known = numbered_head(schemas_module.KNOWN, 0, packed.meta[:4], 0)
    with pytest.raises(ProtocolError, match="nobody has sent"):
        ends.read(known, b"")
    with pytest.raises(ProtocolError, match="to be kept, of at most 16"):
        ends.read(numbered_head(schemas_module.KEEP, SCHEMAS, packed.meta, 0), b"")
    ends.carry([ramp(4), ramp(4)])
    ends.read(known, inline(packed.buffers))
    with pytest.raises(ProtocolError, match="nobody has sent"):
        ends.read(numbered_head(schemas_module.KNOWN, 1, packed.meta[:4], 0), b"")
    for short in (b"", packed.meta[:3]):
        with pytest.raises(ProtocolError, match="damaged"):
            ends.read(numbered_head(schemas_module.KNOWN, 0, short, 0), b"")


def test_the_structure_of_another_is_never_used() -> None:
    ends = Ends()
    one, other = pack(step(1, size=4)), pack(step(1, size=8))
    assert one.meta[one.structure :] == other.meta[other.structure :]  # equal streams
    ends.read(ends.head(one), inline(one.buffers))
    meta = other.meta[:4] + other.meta[other.structure :]
    with pytest.raises(ProtocolError, match="does not have structure 0"):
        ends.read(numbered_head(schemas_module.KNOWN, 0, meta, 0), inline(other.buffers))


@pytest.mark.parametrize("obj", [step(3), [ramp(3), ramp(4)]], ids=["pickled", "list"])
def test_every_flipped_byte_and_every_cut_is_found(obj: Any) -> None:
    ends = Ends()
    ends.carry(obj)
    packed = pack(obj)
    head, body = ends.head(packed), inline(packed.buffers)
    for at in range(7, len(head)):  # behind kind, flags, charge and number
        with pytest.raises(ProtocolError):
            ends.read(head[:at] + bytes([head[at] ^ 0x10]) + head[at + 1 :], body)
        with pytest.raises(ProtocolError):
            ends.read(head[:at], body)
    with pytest.raises(ProtocolError):
        ends.read(head + b"\0", body)
    with pytest.raises(ProtocolError):
        ends.read(head, body + b"\0").rebuild()
    assert same(ends.read(head, body).rebuild(), obj)


def test_a_damaged_structure_is_not_kept() -> None:
    ends = Ends()
    packed = pack([ramp(3), ramp(4)])
    damaged = packed.meta[:9] + bytes([packed.meta[9] ^ 1]) + packed.meta[10:]
    with pytest.raises(ProtocolError, match="checksum"):
        ends.read(numbered_head(schemas_module.KEEP, 0, damaged, 0), b"")
    assert not ends.kept._kept


def test_a_kept_structure_holds_neither_message_nor_memory() -> None:
    ends = Ends()
    got, _ = ends.carry(step(1))
    table, _ = ends.kept._kept[0]
    assert table.stream == b""
    got["weights"]["layer.0"].zero_()
    assert ends.carry(step(1))[0]["weights"]["layer.0"].tolist() == ramp(4, 1).tolist()


def test_keys_that_cannot_be_stay_wrong() -> None:
    ends = Ends()
    meta = write_object(Table(Form.DICT, 0, 0, [4], [1], [(1,)], stream=pickle.dumps((7,))))
    for head in (
        numbered_head(schemas_module.KEEP, 0, meta, 0),
        numbered_head(schemas_module.KNOWN, 0, meta[:4], 0),
    ):
        with pytest.raises(ProtocolError, match="keys"):
            ends.read(head, bytes(4)).rebuild()


# --- through both lanes ---

STRUCTURES = [
    lambda number: {"n": number, "x": ramp(3, number)},
    lambda number: {"n": number, "x": ramp(7, number)},
    lambda number: [ramp(3, number), ramp(5)],
    lambda number: {"a": ramp(2, number), "b": ramp(2)},
    lambda number: ramp(6, number),
    lambda number: {"n": number},
]

sends = st.tuples(st.just("send"), st.integers(0, len(STRUCTURES) - 1))
steps = st.lists(
    st.one_of(
        *(sends, sends, sends),
        st.tuples(st.just("cancel"), st.integers(0, 5)),
        st.tuples(st.just("carry"), st.just(0)),
        st.tuples(st.just("recv"), st.integers(1, 3)),
    ),
    min_size=20,
    max_size=60,
)


class Direction:
    """A sending and a receiving lane with a window of three messages, carried by hand."""

    def __init__(self) -> None:
        self.sender, self.receiver = Sender(), Receiver(window_messages=3)
        self.works: list[tuple[SendWork, Any]] = []
        self.got: list[Any] = []
        self.carried = self.answered = 0
        self.answer()

    def send(self, which: int) -> None:
        obj = STRUCTURES[which](len(self.works))
        self.works.append((self.sender.send(obj), obj))

    def cancel(self, which: int) -> None:
        waiting = [work for work, _ in self.works if not work.done()]
        if waiting:
            waiting[which % len(waiting)].cancel()

    def carry(self, _: int = 0) -> None:
        for frame in self.sender.envelopes[self.carried :]:
            self.carried += 1
            self.receiver.lane.envelope_received(frame)

    async def recv(self, count: int = 1) -> None:
        for _ in range(min(count, self.receiver.lane.unreceived)):
            self.got.append(await self.receiver.recv())
        self.answer()

    def answer(self) -> None:
        credits = self.receiver.link.of(FrameKind.CREDIT)
        for frame in credits[self.answered :]:
            self.answered += 1
            self.sender.lane.credit_received(frame.head)


@settings(max_examples=150)
@given(steps)
def test_any_schedule_brings_what_was_sent(schedule: list[tuple[str, int]]) -> None:
    async def run() -> None:
        direction = Direction()
        for name, number in schedule:
            result = getattr(direction, name)(number)
            if result is not None:
                await result
        while direction.sender.lane.pending or direction.carried < len(direction.sender.envelopes):
            direction.carry()
            await direction.recv(3)
        direction.carry()
        await direction.recv(3)
        expected = [obj for work, obj in direction.works if not work.cancelled()]
        assert len(direction.got) == len(expected)
        assert all(map(same, direction.got, expected))

    number, schemas_module.SCHEMAS = schemas_module.SCHEMAS, 2  # so that they are forgotten often
    try:
        asyncio.run(run())
    finally:
        schemas_module.SCHEMAS = number


@pytest.mark.asyncio
async def test_a_message_that_was_cancelled_before_it_left_claims_no_number() -> None:
    sender = Sender()
    works = [sender.send([ramp(size), ramp(1)]) for size in (1, 2, 3)]
    works[0].cancel()
    sender.grant()
    await works[1]
    assert [Envelope.read(frame.head).number for frame in sender.envelopes] == [0, 1]


@pytest.mark.asyncio
async def test_within_a_process_nothing_is_numbered() -> None:
    sender = Sender(in_process=True)
    sender.grant()
    for _ in range(2):
        await sender.send([ramp(1), ramp(2)])
    assert [Envelope.read(frame.head).number for frame in sender.envelopes] == [-1, -1]


@pytest.mark.asyncio
async def test_bulk_and_inline_share_the_numbers_and_the_charge_is_the_whole_meta() -> None:
    sender, receiver = Sender(), Receiver()
    sender.grant()
    await sender.with_route(4096)
    receiver.sequence = 1
    sent = [sender.send([ramp(4000, start), ramp(9)]) for start in (0, 1)]
    for move in sender.route.moves:
        move.future.set_result(None)
    await asyncio.gather(*sent)
    packed = pack([ramp(4000), ramp(9)])
    read = [Envelope.read(frame.head) for frame in sender.envelopes]
    assert [each.known for each in read] == [False, True]
    assert [each.charge for each in read] == [len(packed.meta)] * 2
    assert sender.lane.traffic.snapshot()["fake"].nbytes > 2 * packed.nbytes
