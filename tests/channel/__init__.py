"""Tests of channels: most of them without Ray, over groups within one process."""
