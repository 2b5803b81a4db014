"""Names of workers: a group of workers by name, and a rank in it.

Knows nothing of hosts, ports or processes; where a worker lives is the rendezvous' business.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import AddressError


@dataclass(frozen=True, order=True, slots=True)
class WorkerAddress:
    """Address of one worker, ordered by name and then rank.

    Args:
        name: name of the worker group, not empty, without surrounding white space.
        rank: rank in that group, from 0.

    Raises:
        AddressError: the name is empty or no text that a board takes, or the rank negative or not
            an integer.
    """

    name: str
    rank: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or self.name != self.name.strip():
            raise AddressError(
                f"worker name {self.name!r} is not usable: give a non-empty string "
                "without surrounding white space"
            )
        if "\0" in self.name or not _is_text(self.name):
            raise AddressError(
                f"worker name {self.name!r} is not usable: boards take UTF-8 text without NUL"
            )
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 0:
            raise AddressError(f"rank {self.rank!r} of worker {self.name!r} is not an integer >= 0")

    @classmethod
    def parse(cls, text: WorkerAddress | str) -> WorkerAddress:
        """Read ``"name:rank"``; an address is returned as it is.

        Raises:
            AddressError: the text is not of that form.
        """
        if isinstance(text, WorkerAddress):
            return text
        if not isinstance(text, str):
            raise AddressError(f"{text!r} is neither a WorkerAddress nor a string like 'rollout:0'")
        name, colon, rank = text.rpartition(":")
        if not colon or not (rank.isascii() and rank.isdigit()):
            raise AddressError(
                f"{text!r} is not a worker address: write 'name:rank', as 'rollout:0'"
            )
        return cls(name, int(rank))

    @classmethod
    def of(cls, group: str, rank: int) -> WorkerAddress:
        """The address of a worker that is named by group and rank apart.

        Raises:
            AddressError: as the constructor, and the group ends as an address does.
        """
        address = cls(group, rank)
        name, colon, digits = group.rpartition(":")
        if colon and digits.isascii() and digits.isdigit():
            raise AddressError(
                f"{group!r} is given as the name of a group, and reads as an address: give name "
                f"and rank apart, as {name!r}, {digits}"
            )
        return address

    def __str__(self) -> str:
        return f"{self.name}:{self.rank}"


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
