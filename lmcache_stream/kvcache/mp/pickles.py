"""Chunks as pickled lists of tensors, which travel where there is no shared memory. Only tensors are unpickled.

Reading one takes time and memory in proportion to the bytes that came and to the tensors asked for, whatever they say.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lmcache_stream.errors import CacheProtocolError
from lmcache_stream.kvcache.mp.pool import DTYPES, MOST_DIMENSIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["dump_tensors", "load_tensors"]

_READS_A_TENSOR = 400
"""A step of a pickle takes one to three reads; a tensor takes a hundred reads, and a little more in older protocols."""


def dump_tensors(tensors: Sequence[Tensor]) -> bytes:
    """Pickle CPU tensors. A tensor that is a view takes its whole storage along: give each its own."""
    return pickle.dumps(list(tensors), protocol=pickle.HIGHEST_PROTOCOL)


def load_tensors(data: bytes | memoryview, at_most: int = 1 << 16) -> list[Tensor]:
    """Unpickle a list of CPU tensors, and nothing else.

    Args:
        data: The pickle.
        at_most: How many tensors it may hold.

    Raises:
        CacheProtocolError: It is no such list. Nothing that it names was called.
    """
    try:
        tensors = _TensorUnpickler(_Metered(data, _READS_A_TENSOR * (at_most + 1))).load()
    except CacheProtocolError:
        raise
    except Exception as error:  # a pickle can fail in any way; whatever it is, it is no list of tensors
        raise CacheProtocolError(f"the cache server sent chunks that cannot be read: {_short(error)}") from error
    if not isinstance(tensors, list) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise CacheProtocolError("the cache server sent something that is no list of tensors")
    if len(tensors) > at_most or sum(tensor.nbytes for tensor in tensors) > len(data):
        raise CacheProtocolError(f"the cache server sent {len(tensors)} tensors that are more than what it sent")
    if any(tensor.device.type != "cpu" or tensor.layout != torch.strided for tensor in tensors):
        raise CacheProtocolError("the cache server sent tensors that do not lie on the CPU")
    return tensors


@dataclass(frozen=True, slots=True)
class _StorageKind:
    """What stands for a storage class of torch; the class itself never comes into a pickle's hands."""

    dtype: torch.dtype | None


class _Storage:
    """The bytes of a storage, and their dtype if it knows it. They are copied once, however many tensors share them."""

    def __init__(self, data: memoryview, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self._data = data
        self._flat: Tensor | None = None

    def values(self, dtype: torch.dtype) -> Tensor:
        if self._flat is None:
            data = bytearray(self._data)
            self._flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return self._flat.view(dtype)


class _Metered(io.BytesIO):
    """Refuses to be read from more than `reads` times."""

    def __init__(self, data: bytes | memoryview, reads: int) -> None:
        super().__init__(data)
        self._reads = reads

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads -= 1
        if self._reads < 0:
            raise CacheProtocolError("the cache server sent a pickle of more steps than its tensors take")
        return super().read(size)


def _load_storage(data: bytes) -> _Storage:
    # torch.save's older format: magic number, version, platform, the storage's kind, its keys, its size, its bytes.
    stream = _Metered(data, _READS_A_TENSOR)
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
        raise CacheProtocolError("the cache server sent a tensor whose bytes are not its values")
    if dtype not in DTYPES.values():
        raise CacheProtocolError(f"the cache server sent a tensor of {dtype}, which no KV has")
    shape, strides = _extents(size), _extents(stride)
    values = storage.values(dtype)
    if math.prod(shape) > values.numel():
        raise CacheProtocolError(f"the cache server sent a tensor of {shape} with {values.numel()} values")
    return values.as_strided(shape, strides, offset)


def _extents(given: Any) -> tuple[int, ...]:
    known = isinstance(given, tuple | list) and len(given) <= MOST_DIMENSIONS
    if not known or not all(type(extent) is int and extent >= 0 for extent in given):
        raise CacheProtocolError("the cache server sent a tensor without a shape")
    return tuple(given)


def _no_hooks() -> OrderedDict[str, Any]:
    return OrderedDict()


def _short(words: object) -> str:
    return str(words)[:200]


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_typed,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_untyped,
    ("torch.storage", "_load_from_bytes"): _load_storage,
    ("collections", "OrderedDict"): _no_hooks,
}


# What pickles of tensors are made of. BUILD and the like are not: they set attributes, so that a pickle could change
# functions and classes that it gets hold of. BYTEARRAY8 takes the memory that it names before it looks for the bytes.
_OPCODES = (
    *(
        "PROTO",
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
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("EMPTY_DICT", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BINPERSID"),
    *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
)


def _skip_frame(unpickler: Any) -> None:
    unpickler.read(8)  # a frame is only a hint, and what is read of it would not be metered


def _set_item(unpickler: Any) -> None:
    items = unpickler.stack[-2:]
    del unpickler.stack[-2:]
    _update(unpickler.stack[-1], items)


def _set_items(unpickler: Any) -> None:
    items = unpickler.pop_mark()
    _update(unpickler.stack[-1], items)


def _update(target: Any, items: list[Any]) -> None:
    if not isinstance(target, dict) or not all(type(key) is str for key in items[::2]):
        # To hash a tuple that holds a tuple twice, that holds one twice, and so on, takes for ever.
        raise CacheProtocolError("the cache server sent a pickle with keys that no tensor has")
    target.update(zip(items[::2], items[1::2], strict=True))


class _NothingUnpickler(pickle._Unpickler):
    """Knows no name at all, and only the opcodes of tensors.

    It is the unpickler written in Python: that of C can be kept from no opcode, and reserves memory for any memo index.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **{getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPCODES},
        pickle.FRAME[0]: _skip_frame,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
    }

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise CacheProtocolError(f"the cache server sent a pickle that wants {_short(f'{module_name}.{global_name}')}")

    def persistent_load(self, pid: Any, /) -> Any:
        raise CacheProtocolError("the cache server sent a pickle with persistent ids, which no tensor has")


class _StorageUnpickler(_NothingUnpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        kind = vars(torch).get(global_name) if module_name in ("torch", "torch.storage") else None
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
        dtype = vars(torch).get(global_name) if module_name == "torch" else None
        return dtype if isinstance(dtype, torch.dtype) else super().find_class(module_name, global_name)
