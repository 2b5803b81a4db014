"""A Ray of a benchmark's own, for those that measure between actors."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .harness import folder

if TYPE_CHECKING:
    from collections.abc import Iterator

STORE = 1 << 30  # bytes of shared memory for Ray's objects


@contextmanager
def local_ray() -> Iterator[None]:
    """Ray on this machine, with its files in a folder that goes with it."""
    import ray

    os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    start: Any = ray.init
    with folder() as place:
        start(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            object_store_memory=STORE,
            _temp_dir=f"{place}/ray",
        )
        try:
            yield
        finally:
            ray.shutdown()
