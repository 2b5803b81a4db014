"""aiocomm: ordered, awaitable exchange of tensors and Python objects between pairs of workers.

The public names; nothing is defined here.
"""

from __future__ import annotations

from . import errors
from .address import WorkerAddress
from .options import Options

__version__ = "0.1.0"

__all__ = ["Options", "WorkerAddress", "__version__", "errors"]
