"""What an engine can do wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from lmcache_stream import (
    CoverageTimeout,
    EditNotUsed,
    EngineConnectionError,
    EngineResponseError,
    EngineStreamError,
    LMCacheStreamError,
    StreamTimeout,
)
from lmcache_stream.testing import End, Reply

from .outcome import Fault, Phase, Raises, Survives
from .stack import MODEL, Stack, answer, says

IMPATIENT = {"idle_timeout": 2.0, "retries": 0}
ONCE = {"retries": 0}


def replies(*scripted: Reply) -> Callable[[Stack], None]:
    return lambda stack: stack.engine.script(*scripted)


def fails(cause: type[Exception], words: str, arrived: int = 0) -> Raises:
    return Raises(LMCacheStreamError, words, cause, arrived)


def refused(name: str, phase: Phase, words: str, **reply: Any) -> Fault:
    return Fault(
        name=name,
        side="engine",
        phase=phase,
        order=replies(Reply(**reply)),
        expect=fails(EngineResponseError, words),
        client=ONCE,
    )


def broken(name: str, words: str, arrived: int, cause: type[Exception] = EngineStreamError, **reply: Any) -> Fault:
    """The answer to the decode goes wrong after some tokens."""
    return Fault(
        name=name,
        side="engine",
        phase="decode",
        order=replies(says(**reply)),
        expect=fails(cause, words, arrived),
        client=ONCE,
    )


def survived(name: str, phase: Phase, *scripted: Reply, **options: Any) -> Fault:
    return Fault(name=name, side="engine", phase=phase, order=replies(*scripted), expect=Survives(), **options)


def no_ids_after(count: int) -> Callable[[list[int]], list[int] | None]:
    left = [count]

    def said(delta: list[int]) -> list[int] | None:
        left[0] -= len(delta)
        return delta if left[0] >= 0 else None

    return said


def body(text: str, kind: str = "application/json") -> dict[str, Any]:
    return {"body": text.encode(), "content_type": kind}


def head(lines: str) -> bytes:
    return lines.replace("\n", "\r\n").encode()


async def goes_down(stack: Stack) -> None:
    await stack.engine.stop()


async def comes_up(stack: Stack) -> None:
    await stack.engine.start()


async def restarts(stack: Stack) -> None:
    await stack.engine.stop()
    await stack.engine.start()


def lose_the_prompt(stack: Stack, tokens: int = 0) -> None:
    """As if the engine had offloaded the first tokens of the prompt only, so far."""
    stack.server.evict(stack.server.chunks)
    stack.server.offload(MODEL, stack.prompts[0][:tokens])


def offload_the_prompt(stack: Stack) -> None:
    stack.server.offload(MODEL, stack.prompts[0])


async def offload_late(stack: Stack, task: asyncio.Task[None]) -> None:
    while stack.server.calls["lookup"] < 3:  # noqa: ASYNC110  (another thread's state)
        await asyncio.sleep(0.005)
    offload_the_prompt(stack)


def event(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": "x", **choice}]}).encode() + b"\n\n"


ENGINE_FAULTS = [
    # It cannot be reached, or does not answer.
    Fault(
        name="engine is down",
        side="engine",
        phase="prefill",
        order=goes_down,
        lift=comes_up,
        expect=fails(EngineConnectionError, "gave no answer"),
    ),
    Fault(
        name="engine is down when it should decode",
        side="engine",
        phase="decode",
        order=goes_down,
        lift=comes_up,
        expect=fails(EngineConnectionError, "gave no answer"),
    ),
    Fault(
        name="engine restarts between prefill and decode",
        side="engine",
        phase="decode",
        order=restarts,
        expect=Survives(),
    ),
    survived("connection closed before the answer, once", "prefill", Reply(raw=b"")),
    Fault(
        name="connection closed before the answer, again and again",
        side="engine",
        phase="decode",
        order=replies(Reply(raw=b""), Reply(raw=b"")),
        expect=fails(EngineConnectionError, "the connection was closed"),
    ),
    Fault(
        name="head of the answer does not come",
        side="engine",
        phase="prefill",
        order=replies(says(header_delay=60)),
        expect=fails(EngineConnectionError, "nothing came for 2 s"),
        client=IMPATIENT,
    ),
    Fault(
        name="head of the answer trickles in byte by byte",
        side="engine",
        phase="decode",
        order=replies(says(header_pace=0.2)),
        expect=Raises(StreamTimeout, "no end in time, 0 tokens arrived", TimeoutError),
        timeout=0.8,
    ),
    # It refuses.
    refused(
        "400 with vLLM's error", "prefill", "HTTP 400: too long", status=400, body=b'{"error":{"message":"too long"}}'
    ),
    refused(
        "422 with a list of what is wrong",
        "prefill",
        "HTTP 422: body.prompt: Field required",
        status=422,
        body=b'{"detail":[{"loc":["body","prompt"],"msg":"Field required"}]}',
    ),
    refused("401 in plain words", "prefill", "HTTP 401: who are you", status=401, **body("who are you", "text/plain")),
    refused("404 with a page of HTML", "decode", "HTTP 404: Gone", status=404, **body("<h1>Gone</h1>", "text/html")),
    refused("413 without a body", "decode", "HTTP 413: Request Entity Too Large", status=413),
    refused("500 with an error", "decode", "HTTP 500: boom", status=500, body=b'{"error":{"message":"boom"}}'),
    refused("503 without an end", "prefill", "HTTP 503", status=503, body=b"busy"),
    refused("redirect elsewhere", "prefill", "not followed", status=307, headers={"location": "http://elsewhere/"}),
    survived("429 once, with Retry-After", "decode", Reply(status=429, body=b"", headers={"retry-after": "0"})),
    survived("502 of a proxy, once", "prefill", Reply(status=502, **body("<h1>Bad Gateway</h1>", "text/html"))),
    # It answers something that is no stream.
    Fault(
        name="200 and JSON with an error in place of a stream",
        side="engine",
        phase="decode",
        order=replies(Reply(**body('{"error":{"message":"no room"}}'))),
        expect=fails(EngineResponseError, "no room"),
    ),
    Fault(
        name="200 and a login page",
        side="engine",
        phase="prefill",
        order=replies(Reply(**body("<title>Log in</title>", "text/html"))),
        expect=fails(EngineStreamError, "text/html instead of an event stream: Log in"),
    ),
    Fault(
        name="answer that is no HTTP",
        side="engine",
        phase="prefill",
        order=replies(Reply(raw=b"\x00\x01\x02 SSH-2.0\r\n\r\n")),
        expect=fails(EngineStreamError, "no HTTP"),
    ),
    Fault(
        name="head of the answer cut off",
        side="engine",
        phase="decode",
        order=replies(*[Reply(raw=b"HTTP/1.1 200 OK\r\ncontent-ty")] * 2),
        expect=fails(EngineConnectionError, "the connection was closed"),
    ),
    Fault(
        name="body shorter than its content-length",
        side="engine",
        phase="decode",
        order=replies(
            Reply(
                raw=head("HTTP/1.1 200 OK\ncontent-type: text/event-stream\ncontent-length: 9999\n\n") + b": hello\n\n"
            )
        ),
        expect=fails(EngineStreamError, "broke off"),
    ),
    Fault(
        name="chunk of a length that is no number",
        side="engine",
        phase="decode",
        order=replies(
            Reply(raw=head("HTTP/1.1 200 OK\ncontent-type: text/event-stream\ntransfer-encoding: chunked\n\nzz\n"))
        ),
        expect=fails(EngineStreamError, "no HTTP: Invalid character in chunk size"),
    ),
    Fault(
        name="body said to be gzip that is not",
        side="engine",
        phase="decode",
        order=replies(says(headers={"content-encoding": "gzip"})),
        expect=fails(EngineStreamError, "Can not decode content-encoding"),
    ),
    # The stream breaks off or stalls.
    broken("cut between two events", "broke off", 3, end_after=3, end=End.CUT),
    broken("cut inside an event", "broke off", 3, end_after=3, end_inside="event", end=End.CUT),
    broken("cut inside a UTF-8 character", "broke off", 5, end_after=5, end_inside="character", end=End.CUT),
    broken("connection reset in the stream", "broke off", 3, end_after=3, end=End.RESET),
    broken("cut before the first token", "broke off", 0, end_after=0, end=End.CUT),
    broken("truncated, but HTTP ends in order", "broke off after 4 tokens", 4, end_after=4),
    broken("no finish reason and no [DONE]", "broke off after 8 tokens", 8, finish_reason=None, done=False),
    survived("finish reason but no [DONE]", "decode", says(done=False)),
    survived("connection cut behind [DONE]", "decode", says(end=End.CUT)),
    survived("connection stalls behind [DONE]", "decode", says(end=End.STALL)),
    Fault(
        name="stall before the first token",
        side="engine",
        phase="decode",
        order=replies(says(ttft=60)),
        expect=fails(EngineStreamError, "nothing came for 2 s"),
        client=IMPATIENT,
    ),
    Fault(
        name="stall in the stream",
        side="engine",
        phase="decode",
        order=replies(says(end_after=3, end=End.STALL)),
        expect=fails(EngineStreamError, "nothing came for 2 s", 3),
        client=IMPATIENT,
    ),
    Fault(
        name="stall with keep-alives",
        side="engine",
        phase="decode",
        order=replies(says(end_after=3, end=End.STALL, keep_alive=0.05)),
        expect=Raises(StreamTimeout, "no end in time, 3 tokens arrived", TimeoutError, 3),
        timeout=4.0,
    ),
    survived(
        "slow first token, with keep-alives", "decode", says(ttft=3.0, keep_alive=0.1), client={"idle_timeout": 2.0}
    ),
    survived("slow, in writes of one byte", "decode", says(write_size=1, comments=True)),
    survived("all tokens in one event", "decode", says(tokens_per_event=8)),
    # The stream says something wrong.
    broken("error at once inside the stream", "the engine failed", 0, EngineResponseError, error_after=0),
    broken("error inside the stream", "the engine failed", 3, EngineResponseError, error_after=3),
    broken(
        "error inside the stream in plain words",
        "out of memory",
        2,
        EngineResponseError,
        error_after=2,
        error="out of memory",
    ),
    broken("garbage in place of JSON", "no completion chunk", 3, inserted={3: b"data: {]\n\n"}),
    broken(
        "bytes that are no UTF-8", "no completion chunk", 3, inserted={3: b'data: {"choices":[{"text":"\xff"}]}\n\n'}
    ),
    broken("JSON that is no chunk", "no completion chunk", 3, inserted={3: b'data: {"hello": [1]}\n\n'}),
    broken("JSON nested without end", "no completion chunk", 3, inserted={3: b"data: " + b"[" * 200_000 + b"\n\n"}),
    broken("event of a second sequence", "several choices", 3, inserted={3: event(index=1, token_ids=[1])}),
    broken("no token ids", "without token ids", 0, ids=False),
    Fault(
        name="token ids missing from the fourth token on",
        side="engine",
        phase="decode",
        order=lambda stack: stack.engine.script(says(token_ids=no_ids_after(3))),
        expect=fails(EngineStreamError, "without token ids", 3),
    ),
    broken("token ids as text", "no completion chunk", 0, token_ids=lambda ids: list(map(str, ids))),
    broken("token ids as fractions", "no completion chunk", 0, token_ids=lambda ids: [0.5 for _ in ids]),
    broken("negative token id", "-7", 3, inserted={3: event(token_ids=[-7])}),
    broken("negative token id at once", "-7", 0, inserted={0: event(token_ids=[-7])}),
    broken("token id beyond 64 bits", "no completion chunk", 3, inserted={3: event(token_ids=[2**70])}),
    survived(
        "keep-alives and empty events between tokens", "decode", says(inserted={1: b": hi\n\n", 2: b"event: x\n\n\n\n"})
    ),
    survived("events of unknown fields", "decode", says(inserted={2: b"id: 7\nretry: 10\nfoo\n\n"})),
    Fault(
        name="engine gives the request up before the first token",
        side="engine",
        phase="decode",
        order=replies(says(inserted={0: event(text="", token_ids=[], finish_reason="abort")}, end_after=0, done=False)),
        expect=Raises(LMCacheStreamError, "finish reason 'abort' after 0 tokens"),
    ),
    Fault(
        name="engine gives the request up in the stream",
        side="engine",
        phase="decode",
        order=replies(says(tokens=lambda asked: answer(asked)[:3], finish_reason="abort")),
        expect=Raises(LMCacheStreamError, "finish reason 'abort' after 3 tokens", None, 3),
    ),
    # It does not keep to the cache.
    Fault(
        name="engine never offloaded the prompt",
        side="engine",
        phase="modify",
        order=lose_the_prompt,
        lift=offload_the_prompt,
        expect=Raises(CoverageTimeout, "covers 0 of 40 tokens"),
        coverage=0.2,
    ),
    Fault(
        name="engine offloaded half of the prompt",
        side="engine",
        phase="modify",
        order=lambda stack: lose_the_prompt(stack, 24),
        lift=offload_the_prompt,
        expect=Raises(CoverageTimeout, "covers 24 of 40 tokens"),
        coverage=0.2,
    ),
    Fault(
        name="engine offloads late",
        side="engine",
        phase="modify",
        order=lose_the_prompt,
        meanwhile=offload_late,
        expect=Survives(),
    ),
    Fault(
        name="engine decodes from something else than the edit",
        side="engine",
        phase="decode",
        order=replies(says(cached_tokens=0)),
        expect=Raises(EditNotUsed, "took 0 tokens from the cache, but the edit has 16", None, 8),
        restarted=True,
    ),
]
