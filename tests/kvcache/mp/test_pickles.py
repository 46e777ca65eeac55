from __future__ import annotations

import pickle
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
