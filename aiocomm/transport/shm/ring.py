"""Which bytes of a ring of memory are in use: taken in turn, given back in any order.

Pure: knows numbers only. A piece never wraps around the end. When nothing is in use the next piece
goes to the start, so that light traffic keeps to memory that is in the cache.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ...packing import aligned


@dataclass(slots=True, eq=False)
class _Piece:
    offset: int
    end: int
    free: bool = False


class Ring:
    """The ring.

    Args:
        nbytes: its size.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._pieces: deque[_Piece] = deque()  # by age
        self._taken: dict[int, _Piece] = {}  # by offset

    @property
    def used(self) -> int:
        """Pieces that are taken."""
        return len(self._taken)

    def take(self, nbytes: int, within: int) -> int | None:
        """Offset of a fresh piece; None while there is no room for it.

        Args:
            nbytes: of the piece, 1 or more.
            within: so many bytes from the start are used, if what is taken allows; the fewer there
                are, the more of them are in the cache.
        """
        start = 0
        limit = within
        if self._pieces:
            oldest, newest = self._pieces[0].offset, self._pieces[-1]
            start = aligned(newest.end)
            if newest.offset < oldest:
                limit = oldest
            elif start + nbytes > limit:
                start, limit = 0, oldest
        if start + nbytes > limit:
            return None
        piece = self._taken[start] = _Piece(start, start + nbytes)
        self._pieces.append(piece)
        return start

    def give_back(self, offset: int) -> None:
        """The piece that begins there is free.

        Raises:
            KeyError: there is none.
        """
        self._taken.pop(offset).free = True
        while self._pieces and self._pieces[0].free:
            self._pieces.popleft()
