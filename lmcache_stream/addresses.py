"""URLs as they may be shown, and what may stand in one line of a request.

A password or a key in a URL must come into no message and no file.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from lmcache_stream.errors import UsageError

__all__ = ["check_address", "is_line", "shown"]

_USERINFO = re.compile(r"(?<=://).*@", re.DOTALL)
_LONGEST = 200


def shown(url: str) -> str:
    """`url` without user, password, query and fragment, and not longer than an address is."""
    return re.split(r"[?#]", _USERINFO.sub("***@", url), maxsplit=1)[0][:_LONGEST]


def is_line(value: object) -> bool:
    """Whether `value` is a text without line breaks, control characters and lone surrogates, and not empty."""
    return isinstance(value, str) and value != "" and value.isprintable()


def check_address(url: str, name: str) -> str:
    """Return `url` if it can be an address that needs no hiding.

    Args:
        url: What was given.
        name: The parameter that it was given as.

    Raises:
        UsageError: It is no text, cannot be parsed, or holds credentials; the message does not repeat those.
    """
    if not isinstance(url, str):
        raise UsageError(f"{name} must be a string such as 'http://localhost:8000', not {type(url).__name__}")
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018
    except ValueError:
        raise UsageError(f"{name}={shown(url.partition('://')[0])}://... cannot be read: give host and port") from None
    if "@" in parts.netloc:
        raise UsageError(
            f"{name} holds credentials, which would show in logs and errors: leave them out (a key is api_key)"
        )
    if url and not is_line(url):
        raise UsageError(f"{name}={shown(url)!r} holds control characters: leave them out")
    return url
