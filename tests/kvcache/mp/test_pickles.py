from __future__ import annotations

import ctypes
import functools
import importlib
import operator
import os
import pickle
import struct
import subprocess
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_stream.errors import CacheProtocolError
from lmcache_stream.kvcache.mp.pickles import _rebuild_typed, dump_tensors, load_tensors

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("protocol", [3, pickle.DEFAULT_PROTOCOL, pickle.HIGHEST_PROTOCOL])
def test_tensors_come_back(dtype: torch.dtype, protocol: int) -> None:
    tensors = [(torch.randn(2, 3, 4, 5) * 50).to(dtype) for _ in range(3)]
    for data in (dump_tensors(tensors), memoryview(pickle.dumps(tensors, protocol=protocol))):
        loaded = load_tensors(data)
        assert [(t.dtype, t.shape) for t in loaded] == [(dtype, torch.Size([2, 3, 4, 5]))] * 3
        for a, b in zip(loaded, tensors, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_views_come_back() -> None:
    whole = torch.arange(24.0).view(2, 3, 4)
    (view,) = load_tensors(dump_tensors([whole[:, 1:, ::2]]))
    assert torch.equal(view, whole[:, 1:, ::2])


called: list[str] = []


class _Calls:
    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.reduced = function, args

    def __reduce__(self) -> Any:
        return self.reduced


def _witness(word: str) -> str:
    called.append(word)
    return word


@pytest.mark.parametrize(
    "evil",
    [
        _Calls(_witness, "called"),
        [_Calls(_witness, "called")],
        _Calls(eval, f"__import__({__name__!r})"),
        _Calls(getattr, b"", "hex"),
        _Calls(os.system, f"touch {__name__}"),
        _Calls(subprocess.run, ["true"]),
        _Calls(exec, "raise SystemExit"),
        _Calls(open, "/dev/shm/never", "w"),
        _Calls(importlib.import_module, "this"),
        _Calls(pickle.loads, pickle.dumps(_Calls(_witness, "called"))),
        _Calls(functools.partial, _witness, "called"),
        _Calls(operator.methodcaller, "clear"),
        _Calls(map, _witness, ["called"]),
        _Calls(getattr, _Calls(importlib.import_module, "os"), "system"),
        _Calls(_Calls, _Calls(_witness, "called")),
        _Calls(OrderedDict, [("a", 1)]),
        _Calls(ctypes.string_at, 1, 1),
        {"a": [(_Calls(_witness, "called"),)]},
        _Calls(torch.load, "/dev/null"),
        torch.nn.Linear(2, 2),
        _Calls(torch.storage._load_from_bytes, pickle.dumps(_Calls(_witness, "called"))),
        _Calls(torch._utils._rebuild_tensor_v2, _Calls(_witness, "called"), 0, (1,), (1,), False, None),
        _Calls(torch._utils._rebuild_tensor_v2, b"abcd", 0, (1,), (1,), False, None),
    ],
)
def test_nothing_else_is_built_and_nothing_is_called(evil: Any) -> None:
    called.clear()
    with pytest.raises(CacheProtocolError):
        load_tensors(pickle.dumps(evil))
    assert not called


@pytest.mark.parametrize("other", [None, 1, {"a": 1}, "text", [1], [None], (torch.ones(1),)])
def test_what_is_no_list_of_tensors(other: Any) -> None:
    with pytest.raises(CacheProtocolError, match="list"):
        load_tensors(pickle.dumps(other))


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [
        (0, (1000,), (1,)),
        (-1, (1,), (1,)),
        (0, (4,), (1000,)),
        (0, (4,), (-1,)),
        (1 << 62, (1,), (1,)),
        (0, ("a",), (1,)),
    ],
)
def test_no_memory_outside_the_storage_is_read(offset: Any, size: Any, stride: Any) -> None:
    ones: Any = torch.ones(4)
    function, reduced = ones.__reduce_ex__(2)[:2]
    assert callable(function)
    assert isinstance(reduced, tuple)
    arguments = [reduced[0], offset, size, stride, *reduced[4:]]
    with pytest.raises(CacheProtocolError):
        load_tensors(pickle.dumps([_Calls(function, *arguments)]))


def test_cut_anywhere() -> None:
    whole = dump_tensors([torch.ones(3)])
    for end in range(len(whole)):
        with pytest.raises(CacheProtocolError):
            load_tensors(whole[:end])


PICKLED = dump_tensors([torch.ones(3)])


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_a_flipped_byte_is_read_or_refused(data: st.DataObject) -> None:
    pickled = bytearray(PICKLED)
    pickled[data.draw(st.integers(0, len(pickled) - 1))] = data.draw(st.integers(0, 255))
    try:
        tensors = load_tensors(bytes(pickled))
    except CacheProtocolError:
        return
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)


def _text(word: str) -> bytes:
    return b"\x8c" + bytes([len(word)]) + word.encode()


def _sets_an_attribute(of: bytes) -> bytes:
    """A pickle that takes a name and builds `(None, {"nbytes": None})` onto it."""
    return b"\x80\x04" + of + b"\x93N}" + _text("nbytes") + b"Ns\x86b."


def test_no_pickle_changes_what_it_names() -> None:
    before = torch.UntypedStorage.nbytes, dict(vars(_rebuild_typed))
    inner = (
        b"\x80\x04N." * 3 + _sets_an_attribute(_text("torch") + _text("UntypedStorage")) + b"\x80\x04]Na." + b"\0" * 8
    )
    names = _text("torch.storage") + _text("_load_from_bytes")
    for data in (
        b"\x80\x04" + names + b"\x93B" + len(inner).to_bytes(4, "little") + inner + b"\x85R0].",
        _sets_an_attribute(_text("torch._utils") + _text("_rebuild_tensor_v2")),
        _sets_an_attribute(_text("torch") + _text("float32")),
    ):
        with pytest.raises(CacheProtocolError):
            load_tensors(data)
    assert (torch.UntypedStorage.nbytes, dict(vars(_rebuild_typed))) == before


def test_no_pickle_makes_a_storage_of_any_size() -> None:
    size = b"\x8a\x06" + (1 << 44).to_bytes(6, "little")
    inner = b"\x80\x04N." * 3 + b"\x80\x04" + _text("torch") + _text("UntypedStorage") + b"\x93" + size + b"\x85R."
    names = _text("torch.storage") + _text("_load_from_bytes")
    with pytest.raises(CacheProtocolError):
        load_tensors(b"\x80\x04" + names + b"\x93B" + len(inner).to_bytes(4, "little") + inner + b"\x85R0].")


def test_a_far_memo_index_costs_nothing() -> None:
    assert load_tensors(b"\x80\x04]r" + (1 << 31).to_bytes(4, "little") + b".") == []


def test_an_empty_tensor_comes_back() -> None:
    (back,) = load_tensors(dump_tensors([torch.empty(2, 0, 3, dtype=torch.bfloat16)]))
    assert back.shape == (2, 0, 3)
    assert back.dtype == torch.bfloat16


@pytest.mark.parametrize("odd", [torch._neg_view(torch.ones(3)), torch.ones(3, dtype=torch.complex64).conj()])
def test_bytes_that_are_not_the_values_are_refused(odd: torch.Tensor) -> None:
    with pytest.raises(CacheProtocolError, match="not its values"):
        load_tensors(dump_tensors([odd]))


# Pickles that cost more than they weigh.


def _called(module: str, name: str, *args: bytes) -> bytes:
    return _text(module) + _text(name) + b"\x93(" + b"".join(args) + b"tR"


def _storage(values: int) -> bytes:
    _, (data,) = torch.zeros(values)._typed_storage().__reduce__()  # type: ignore[no-untyped-call]
    return _called("torch.storage", "_load_from_bytes", b"B" + struct.pack("<i", len(data)) + data)


def _tensor(size: bytes, stride: bytes, bits: bytes = b"", storage: bytes = _storage(4)) -> bytes:
    return _called("torch._utils", "_rebuild_tensor_v2", storage, b"K\0", size, stride, b"\x89N", bits)


# A tuple that holds a tuple twice, that holds one twice, and so on: small, but no walk over it ends.
NESTED = b"()\x94" + b"".join(b"h" + bytes([level, ord("h"), level]) + b"\x86\x94" for level in range(90)) + b"t"
HUGE = (1 << 40).to_bytes(8, "little")
LONG = b"\x8a\x06" + HUGE[:6]

BOMBS = {
    "soup of empty lists": b"]" * 30_000_000,
    "soup of memos": b"]" + b"\x94" * 30_000_000,
    "a list in a list in a list": b"]" * 200_000 + b"a" * 199_999,
    "a key that no hash ends on": b"}" + NESTED + b"Ns",
    "keys that no hash ends on": b"}(" + NESTED + b"Nu",
    "bits that no repr ends on": b"]" + _tensor(b"K\1\x85", b"K\1\x85", NESTED) + b"a",
    "a size that no repr ends on": b"]" + _tensor(NESTED, b"K\1\x85") + b"a",
    "a size of text": b"]" + _tensor(_text("a") + LONG + b"\x86", b"K\1K\1\x86") + b"a",
    "a size of a million dimensions": b"]" + _tensor(b"(" + b"K\1" * 1_000_000 + b"t", b"K\1\x85") + b"a",
    "a copy of what is large": b"]" + _called("collections", "OrderedDict", b"](" + b"N" * 100 + b"e") + b"a",
    "a tensor larger than its storage": b"]" + _tensor(LONG + b"\x85", b"K\0\x85") + b"a",
    "a tensor many times": b"](" + _tensor(b"K\4\x85", b"K\1\x85") + b"\x94" + b"h\0" * 1000 + b"e",
    "many tensors of one storage": b"]("
    + _tensor(b"K\x80\x85", b"K\1\x85", storage=_storage(128) + b"\x94")
    + _tensor(b"K\x80\x85", b"K\1\x85", storage=b"h\0") * 90
    + b"e",
    "a bytearray of any size": b"\x96" + HUGE,
    "bytes of any size": b"\x8e" + HUGE,
    "a text of any size": b"\x8d" + HUGE,
    "a frame of any size": b"\x95" + HUGE,
    "a name of megabytes": b"c" + b"a" * (1 << 20) + b"\nb\n",
    "a pickle in a storage": b"]"
    + _called("torch.storage", "_load_from_bytes", b"B\0\0\1\0" + b"]" * (1 << 16))
    + b"a",
    "a persistent id": b"N\x51",
    "an extension": b"\x82\x01",
    "an object of a class": b"(" + _text("os") + _text("system") + b"o",
    "an instance of a class": b"(ios\nsystem\n",
    "an argument by name": _text("torch") + _text("float32") + b"\x93)}\x92",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_costs_what_it_weighs(name: str) -> None:
    began = time.process_time()
    with pytest.raises(CacheProtocolError) as caught:
        load_tensors(b"\x80\x04" + BOMBS[name] + b".", at_most=100)
    assert len(str(caught.value)) < 500
    assert time.process_time() - began < 30


def test_what_torch_imports_at_first_use_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "__getattr__", asked.append)
    for module in ("torch", "torch.storage"):
        with pytest.raises(CacheProtocolError, match="wants torch"):
            load_tensors(b"\x80\x04" + _called(module, "_dynamo") + b".")
    assert not asked


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.qint8, torch.bits8])
def test_a_tensor_of_no_kv(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    made = _called(
        "torch._utils",
        "_rebuild_tensor_v3",
        _storage(4),
        b"K\0K\1\x85K\1\x85\x89N" + _text("torch") + _text(name) + b"\x93",
    )
    with pytest.raises(CacheProtocolError, match=f"torch.{name}, which no KV has"):
        load_tensors(b"\x80\x04]" + made + b"a.")


def test_more_tensors_than_asked_for() -> None:
    three = dump_tensors([torch.ones(1)] * 3)
    assert len(load_tensors(three, at_most=3)) == 3
    with pytest.raises(CacheProtocolError, match="3 tensors"):
        load_tensors(three, at_most=2)
