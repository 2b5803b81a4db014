"""Tests that need a CUDA device; skipped, and said so, where there is none."""
