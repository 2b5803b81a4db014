"""The libraries that aiocomm is measured beside, and aiocomm itself: one module for each.

A module has a class ``Peer``, one end of a pair, and is imported by the peer's own processes only
(``python -m benchmarks.peers``), so that what it imports, and its crash, concern nobody else.
``lines.py`` says which there are, ``pair.py`` is how the benchmarks speak to their processes.
"""
