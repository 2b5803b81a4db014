"""The tests of aiocomm; they mirror the package, and import one another as ``tests.name``."""
