"""One piece of memory that two processes have mapped.

A segment is a memfd: it has no name, so nothing is left of it in any file system whatever way its
users die, and neither the size of /dev/shm nor its absence matters. It is sealed against
shrinking, so that no peer can make a read of it fail. How its descriptor gets
to the peer is ``mailbox.py``'s.

What was measured and rejected stands in docs/decisions.md: names in /dev/shm, torch's own shared
storages, opening the peer's /proc entries, and reading the peer's memory (``process_vm_readv``).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os

from ...errors import ProtocolError, RouteError

_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)


class Segment:
    """Memory of this process that another one may map too.

    Args:
        descriptor: of the memfd; owned by the segment from here on.
        nbytes: its size.

    Attributes:
        address: where it begins.
        view: all of it, one byte an item; a slice of it keeps the mapping alive.

    Raises:
        RouteError: it cannot be mapped.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.descriptor = descriptor
        try:
            mapping = mmap.mmap(descriptor, nbytes)
        except (OSError, ValueError) as error:
            self.forget_descriptor()
            raise RouteError(
                f"{nbytes} bytes of shared memory cannot be mapped: {error}"
            ) from error
        self.view = memoryview(mapping)
        self.address = ctypes.addressof(ctypes.c_uint8.from_buffer(mapping))

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Fresh memory, all zeros; taken from the machine only where it is touched.

        Raises:
            RouteError: there is none, with the reason.
        """
        try:
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            descriptor = os.memfd_create("aiocomm", flags)
        except (AttributeError, OSError) as error:
            raise RouteError(f"this system makes no anonymous shared memory: {error}") from error
        try:
            os.ftruncate(descriptor, nbytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            os.close(descriptor)
            reason = error.strerror or error
            raise RouteError(f"{nbytes} bytes of shared memory cannot be had: {reason}") from error
        return cls(descriptor, nbytes)

    @classmethod
    def adopt(cls, descriptor: int, nbytes: int) -> Segment:
        """Memory that the peer has made.

        Raises:
            ProtocolError: it is not as large as the peer says, or can be made smaller.
            RouteError: it cannot be mapped.
        """
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            size = os.fstat(descriptor).st_size
        except OSError:
            sealed, size = False, 0
        if not sealed or size < nbytes or nbytes < 1:
            os.close(descriptor)
            raise ProtocolError("the peer shares memory that is not what it says")
        segment = cls(descriptor, nbytes)
        segment.forget_descriptor()  # the mapping keeps the memory
        return segment

    def empty(self) -> None:
        """Give the memory back to the machine; what is touched next is zeros. Takes some ms."""
        mapping = self.view.obj
        assert isinstance(mapping, mmap.mmap)
        with contextlib.suppress(OSError):  # where the kernel cannot, the memory stays
            mapping.madvise(mmap.MADV_REMOVE)

    def forget_descriptor(self) -> None:
        """Close the descriptor: the segment can be sent to nobody any more. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.forget_descriptor()
