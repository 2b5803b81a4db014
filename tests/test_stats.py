"""The counters of a direction, and that their snapshots stand still."""

from __future__ import annotations

import dataclasses

import pytest

from aiocomm.stats import GroupStatistics, RouteCount, Traffic


def test_traffic_counts_messages_and_bytes_by_route() -> None:
    traffic = Traffic()
    assert traffic.snapshot() == {}
    traffic.count("link", 3)
    traffic.count("gloo", 1 << 33)
    traffic.count("link", 0)
    assert traffic.snapshot() == {"link": RouteCount(2, 3), "gloo": RouteCount(1, 1 << 33)}


def test_a_snapshot_does_not_move() -> None:
    traffic = Traffic()
    traffic.count("link", 3)
    before = traffic.snapshot()
    traffic.count("link", 4)
    before["other"] = RouteCount()
    assert before["link"] == RouteCount(1, 3)
    assert traffic.snapshot() == {"link": RouteCount(2, 7)}


def test_group_statistics_are_frozen_and_empty_by_default() -> None:
    statistics = GroupStatistics(group="g", peer="b:0", state="new")
    assert (statistics.sent, statistics.received, statistics.bulk_route) == ({}, {}, None)
    assert (statistics.pending_sends, statistics.pending_recvs, statistics.unreceived) == (0, 0, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        statistics.group = "h"  # type: ignore[misc]
