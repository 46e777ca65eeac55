from __future__ import annotations

from typing import Any

import pytest

from lmcache_stream.addresses import check_address, is_line, shown
from lmcache_stream.errors import UsageError


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("http://host:8000/path", "http://host:8000/path"),
        ("http://user:secret@host/path", "http://***@host/path"),
        ("http://user:sec@ret@host", "http://***@host"),
        ("http://user:sec/ret@host", "http://***@host"),
        ("http://host/?key=secret", "http://host/"),
        ("http://host#secret", "http://host"),
        ("memory://default", "memory://default"),
        ("host", "host"),
        ("x" * 1000, "x" * 200),
    ],
)
def test_what_is_shown_of_an_address(url: str, seen: str) -> None:
    assert shown(url) == seen


@pytest.mark.parametrize(
    "url",
    [
        "tcp://localhost:5555",
        "ipc:///tmp/a@b",
        "memory://a b?chunk_size=4",
        "grpc+unix:///path",
        "http://[::1]:8000",
        "",
        "host",
    ],
)
def test_addresses_that_can_be(url: str) -> None:
    assert check_address(url, "url") == url


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (5, "must be a string"),
        (None, "must be a string"),
        ("http://host:port", "cannot be read"),
        ("http://[", "cannot be read"),
        ("http://user:secret@host", "holds credentials"),
        ("http://@host", "holds credentials"),
        ("http://host\0", "control characters"),
        ("\ud800", "control characters"),
    ],
)
def test_addresses_that_cannot_be(url: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        check_address(url, "url")
    assert "secret" not in str(caught.value)


def test_lines() -> None:
    assert is_line("Qwen/Qwen3-8B")
    assert is_line("mödel name")
    for other in ("", "a\nb", "a\x1b", "\ud800", "\u2028", None, b"a", 5):
        assert not is_line(other)
