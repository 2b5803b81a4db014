"""The rendezvous in a Ray cluster: the public names; nothing is defined here.

``RayBoard`` is for aiocomm's own workers; the rest is for anyone who builds NCCL communicators.
"""

from __future__ import annotations

from .ray_board import RayBoard
from .ray_nccl import async_create_nccl_communicator_in_ray, create_nccl_communicator_in_ray
from .ray_nccl_store import NCCLIDStore, get_nccl_id_store_by_name

__all__ = [
    "NCCLIDStore",
    "RayBoard",
    "async_create_nccl_communicator_in_ray",
    "create_nccl_communicator_in_ray",
    "get_nccl_id_store_by_name",
]
