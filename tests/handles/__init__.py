"""Tests of aiocomm.handles."""
