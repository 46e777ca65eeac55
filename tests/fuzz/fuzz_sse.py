"""Any bytes as a streamed completion: the tokens are those of a plain reading, or there is an error.

Run it: `python -m tests.fuzz.fuzz_sse FOLDER -max_total_time=600`.
"""

from __future__ import annotations

from lmcache_stream.completions import sse
from lmcache_stream.errors import EngineError
from lmcache_stream.types import Completion, TokenEvent

from . import plainly
from .driving import drive

MAX_EVENT_BYTES = 1 << 16


def check(data: bytes) -> None:
    """The first byte says how the rest is cut into reads."""
    if not data:
        return
    size, body = data[0] or len(data), data[1:]
    decoder = sse.CompletionDecoder(MAX_EVENT_BYTES)
    tokens: list[TokenEvent] = []
    for start in range(0, len(body), size):
        tokens += decoder.feed(body[start : start + size], 1.0)
    completion: Completion | None = None
    try:
        completion = decoder.finish()
    except EngineError as error:
        assert str(error)  # noqa: PT017
    plain = plainly.read_sse(body)
    got = [(token.token_id, token.text) for token in tokens]
    assert got == plain.tokens[: len(got)]
    assert decoder.tokens == sum(token is not None for token, _ in got)
    if completion is not None:
        assert not plain.failed
        assert got == plain.tokens
        assert completion.finish_reason == plain.finish_reason
        assert plain.ended or plain.finish_reason is not None


if __name__ == "__main__":
    drive(check, sse, plainly)
