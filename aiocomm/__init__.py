"""aiocomm: ordered, awaitable exchange of tensors and Python objects between pairs of workers.

The public names; nothing is defined here. Exceptions stay in ``aiocomm.errors``, all of them and
only there, so that there is one way to write each. Importing aiocomm pulls in neither ray nor
numpy.
"""

from __future__ import annotations

from . import blocking, errors
from .address import WorkerAddress
from .collective import Collective, current, open
from .group import CollectiveGroup
from .handles import AsyncCollWork, AsyncFuncWork, AsyncWork
from .launch import run_local
from .options import Options
from .rendezvous.base import Store
from .rendezvous.tcp import TCPBoard
from .shared import empty_shared, share_
from .stats import GroupStatistics, RouteCount

__version__ = "0.1.0"

__all__ = [
    "AsyncCollWork",
    "AsyncFuncWork",
    "AsyncWork",
    "Collective",
    "CollectiveGroup",
    "GroupStatistics",
    "Options",
    "RouteCount",
    "Store",
    "TCPBoard",
    "WorkerAddress",
    "__version__",
    "blocking",
    "current",
    "empty_shared",
    "errors",
    "open",
    "run_local",
    "share_",
]
