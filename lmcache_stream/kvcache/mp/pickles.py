"""Chunks as pickled lists of tensors, which travel where there is no shared memory. Only tensors are unpickled."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lmcache_stream.errors import CacheProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["dump_tensors", "load_tensors"]


def dump_tensors(tensors: Sequence[Tensor]) -> bytes:
    """Pickle CPU tensors. A tensor that is a view takes its whole storage along: give each its own."""
    return pickle.dumps(list(tensors), protocol=pickle.HIGHEST_PROTOCOL)


def load_tensors(data: bytes | memoryview) -> list[Tensor]:
    """Unpickle a list of CPU tensors, and nothing else.

    Raises:
        CacheProtocolError: It is no such list. Nothing that it names was called.
    """
    try:
        tensors = _TensorUnpickler(io.BytesIO(data)).load()
    except CacheProtocolError:
        raise
    except Exception as error:  # a pickle can fail in any way; whatever it is, it is no list of tensors
        raise CacheProtocolError(f"the cache server sent chunks that cannot be read: {error}") from error
    if not isinstance(tensors, list) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise CacheProtocolError("the cache server sent something that is no list of tensors")
    if any(tensor.device.type != "cpu" or tensor.layout != torch.strided for tensor in tensors):
        raise CacheProtocolError("the cache server sent tensors that do not lie on the CPU")
    return tensors


@dataclass(frozen=True, slots=True)
class _StorageKind:
    """What stands for a storage class of torch; the class itself never comes into a pickle's hands."""

    dtype: torch.dtype | None


class _Storage:
    """The bytes of a storage, and their dtype if it knows it."""

    def __init__(self, data: memoryview, dtype: torch.dtype | None) -> None:
        self.data = data
        self.dtype = dtype


def _load_storage(data: bytes) -> _Storage:
    # torch.save's older format: magic number, version, platform, the storage's kind, its keys, its size, its bytes.
    stream = io.BytesIO(data)
    for _ in range(3):
        _NothingUnpickler(stream).load()
    kind = _StorageUnpickler(stream).load()
    keys = _NothingUnpickler(stream).load()
    if not isinstance(kind, _StorageKind) or not isinstance(keys, list) or len(keys) != 1:
        raise CacheProtocolError("the cache server sent a tensor without a storage")
    return _Storage(memoryview(data)[stream.tell() + 8 :], kind.dtype)


def _rebuild_typed(
    storage: Any, offset: int, size: Any, stride: Any, requires_grad: bool, hooks: Any, bits: Any = None
) -> Tensor:
    return _rebuild(storage, getattr(storage, "dtype", None), offset, size, stride, bits)


def _rebuild_untyped(
    storage: Any, offset: int, size: Any, stride: Any, requires_grad: bool, hooks: Any, dtype: Any, bits: Any = None
) -> Tensor:
    return _rebuild(storage, dtype, offset, size, stride, bits)


def _rebuild(storage: Any, dtype: Any, offset: int, size: Any, stride: Any, bits: Any) -> Tensor:
    if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
        raise CacheProtocolError("the cache server sent a tensor without a storage")
    if bits:
        raise CacheProtocolError(f"the cache server sent a tensor whose bytes are not its values: {bits}")
    data = bytearray(storage.data)
    flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)
    return flat.as_strided(tuple(size), tuple(stride), offset)


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_typed,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_untyped,
    ("torch.storage", "_load_from_bytes"): _load_storage,
    ("collections", "OrderedDict"): OrderedDict,
}


# What pickles of tensors are made of. BUILD and the like are not: they set attributes, so that a pickle could change
# functions and classes that it gets hold of.
_OPCODES = (
    *(
        "PROTO",
        "FRAME",
        "STOP",
        "MARK",
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "BINFLOAT",
    ),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BINPERSID"),
    *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
)


class _NothingUnpickler(pickle._Unpickler):
    """Knows no name at all, and only the opcodes of tensors.

    It is the unpickler written in Python: that of C can be kept from no opcode, and reserves memory for any memo index.
    """

    dispatch: ClassVar[dict[int, Callable[[pickle.Unpickler], None]]] = {
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPCODES
    }

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise CacheProtocolError(f"the cache server sent a pickle that wants {module_name}.{global_name}")

    def persistent_load(self, pid: Any, /) -> Any:
        raise CacheProtocolError("the cache server sent a pickle with persistent ids, which no tensor has")


class _StorageUnpickler(_NothingUnpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        kind = getattr(torch, global_name, None) if module_name in ("torch", "torch.storage") else None
        if isinstance(kind, type) and issubclass(kind, torch.storage.TypedStorage | torch.UntypedStorage):
            dtype = getattr(kind, "_dtype", None)
            return _StorageKind(dtype if isinstance(dtype, torch.dtype) else None)
        return super().find_class(module_name, global_name)

    def persistent_load(self, pid: Any, /) -> Any:
        return pid[1]


class _TensorUnpickler(_NothingUnpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in _ALLOWED:
            return _ALLOWED[module_name, global_name]
        dtype = getattr(torch, global_name, None) if module_name == "torch" else None
        return dtype if isinstance(dtype, torch.dtype) else super().find_class(module_name, global_name)
