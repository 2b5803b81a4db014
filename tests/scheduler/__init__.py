"""Tests of aiocomm.scheduler."""
