"""Any frames as a cache server's reply: a value that a plain reading has as well, or our error.

Run it: `python -m tests.fuzz.fuzz_wire FOLDER -max_total_time=600`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from lmcache_stream.errors import CacheProtocolError
from lmcache_stream.kvcache.mp import wire

from . import plainly
from .driving import drive


def frames_of(data: bytes) -> list[bytes]:
    """The frames in fuzzed bytes: each behind its length, the last one what is left."""
    frames: list[bytes] = []
    while data and len(frames) < 4:
        size = data[0]
        frames.append(data[1 : 1 + size] if size < 0xF0 else data[1:])
        data = data[1 + size :] if size < 0xF0 else b""
    return frames


def check(data: bytes) -> None:
    """The first byte names the operation that was asked for."""
    if not data:
        return
    operation = wire.OPERATIONS[data[0] % len(wire.OPERATIONS)]
    try:
        uid, answered, frame = wire.split_reply(frames_of(data[1:]))
    except CacheProtocolError:
        return
    assert isinstance(uid, int)
    assert isinstance(answered, int | str)
    plain: Any = None
    try:
        plain = None if frame is None else plainly.read_msgpack(bytes(frame))
        readable = True
    except ValueError:
        readable = False
    try:
        result = wire.decode_result(operation, frame)
    except CacheProtocolError:
        return
    assert readable
    if frame is not None:
        check_value(msgspec.to_builtins(result, builtin_types=(bytes, memoryview)), plain)
        assert same(wire.decode_result(operation, msgspec.msgpack.encode(result)), result)


def check_value(value: Any, plain: Any) -> None:
    """Everything in `plain` that `value` has a name for is in `value`."""
    if isinstance(value, dict):
        # The structs' arrays are read by position and their maps by name; what a server leaves out has its default.
        assert isinstance(plain, dict), plain
        for name, inner in value.items():
            if name in plain:
                check_value(inner, plain[name])
    elif isinstance(value, list | tuple):
        assert isinstance(plain, list)
        assert len(value) == len(plain)
        for inner, other in zip(value, plain, strict=True):
            check_value(inner, other)
    elif isinstance(value, bytes | memoryview):
        assert bytes(value) == (b"" if plain is None else plain)
    else:
        assert value == plain
        assert isinstance(plain, float) or type(value) is type(plain)


def same(one: Any, other: Any) -> bool:
    """Whether two results are equal, in whatever their bytes lie."""
    if isinstance(one, wire.PreparedRetrieve) and isinstance(other, wire.PreparedRetrieve):
        return (one.success, bytes(one.data), one.context) == (other.success, bytes(other.data), other.context)
    return bool(one == other)


if __name__ == "__main__":
    drive(check, wire, plainly)
