"""What bytes mean, read in the plainest way: what the fast readers are held against."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reading:
    """A body of server-sent events.

    Args:
        tokens: (id, text), as they are handed out.
        ended: Whether it says by itself that it is over.
        failed: Whether it holds something that is no token stream.
        finish_reason: As told.
    """

    tokens: list[tuple[int | None, str]] = field(default_factory=list)
    ended: bool = False
    failed: bool = False
    finish_reason: str | None = None


def lines_of(body: bytes) -> list[bytes]:
    """Complete lines, ended by CR, LF or CRLF; a byte order mark in front is left out."""
    text = body.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return text.split(b"\n")[:-1]


def events_of(body: bytes) -> list[bytes]:
    """The data of complete events, line after line as the standard tells it."""
    events: list[bytes] = []
    data: list[bytes] = []
    for line in lines_of(body):
        name, _, value = line.partition(b":")
        if name == b"data":
            data.append(value.removeprefix(b" "))
        if not line:
            events += [joined] if (joined := b"\n".join(data)) else []
            data = []
    return events


def read_sse(body: bytes) -> Reading:
    """Read a streamed completion with the standard library alone."""
    reading = Reading()
    for event in events_of(body):
        if event.startswith(b"[DONE]"):
            reading.ended = True
            return reading
        try:
            # What is not read may hold anything.
            _read_chunk(json.loads(event.decode("utf-8", "replace"), strict=False), reading)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            reading.failed = True
            return reading
    return reading


def _read_chunk(chunk: Any, reading: Reading) -> None:
    if chunk.get("error") or not isinstance(chunk.get("choices"), list):
        raise ValueError
    for choice in chunk["choices"][1:]:
        raise ValueError(choice)
    for choice in chunk["choices"]:
        ids, text = choice.get("token_ids"), choice.get("text") or ""
        if choice.get("index", 0) != 0 or (ids is None and (text or not _had_id(reading))):
            raise ValueError
        if not isinstance(text, str) or any(type(token) not in (int, float) for token in ids or ()):
            raise TypeError
        reading.tokens += [(int(token), "") for token in (ids or [])[:-1]]
        if ids or text:
            reading.tokens.append((int(ids[-1]) if ids else None, text))
        reading.finish_reason = choice.get("finish_reason") or reading.finish_reason


def _had_id(reading: Reading) -> bool:
    return any(token is not None for token, _ in reading.tokens)


def read_msgpack(frame: bytes) -> Any:
    """The value of one MessagePack frame; extensions are their type and bytes.

    Raises:
        ValueError: It is none, or something follows it.
    """
    value, end = _value(memoryview(frame), 0, 0)
    if end != len(frame):
        raise ValueError("something follows the value")
    return value


_FIXED = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = dict(zip(range(0xCA, 0xD4), (">f", ">d", ">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q"), strict=True))
_SIZED = {0xC4: (1, bytes), 0xC5: (2, bytes), 0xC6: (4, bytes), 0xD9: (1, str), 0xDA: (2, str), 0xDB: (4, str)}
_EXTENSIONS = {0xC7: (1, 0), 0xC8: (2, 0), 0xC9: (4, 0)} | {0xD4 + power: (0, 1 << power) for power in range(5)}
_HOLDING = {0xDC: (2, list), 0xDD: (4, list), 0xDE: (2, dict), 0xDF: (4, dict)}


def _value(data: memoryview, at: int, depth: int) -> tuple[Any, int]:
    if at >= len(data) or depth > 200:
        raise ValueError("cut off, or too deep")
    tag, at = data[at], at + 1
    if tag < 0x80 or tag >= 0xE0:
        return tag - 0x100 * (tag >= 0xE0), at
    if tag in _FIXED:
        return _FIXED[tag], at
    if tag in _NUMBERS:
        size = struct.calcsize(_NUMBERS[tag])
        return struct.unpack(_NUMBERS[tag], _taken(data, at, size))[0], at + size
    if 0xA0 <= tag < 0xC0:
        return _text(data, at, tag - 0xA0), at + tag - 0xA0
    if tag in _SIZED:
        width, kind = _SIZED[tag]
        size, at = int.from_bytes(_taken(data, at, width), "big"), at + width
        return (_text(data, at, size) if kind is str else bytes(_taken(data, at, size))), at + size
    if tag in _EXTENSIONS:
        width, size = _EXTENSIONS[tag]
        if width:
            size, at = int.from_bytes(_taken(data, at, width), "big"), at + width
        return bytes(_taken(data, at, 1 + size)), at + 1 + size
    if tag in _HOLDING:
        width, holder = _HOLDING[tag]
        size, at = int.from_bytes(_taken(data, at, width), "big"), at + width
    elif tag < 0xA0:
        size, holder = tag & 0x0F, dict if tag < 0x90 else list
    else:
        raise ValueError(f"tag {tag:#x}")
    items: list[Any] = []
    for _ in range(size * (2 if holder is dict else 1)):
        item, at = _value(data, at, depth + 1)
        items.append(item)
    if holder is list:
        return items, at
    return {_hashable(key): value for key, value in zip(items[::2], items[1::2], strict=True)}, at


def _taken(data: memoryview, at: int, size: int) -> memoryview:
    if at + size > len(data):
        raise ValueError("cut off")
    return data[at : at + size]


def _text(data: memoryview, at: int, size: int) -> str:
    return str(_taken(data, at, size), "utf-8", "replace")  # what is not read may hold anything


def _hashable(key: Any) -> Any:
    # By identity: the text of maps in keys of maps doubles with every level.
    return id(key) if isinstance(key, list | dict) else key
