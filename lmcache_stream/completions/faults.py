"""An engine's error bodies, in every shape that servers and the proxies before them send. No I/O."""

from __future__ import annotations

import html
import re
from typing import Any

import msgspec

from lmcache_stream.errors import EngineResponseError

__all__ = ["excerpt", "json_error", "response_error"]

# What is not closed goes on to the end: to look for an end again from every start takes the square of the time.
_HTML_NOISE = re.compile(r"(?is)<(script|style)\b.*?(?:</\1\s*>|\Z)|<!--.*?(?:-->|\Z)|<[^>]*(?:>|\Z)")
_LONGEST = 4000


def excerpt(body: bytes | str, limit: int = 500) -> str:
    """The start of a body as one readable line, without HTML tags."""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
    if text.lstrip()[:1] == "<":
        text = html.unescape(_HTML_NOISE.sub(" ", text))
    text = _printable(" ".join(text.split()))
    return text if len(text) <= limit else text[: limit - 3] + "..."


def response_error(status: int, body: bytes, *, reason: str = "") -> EngineResponseError:
    """The error that an HTTP response with an error status stands for.

    Args:
        status: The HTTP status.
        body: The response's body: JSON in vLLM's or FastAPI's shape, plain text, HTML, or nothing.
        reason: The words of the status line, for a response without a body.
    """
    return json_error(status, body) or EngineResponseError(excerpt(body) or reason or "no reason given", status=status)


def json_error(status: int, body: bytes) -> EngineResponseError | None:
    """The error that a JSON text stands for; None if it is no JSON or has no known shape.

    Known are `{"error": {"message": ...}}`, `{"error": "text"}`, `{"object": "error", "message": ...}`,
    `{"message": ...}`, `{"detail": "text"}` and FastAPI's `{"detail": [{"loc": ..., "msg": ...}]}`.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    fields = value.get("error") or value.get("detail") or value
    if isinstance(fields, list):
        return EngineResponseError(_printable("; ".join(map(_validation_text, fields))[:_LONGEST]), status=status)
    if isinstance(fields, dict) and isinstance(fields.get("message"), str):
        code = fields.get("code")
        return EngineResponseError(
            _printable(fields["message"][:_LONGEST]),
            status=status,
            type=_text_or_none(fields.get("type")),
            param=_text_or_none(fields.get("param")),
            code=code if isinstance(code, int | str) else None,
        )
    if fields is value:
        return None
    words = _printable(fields[:_LONGEST]) if isinstance(fields, str) else excerpt(str(fields))
    return EngineResponseError(words, status=status)


def _printable(text: str) -> str:
    """`text` without what a terminal would take for a command."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def _validation_text(item: Any) -> str:
    if isinstance(item, dict) and isinstance(item.get("msg"), str):
        where = item.get("loc")
        return f"{'.'.join(map(str, where))}: {item['msg']}" if isinstance(where, list) and where else item["msg"]
    return str(item)


def _text_or_none(value: Any) -> str | None:
    return None if value is None else str(value)
