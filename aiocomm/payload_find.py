"""Where in an object something is, for the text of an error.

Runs only when an object was refused already, so it may take its time, but not for ever.
"""

from __future__ import annotations

from collections import deque
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT = 100_000
"""Objects that are looked at before giving up."""


def where_is(target: object, root: object) -> str:
    """The path from ``root`` to ``target``, as ``['weights'][0].bias``; empty if not found.

    Looks into dicts, lists, tuples, dataclasses and attributes, nearest first.
    """
    queue = deque([(root, "")])
    seen = {id(root)}
    while queue and len(seen) < LIMIT:
        here, path = queue.popleft()
        if here is target:
            return path
        for step, child in _children(here):
            if id(child) not in seen:
                seen.add(id(child))
                queue.append((child, path + step))
    return ""


def _children(obj: Any) -> Iterator[tuple[str, object]]:
    if isinstance(obj, dict):
        for key, value in list(obj.items()):
            yield f"[{_short(key)}]", value
    elif isinstance(obj, (list, tuple, deque)):
        for number, value in enumerate(obj):
            yield f"[{number}]", value
    if is_dataclass(obj) and not isinstance(obj, type):
        for each in fields(obj):
            yield f".{each.name}", getattr(obj, each.name, None)
    elif isinstance(attributes := getattr(obj, "__dict__", None), dict):
        for name, value in list(attributes.items()):
            yield f".{name}", value


def _short(key: object) -> str:
    text = repr(key)
    return text if len(text) <= 40 else text[:37] + "..."
