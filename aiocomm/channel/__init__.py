"""Named queues between producers and consumers on Ray; needs ``pip install 'aiocomm[ray]'``."""

from __future__ import annotations

from ..errors import MissingPackageError

try:
    from ..handles.channel import AsyncChannelWork
except MissingPackageError as _error:
    raise MissingPackageError(
        "channels need ray, which is not installed: pip install 'aiocomm[ray]'"
    ) from _error
from .handle import Channel

__all__ = ["AsyncChannelWork", "Channel"]
