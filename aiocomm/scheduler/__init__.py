"""The lanes of a group: the event-loop shell around ``ordering.py``, one for each direction.

A lane turns calls into entries, entries into frames and transfers, and their completion into the
completion of the caller's work. It decides nothing about order; it carries out what the order
says. It may not know how links are made, nor which route bulk takes: both are handed to it.

Works complete on the loop. No thread waits for anything: a transfer's future is what its route
made of the backend's own completion.
"""

from __future__ import annotations

from .recv import RecvLane
from .send import SendLane
from .works import RecvWork, SendWork

__all__ = ["RecvLane", "RecvWork", "SendLane", "SendWork"]
