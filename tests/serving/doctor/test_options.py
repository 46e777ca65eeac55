from __future__ import annotations

import traceback
from typing import Any

import pytest

from lmcache_stream.errors import UsageError
from lmcache_stream.serving.doctor import DoctorOptions


@pytest.mark.parametrize(
    "wrong",
    [
        {"kv_url": "memory://default"},
        {"kv_url": "localhost:5555"},
        {"kv_http_url": "localhost:8080"},
        {"timeout": 0.0},
        {"timeout": float("nan")},
    ],
)
def test_refuses_what_cannot_be_right(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"base_url": "http://a", "kv_url": "tcp://a:1", "kv_http_url": "http://a"}
    with pytest.raises(UsageError):
        DoctorOptions(**{**right, **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"kv_url": "redis://u:hunter2@h"},
        {"kv_url": "redis://h?password=hunter2"},
        {"kv_http_url": "ftp://u:hunter2@h"},
        {"kv_http_url": "ftp://h?key=hunter2"},
    ],
)
def test_does_not_repeat_a_secret(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"base_url": "http://a", "kv_url": "tcp://a:1", "kv_http_url": "http://a"}
    with pytest.raises(UsageError) as caught:
        DoctorOptions(**{**right, **wrong})
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))
