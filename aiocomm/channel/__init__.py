"""Named queues between producers and consumers on Ray; needs ``pip install 'aiocomm[ray]'``."""

from __future__ import annotations

from ..handles.channel import AsyncChannelWork
from .handle import Channel

__all__ = ["AsyncChannelWork", "Channel"]
