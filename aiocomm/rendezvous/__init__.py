"""The boards on which workers find one another; what they write there is not known here.

A board is an async key-value store that several processes share: ``base.Store`` is the contract,
``tcp.TCPBoard`` the one that comes with the package. ``ray.RayBoard`` is for clusters of Ray; it is
not imported here.
"""

from __future__ import annotations

from .base import Store
from .tcp import TCPBoard

__all__ = ["Store", "TCPBoard"]
