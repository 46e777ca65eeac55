"""What `memory://NAME?chunk_size=32&max_bytes=2GiB` says."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlsplit

from lmcache_stream.errors import UsageError

__all__ = ["DEFAULT_NAME", "parse_url"]

DEFAULT_NAME = "default"

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def parse_url(url: str) -> tuple[str, int | None, int | None]:
    """The name, the tokens a chunk and the bound on bytes; None for what it leaves open."""
    parts = urlsplit(url)
    name = parts.netloc or DEFAULT_NAME
    if parts.scheme != "memory" or parts.path.strip("/") or parts.fragment:
        raise UsageError(f"the embedded cache's url is memory://NAME?chunk_size=32&max_bytes=2GiB, not {url!r}")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    chunk_size, max_bytes = query.pop("chunk_size", None), query.pop("max_bytes", None)
    if query:
        raise UsageError(f"{url!r} has an unknown parameter {min(query)!r}: chunk_size and max_bytes are known")
    return (
        name,
        None if chunk_size is None else _positive(chunk_size, "chunk_size"),
        None if max_bytes is None else _size(max_bytes),
    )


def _positive(text: str, name: str) -> int:
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise UsageError(f"{name} must be a whole number of at least 1, not {text!r}")
    return int(text)


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]+)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS or int(match[1]) < 1:
        raise UsageError(f"max_bytes must be a size such as 2GiB, 500MB or 1048576, not {text!r}")
    return int(match[1]) * _UNITS[match[2]]
