"""Tests of the shared-memory route, one module each."""
