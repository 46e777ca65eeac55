from __future__ import annotations

import json
import time
from typing import Any

import pytest

from lmcache_stream.completions.faults import excerpt, response_error

from .recorded import RECORDED, REFUSALS


@pytest.mark.parametrize("name", REFUSALS)
def test_recorded_error_bodies(name: str) -> None:
    recorded = RECORDED[name]
    told = json.loads(recorded.body)["error"]
    error = response_error(recorded.status, recorded.body)
    assert (error.status, error.message, error.type, error.param, error.code) == (
        recorded.status,
        told["message"],
        told["type"],
        told["param"],
        told["code"],
    )
    assert told["message"] in str(error)
    assert str(recorded.status) in str(error)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"detail": "Not Found"}, "Not Found"),
        ({"detail": [{"loc": ["body", "n"], "msg": "must be 1"}, {"msg": "x"}]}, "body.n: must be 1; x"),
        ({"error": "plain words"}, "plain words"),
        ({"object": "error", "message": "old shape", "code": 400}, "old shape"),
        ({"message": "of a gateway"}, "of a gateway"),
        ({"error": {"text": "unknown fields"}}, "{'text': 'unknown fields'}"),
        ({"odd": 1}, '{"odd": 1}'),
        ([1, 2], "[1, 2]"),
    ],
)
def test_json_shapes(body: Any, message: str) -> None:
    assert response_error(422, json.dumps(body).encode()).message == message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"upstream  timed\n out", "upstream timed out"),
        (
            b"<html><head><title>502 Bad Gateway</title><style>p{}</style></head><body><h1>nginx &amp; co</h1></body>",
            "502 Bad Gateway nginx & co",
        ),
        (b"", "Bad Gateway"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"[" * 5000, "[" * 497 + "..."),
    ],
)
def test_other_bodies(body: bytes, message: str) -> None:
    assert response_error(502, body, reason="Bad Gateway").message == message


def test_excerpt_is_bounded() -> None:
    assert len(excerpt(b"word " * 10_000)) == 500


@pytest.mark.parametrize("piece", ["<script", "<!--", "<", "<style>", "</script", "<a <"])
def test_a_page_of_open_tags_takes_no_time(piece: str) -> None:
    began = time.process_time()
    excerpt(piece * (65536 // len(piece)))
    assert time.process_time() - began < 1


def test_messages_are_bounded() -> None:
    for body in ({"error": {"message": "x" * 60_000}}, {"detail": [{"msg": "x" * 60_000}]}, {"error": "x" * 60_000}):
        assert len(str(response_error(400, json.dumps(body).encode()))) < 5000
