"""Tensors and buffers seen as plain bytes, and which of them cannot be.

Knows nothing of messages. Transports move bytes only, so every tensor is looked at as a 1-D uint8
tensor over its own memory; no backend's list of dtypes matters. Memory is reached through ctypes
because numpy is not a dependency, and because ``torch.frombuffer`` warns about read-only memory.
Copying what is not contiguous was rejected: a hidden copy of a large tensor is a cost that the
caller should see.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

from .errors import PayloadError

UINT8 = torch.uint8
_STRIDED = torch.strided
_TENSOR = torch.Tensor
# What a wrapper subclass overrides; private names differ between versions of torch.
_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__

# The number of a dtype on the wire is its place here. Append only; 0 is raw bytes.
_NAMES = (
    *("raw", "float32", "float64", "float16", "bfloat16"),
    *("uint8", "int8", "int16", "int32", "int64", "bool"),
    *("complex64", "complex128", "complex32", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *("uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7"),
    *("int1", "int2", "int3", "int4", "int5", "int6", "int7"),
)
RAW = 0
DTYPES: dict[int, tuple[torch.dtype, int]] = {
    code: (dtype, dtype.itemsize)
    for code, name in enumerate(_NAMES)
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
CODES: dict[torch.dtype, int] = {dtype: code for code, (dtype, _) in DTYPES.items()}
DEVICES = ("cpu", "cuda", "xpu")  # the number on the wire is the place here; append only
SENDABLE = DEVICES[:2]  # the last one has a number and no adapter
MAX_DIMS = 255


def describe(tensor: torch.Tensor) -> str:
    """``float32[3, 4]``, or the class alone where torch cannot say."""
    try:
        return spec_text(tensor.dtype, tuple(tensor.shape))
    except Exception:  # a tensor without a shape (jagged, batched): the class is what there is
        return type(tensor).__name__


def spec_text(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """``float32[3, 4]``."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def refusal(tensor: torch.Tensor) -> str | None:
    """Why a plain tensor cannot be sent, and how to mend that; None when it can."""
    if tensor.is_nested:
        return "is nested: send its parts, tensor.unbind()"
    if tensor.layout is not _STRIDED:
        return f"is sparse or packed (layout {tensor.layout}): send tensor.to_dense(), or its parts"
    if tensor.is_quantized:
        return "is quantized: send tensor.int_repr() and its scale and zero point"
    if tensor.is_meta:
        return "is on the meta device and has no data: materialise it first"
    if tensor.device.type not in SENDABLE:
        return f"is on {tensor.device}: move it to the CPU or to CUDA"
    if tensor.dtype not in CODES:
        return f"has the dtype {tensor.dtype}, which cannot travel: convert it"
    if not tensor.is_contiguous():
        return "is not contiguous: send tensor.contiguous(), a copy, or receive into one that is"
    if tensor.is_conj():
        return "is a lazy conjugate: send tensor.resolve_conj()"
    if tensor.is_neg():
        return "is a lazy negation: send tensor.resolve_neg()"
    if tensor.dim() > MAX_DIMS:
        return f"has {tensor.dim()} dimensions, more than {MAX_DIMS}: reshape it"
    if any(getattr(tensor, "names", ())):
        return "has named dimensions: send tensor.rename(None)"
    if tensor.nbytes and not tensor.data_ptr():
        return "has no memory of its own: send tensor.clone()"
    return None


def refuse(tensor: torch.Tensor, where: str = "", cause: Exception | None = None) -> PayloadError:
    """The error for a tensor that cannot be sent.

    Args:
        tensor: the one at fault.
        where: its place in the object, as ``['a'][0]``, if known.
        cause: what torch said when asked for its memory.
    """
    try:
        reason = refusal(tensor)
    except Exception as error:  # torch cannot even be asked (a functorch wrapper, a lazy module)
        reason, cause = None, error
    place = f" at {where}" if where else ""
    text = reason or f"has no memory that can be sent ({cause}): send an ordinary tensor"
    return PayloadError(f"the tensor {describe(tensor)}{place} {text}")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of class ``torch.Tensor`` over the same memory, detached.

    Raises:
        PayloadError: not a tensor.
    """
    if not isinstance(tensor, _TENSOR):
        raise PayloadError(f"a tensor is needed here, not {type(tensor).__name__}: use send, recv")
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.detach().as_subclass(_TENSOR)
    except Exception as error:
        raise refuse(tensor, cause=error) from error


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a subclass only wraps others and has no memory of its own."""
    if type(tensor).__torch_dispatch__ is _PLAIN_DISPATCH:
        return False
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.data_ptr() == 0 and tensor.nbytes > 0
    except Exception:  # torch refuses to give an address for it
        return True


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own memory as a 1-D uint8 tensor; nothing is copied.

    Args:
        tensor: contiguous and dense, of any dtype and shape.

    Raises:
        PayloadError: its memory cannot be seen as bytes; the text says how to mend it.
    """
    if type(tensor) is not _TENSOR:
        tensor = plain(tensor)
    try:
        reason = refusal(tensor)
        if reason is None:
            return flat(tensor)
    except Exception as error:
        raise refuse(tensor, cause=error) from error
    raise PayloadError(f"the tensor {describe(tensor)} {reason}")


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """``as_bytes`` for a tensor of class ``torch.Tensor`` that was checked already."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_inference():
        # Its views could not be written to outside inference mode; its storage can.
        start, size = tensor.storage_offset() * tensor.itemsize, tensor.nbytes
        with torch.inference_mode(False):
            empty = torch.empty(0, dtype=UINT8, device=tensor.device)
            return empty.set_(tensor.untyped_storage(), start, (size,), (1,))
    if tensor.dim() != 1:
        tensor = tensor.ravel()  # contiguous: a view, and the quickest way to it
    try:
        return tensor.view(UINT8)
    except RuntimeError:  # one element whose stride is not 1, yet contiguous
        if tensor.numel() != 1:
            raise
        return tensor.as_strided((1,), (1,)).view(UINT8)


# --- memory by address ---


class _PyBuffer(ctypes.Structure):
    """CPython's ``Py_buffer``: the one way to the address of read-only memory without numpy."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)


def address_of(view: memoryview) -> int:
    """Where the memory of a contiguous view lies; valid while the view is held."""
    found = _PyBuffer()
    _get_buffer(view, ctypes.byref(found), 0)
    try:
        return found.buf or 0
    finally:
        _release_buffer(ctypes.byref(found))


# One type for every size: ctypes would make and keep a class for each.
_Memory = ctypes.c_char * sys.maxsize


def memory_at(address: int, nbytes: int, owner: object) -> memoryview:
    """Memory by its address as writable bytes; the view keeps the owner alive. No copy."""
    if not nbytes:
        return memoryview(bytearray())
    memory: Any = _Memory.from_address(address)
    memory.owner = owner
    return memoryview(memory)[:nbytes].cast("B")


def tensor_at(address: int, nbytes: int, owner: object) -> torch.Tensor:
    """CPU memory by its address as a 1-D uint8 tensor that keeps its owner alive. No copy."""
    return torch.frombuffer(memory_at(address, nbytes, owner), dtype=UINT8)


def view_of(tensor: torch.Tensor, offset: int = 0, nbytes: int | None = None) -> memoryview:
    """Bytes of a 1-D uint8 CPU tensor, writable; the view keeps the tensor alive. No copy."""
    size = tensor.numel() - offset if nbytes is None else nbytes
    return memory_at(tensor.data_ptr() + offset, size, tensor)
