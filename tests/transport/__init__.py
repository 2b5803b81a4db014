"""Tests of aiocomm.transport."""
