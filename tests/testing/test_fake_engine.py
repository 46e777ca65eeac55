from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lmcache_stream import portal
from lmcache_stream.errors import UsageError
from lmcache_stream.testing import End, FakeEngine, Reply
from lmcache_stream.testing.replies import event_stream


def request(path: str = "/v1/completions", body: Any = None, method: str = "POST") -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    return f"{method} {path} HTTP/1.1\r\nHost: fake\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


ASKED = {"model": "fake", "prompt": [5, 6], "max_tokens": 3, "stream": True, "return_token_ids": True}


async def talk(engine: FakeEngine, *parts: bytes, count: int = 1) -> list[tuple[int, dict[str, str], bytes]]:
    """Sends the parts one by one and reads `count` responses by the rules of HTTP."""
    port = int(engine.base_url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        return [await asyncio.wait_for(read_response(reader), 5) for _ in range(count)]
    finally:
        writer.close()
        await writer.wait_closed()


async def read_response(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:] if line)
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            assert await reader.readexactly(2) == b"\r\n"
        assert await reader.readexactly(2) == b"\r\n"
    elif "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        body = await reader.read()
    return int(lines[0].split()[1]), headers, body


def payloads(body: bytes) -> list[Any]:
    events = body.decode().split("\n\n")
    assert events.pop() == ""
    texts = [line.removeprefix("data: ") for event in events for line in event.split("\n") if line.startswith("data")]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


HOW: list[dict[str, Any]] = [{}, {"pace": 0.0}, {"pace": 0.001}, {"write_size": 5}, {"chunked": False}]


@pytest.mark.parametrize("how", HOW)
async def test_exact_bytes(how: dict[str, Any]) -> None:
    body = b"data: {}\n\n: odd\r\n\r\n\xff\x00 data\n\n\n\ndata: [DONE]"
    async with FakeEngine() as engine:
        engine.script(Reply(body=body, **how))
        [(status, headers, got)] = await talk(engine, request(body=ASKED))
    assert (status, got) == (200, body)
    assert headers["content-type"] == "text/event-stream; charset=utf-8"


@pytest.mark.parametrize("how", HOW)
async def test_generated_stream(how: dict[str, Any]) -> None:
    async with FakeEngine() as engine:
        engine.script(Reply(tokens=[7, 8, 9], tokens_per_event=2, finish_reason="stop", comments=True, **how))
        [(_, _, body)] = await talk(engine, request(body=ASKED))
    *chunks, done = payloads(body)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["token_ids"] for choice in choices] == [[7, 8], [9]]
    assert [choice["text"] for choice in choices] == [" 7 8", " 9"]
    assert [choice["finish_reason"] for choice in choices] == [None, "stop"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[5, 6], None]
    assert body.count(b": keep-alive\n\n") == 3


async def test_what_the_request_asks_for() -> None:
    async with FakeEngine(default=Reply(cached_tokens=1)) as engine:
        [(_, _, body)] = await talk(engine, request(body={**ASKED, "stream_options": {"include_usage": True}}))
        [(_, _, plain)] = await talk(engine, request(body={**ASKED, "return_token_ids": False}))
    assert payloads(body)[-2]["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert [chunk["choices"][0]["token_ids"] for chunk in payloads(plain)[:-1]] == [None] * 3


async def test_ids_from_the_request() -> None:
    async with FakeEngine(default=Reply(tokens=lambda asked: reversed(asked["prompt"]), text=str)) as engine:
        [(_, _, body)] = await talk(engine, request(body=ASKED))
    assert [chunk["choices"][0]["text"] for chunk in payloads(body)[:-1]] == ["6", "5"]


async def test_requests_in_any_split_and_one_after_another() -> None:
    sent = request(body=ASKED) + request("/health", method="GET") + request(body={**ASKED, "max_tokens": 1})
    async with FakeEngine(default=Reply(pace=0.0)) as engine:
        whole = await talk(engine, sent, count=3)
        parts = await talk(engine, *(sent[i : i + 1] for i in range(len(sent))), count=3)
        assert [status for status, _, _ in whole] == [200] * 3
        assert [len(body) for _, _, body in whole] == [len(body) for _, _, body in parts]
        assert [r.path for r in engine.requests] == ["/v1/completions", "/health", "/v1/completions"] * 2
        assert engine.completions[0].json == ASKED
        assert engine.completions[0].headers["host"] == "fake"
        assert engine.accepted == 2


async def test_replies_are_taken_in_order_then_the_default() -> None:
    async with FakeEngine(default=Reply(status=500, body=b"default")) as engine:
        engine.script(Reply(status=429, body=b"first"), Reply(status=503, body=b"second"))
        answers = [(await talk(engine, request(body=ASKED)))[0] for _ in range(3)]
    assert [(status, body) for status, _, body in answers] == [(429, b"first"), (503, b"second"), (500, b"default")]


async def test_error_inside_the_stream() -> None:
    async with FakeEngine() as engine:
        engine.script(Reply(error_after=2, error={"message": "m"}), Reply(error_after=0, error="text"))
        [(_, _, body)] = await talk(engine, request(body=ASKED))
        assert payloads(body)[2:] == [{"error": {"message": "m"}}, "[DONE]"]
        [(_, _, body)] = await talk(engine, request(body=ASKED))
        assert payloads(body) == [{"error": "text"}, "[DONE]"]


@pytest.mark.parametrize("how", HOW)
async def test_cut_after_bytes(how: dict[str, Any]) -> None:
    body = b"data: one\n\ndata: two\n\ndata: three\n\n"
    async with FakeEngine() as engine:
        for count in (0, 1, 14, len(body)):
            engine.script(Reply(body=body, end_after_bytes=count, end=End.CUT, **{**how, "chunked": False}))
            [(_, _, got)] = await talk(engine, request(body=ASKED))
            assert got == body[:count]
        engine.script(Reply(body=body, end_after_bytes=14, end=End.CUT, **{**how, "chunked": True}))
        with pytest.raises((asyncio.IncompleteReadError, ValueError)):
            await talk(engine, request(body=ASKED))
        assert engine.disconnects == 0


async def test_reset() -> None:
    async with FakeEngine() as engine:
        engine.script(Reply(end_after=1, end=End.RESET))
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await talk(engine, request(body=ASKED))
        assert engine.disconnects == 0


async def test_stall_lasts_until_the_client_leaves() -> None:
    async with FakeEngine() as engine:
        engine.script(Reply(end_after=1, end=End.STALL))
        task = asyncio.create_task(talk(engine, request(body=ASKED)))
        await engine.until(lambda: engine.connections == 1 and len(engine.requests) == 1)
        assert engine.disconnects == 0
        task.cancel()
        await engine.disconnected()
        assert (engine.disconnects, engine.connections) == (1, 0)
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            await engine.disconnected(2, timeout=0.01)


async def test_stopping_leaves_nothing_and_counts_no_client() -> None:
    async with FakeEngine() as engine:
        engine.script(Reply(header_delay=60))
        task = asyncio.create_task(talk(engine, request(body=ASKED)))
        await engine.until(lambda: len(engine.requests) == 1)
    assert (engine.connections, engine.disconnects) == (0, 0)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
        await task


async def test_raw_bytes() -> None:
    async with FakeEngine() as engine:
        engine.script(Reply(raw=b"HTTP/1.1 299 Odd\r\ncontent-length: 1\r\n\r\nx"))
        assert (await talk(engine, request(body=ASKED)))[0][::2] == (299, b"x")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({**ASKED, "model": "other"}, 404, "model"),
        ({**ASKED, "cache_salt": ""}, 400, "cache_salt"),
        ({**ASKED, "prompt": []}, 400, "prompt"),
        ({**ASKED, "stream": False}, 400, "stream"),
    ],
)
async def test_what_an_engine_refuses(body: Any, status: int, param: str) -> None:
    async with FakeEngine() as engine:
        [(got, headers, answer)] = await talk(engine, request(body=body))
    assert (got, headers["content-type"]) == (status, "application/json")
    error = json.loads(answer)["error"]
    assert (error["code"], error["param"]) == (status, param)


async def test_other_routes() -> None:
    async with FakeEngine(model="m", root="path/m", max_model_len=77) as engine:
        [(_, _, models)] = await talk(engine, request("/v1/models", method="GET"))
        [(_, _, ids)] = await talk(engine, request("/tokenize", {"prompt": "hé"}))
        [(_, _, text)] = await talk(engine, request("/detokenize", {"tokens": json.loads(ids)["tokens"]}))
        [(missing, _, _)] = await talk(engine, request("/nothing", method="GET"))
    [card] = json.loads(models)["data"]
    assert (card["id"], card["root"], card["max_model_len"]) == ("m", "path/m", 77)
    assert json.loads(ids) == {"count": 4, "max_model_len": 77, "tokens": [256, 104, 195, 169], "token_strs": None}
    assert json.loads(text) == {"prompt": "hé"}
    assert missing == 404


def test_without_a_loop() -> None:
    with FakeEngine() as engine:
        with urllib.request.urlopen(engine.base_url + "/health", timeout=5) as response:
            assert response.status == 200
        portal.run(engine.until, lambda: engine.connections == 0)
        assert engine.requests[0].path == "/health"


def test_address_of_an_engine_that_does_not_run() -> None:
    with pytest.raises(UsageError, match="enter it"):
        _ = FakeEngine().base_url


def test_neither_the_fake_nor_the_client_imports_torch() -> None:
    code = "import sys, lmcache_stream.testing, lmcache_stream.completions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_slow_first_token_with_keep_alives() -> None:
    async with FakeEngine() as engine:
        engine.script(Reply(ttft=0.05, keep_alive=0.01), Reply(ttft=0.01, pace=0.0))
        [(_, _, body)] = await talk(engine, request(body=ASKED))
        assert body.startswith(b": keep-alive\n\n")
        assert len(payloads(body)) == 4
        [(_, _, body)] = await talk(engine, request(body=ASKED))
        assert b"keep-alive" not in body


async def test_keep_alives_of_a_stall_go_on_until_the_client_leaves() -> None:
    async with FakeEngine() as engine:
        engine.script(Reply(end_after=1, end=End.STALL, keep_alive=0.001))
        reader, writer = await asyncio.open_connection("127.0.0.1", int(engine.base_url.rpartition(":")[2]))
        writer.write(request(body=ASKED))
        for _ in range(3):
            await reader.readuntil(b": keep-alive\n\n")
        writer.close()
        await engine.disconnected()


async def test_a_head_that_trickles_in() -> None:
    async with FakeEngine() as engine:
        engine.script(Reply(header_pace=0.0001))
        [(status, _, body)] = await talk(engine, request(body=ASKED))
        assert (status, len(payloads(body))) == (200, 4)


async def test_what_comes_between_events_and_in_place_of_ids() -> None:
    async with FakeEngine() as engine:
        engine.script(Reply(inserted={0: b"data: zero\n\n", 2: b": two\n\n", 3: b"data: three\n\n"}))
        [(_, _, body)] = await talk(engine, request(body=ASKED))
        blocks = body.split(b"\n\n")
        assert [index for index, block in enumerate(blocks) if b"token_ids" not in block][:3] == [0, 3, 5]
        engine.script(Reply(token_ids=lambda ids: "none" if 1 in ids else ids))
        [(_, _, body)] = await talk(engine, request(body=ASKED))
        assert [chunk["choices"][0]["token_ids"] for chunk in payloads(body)[:3]] == [[0], "none", [2]]


async def test_a_cut_inside_an_event_or_a_character() -> None:
    async with FakeEngine() as engine:
        cut = Reply(end_after=1, end=End.CUT, chunked=False, text="é{}".format)
        engine.script(replace(cut, end_inside="event"), replace(cut, end_inside="character"))
        [(_, _, body)] = await talk(engine, request(body=ASKED))
        whole, part = body.split(b"\n\n")
        assert len(whole) // 2 - 40 < len(part) < len(whole)
        [(_, _, body)] = await talk(engine, request(body=ASKED))
        with pytest.raises(UnicodeDecodeError, match="unexpected end of data"):
            body.decode()


def test_only_a_text_of_such_characters_is_cut_inside_one() -> None:
    with pytest.raises(UsageError, match="several bytes"):
        event_stream(Reply(end_after=1, end_inside="character"), {"prompt": [1]}, "m")


class Cache:
    def __init__(self) -> None:
        self.offloaded: list[tuple[str, list[int], str]] = []

    def covered(self, model_name: str, token_ids: Sequence[int], cache_salt: str = "") -> int:
        return 2 if (model_name, list(token_ids), cache_salt) in self.offloaded else 0

    def offload(self, model_name: str, token_ids: Sequence[int], cache_salt: str = "") -> None:
        self.offloaded.append((model_name, list(token_ids), cache_salt))


async def test_an_engine_with_a_cache_offloads_its_prompts_and_tells_what_it_found() -> None:
    asked = {**ASKED, "cache_salt": "s", "stream_options": {"include_usage": True}}
    cache = Cache()
    async with FakeEngine(cache=cache) as engine:
        found = []
        for offloads in (False, True, True):
            engine.offloads = offloads
            [(_, _, body)] = await talk(engine, request(body=asked))
            found.append(payloads(body)[-2]["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert found == [0, 0, 1]  # an engine computes the last token of a prompt in any case
    assert cache.offloaded == [("fake", [5, 6], "s")] * 2


def test_waiting_for_an_engine_on_another_loop() -> None:
    with FakeEngine() as engine:
        engine.script(Reply(end_after=1, end=End.STALL))

        async def leave() -> None:
            task = asyncio.create_task(talk(engine, request(body=ASKED)))
            await engine.until(lambda: len(engine.requests) == 1)
            task.cancel()
            await engine.disconnected()

        asyncio.run(leave())
