"""Tests of aiocomm.device."""
