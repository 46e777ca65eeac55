"""Chunks as pickled lists of tensors, which travel where there is no shared memory. Only tensors are unpickled."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from lmcache_stream.errors import CacheProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    if not isinstance(kind, type) or not isinstance(keys, list) or len(keys) != 1:
        raise CacheProtocolError("the cache server sent a tensor without a storage")
    dtype = getattr(kind, "_dtype", None)
    return _Storage(memoryview(data)[stream.tell() + 8 :], dtype if isinstance(dtype, torch.dtype) else None)


def _rebuild_typed(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    return _rebuild(storage, getattr(storage, "dtype", None), offset, size, stride)


def _rebuild_untyped(
    storage: Any, offset: int, size: Any, stride: Any, requires_grad: bool, hooks: Any, dtype: Any, *_: Any
) -> Tensor:
    return _rebuild(storage, dtype, offset, size, stride)


def _rebuild(storage: Any, dtype: Any, offset: int, size: Any, stride: Any) -> Tensor:
    if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
        raise CacheProtocolError("the cache server sent a tensor without a storage")
    flat = torch.frombuffer(bytearray(storage.data), dtype=torch.uint8).view(dtype)
    return flat.as_strided(tuple(size), tuple(stride), offset)


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_typed,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_untyped,
    ("torch.storage", "_load_from_bytes"): _load_storage,
    ("collections", "OrderedDict"): OrderedDict,
}


class _NothingUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise CacheProtocolError(f"the cache server sent a pickle that wants {module_name}.{global_name}")

    def persistent_load(self, pid: Any, /) -> Any:
        raise CacheProtocolError("the cache server sent a pickle with persistent ids, which no tensor has")


class _StorageUnpickler(_NothingUnpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        kind = getattr(torch, global_name, None) if module_name in ("torch", "torch.storage") else None
        if isinstance(kind, type) and issubclass(kind, torch.storage.TypedStorage | torch.UntypedStorage):
            return kind
        return super().find_class(module_name, global_name)

    def persistent_load(self, pid: Any, /) -> Any:
        return pid[1]


class _TensorUnpickler(_NothingUnpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in _ALLOWED:
            return _ALLOWED[module_name, global_name]
        dtype = getattr(torch, global_name, None) if module_name == "torch" else None
        return dtype if isinstance(dtype, torch.dtype) else super().find_class(module_name, global_name)
