from __future__ import annotations

import asyncio
import inspect
import json
import time
import traceback
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

from lmcache_stream.completions import CompletionsClient, ModelCard
from lmcache_stream.errors import (
    EngineConnectionError,
    EngineError,
    EngineResponseError,
    EngineStreamError,
    LMCacheError,
    UsageError,
)
from lmcache_stream.testing.fake_engine import End, FakeEngine, Reply
from lmcache_stream.types import Completion, TokenEvent, Usage

from .asking import HOW, consume, first, in_use, recorded_reply
from .recorded import DATA, RECORDED, REFUSALS, STREAMS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

KEY = "sk-a-secret-key"


# The recorded bytes, over a socket


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", STREAMS)
async def test_recorded_streams(engine: FakeEngine, client: CompletionsClient, name: str, how: str) -> None:
    recorded = RECORDED[name]
    engine.script(recorded_reply(name, **HOW[how]))
    tokens, completion = await consume(client)
    assert tokens == recorded.tokens
    last = recorded.choices[-1]
    assert completion == Completion(
        finish_reason=last["finish_reason"],
        stop_reason=last["stop_reason"],
        usage=None if recorded.usage is None else Usage(*recorded.usage),
    )


@pytest.mark.parametrize("name", REFUSALS)
async def test_recorded_refusals(engine: FakeEngine, client: CompletionsClient, name: str) -> None:
    engine.script(recorded_reply(name))
    tokens, error = await consume(client)
    assert isinstance(error, EngineResponseError)
    told = json.loads(RECORDED[name].body)["error"]
    assert (error.status, error.message, error.type) == (RECORDED[name].status, told["message"], told["type"])
    assert (error.param, error.code, tokens) == (told["param"], told["code"], [])


@pytest.mark.parametrize("how", HOW)
async def test_recorded_error_inside_the_stream(engine: FakeEngine, client: CompletionsClient, how: str) -> None:
    engine.script(recorded_reply("bad-token", **HOW[how]))
    _, error = await consume(client)
    assert isinstance(error, EngineResponseError)
    assert (error.status, error.message) == (200, "Token id 999999 is out of vocabulary")


@pytest.mark.parametrize("name", ["no-ids", "token-id-strings"])
async def test_recorded_streams_without_ids(engine: FakeEngine, client: CompletionsClient, name: str) -> None:
    engine.script(recorded_reply(name, pace=0.0))
    tokens, error = await consume(client)
    assert isinstance(error, EngineStreamError)
    assert "return_token_ids" in str(error)
    assert tokens == []


# What is sent


async def test_request(engine: FakeEngine, client: CompletionsClient) -> None:
    params = {"max_tokens": 2, "temperature": 0, "stop": ["a"], "logit_bias": {"2": 1.5}, "stream_options": {"x": 1}}
    before = json.dumps(params)
    await consume(client, params, "salt")
    [request] = engine.requests
    assert json.dumps(params) == before
    assert (request.method, request.path) == ("POST", "/v1/completions")
    assert request.json == {
        **params,
        "model": "tiny",
        "prompt": [1, 2, 3],
        "cache_salt": "salt",
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "x": 1},
    }
    assert request.headers["content-type"] == "application/json"
    assert request.headers["accept"] == "text/event-stream"
    assert request.headers["accept-encoding"] == "identity"
    assert "authorization" not in request.headers


@pytest.mark.parametrize(
    "params", [{"echo": True}, {"n": 2}, {"best_of": 2}, {"prompt_logprobs": 1}, {"stream": False}, {"model": "other"}]
)
async def test_what_cannot_be_streamed_is_refused_before_anything_is_sent(
    engine: FakeEngine, client: CompletionsClient, params: dict[str, Any]
) -> None:
    _, error = await consume(client, params)
    assert isinstance(error, UsageError)
    assert engine.requests == []


async def test_long_prompt_arrives_whole_and_comes_back_in_the_first_event(
    engine: FakeEngine, client: CompletionsClient
) -> None:
    prompt = list(range(400_000))
    items = [item async for item in client(prompt, {"max_tokens": 2})]
    assert [item.token_id for item in items[:-1] if isinstance(item, TokenEvent)] == [0, 1]
    assert engine.requests[0].json["prompt"] == prompt
    assert len(engine.requests[0].body) > 2**21


# The shape of the callable


def test_it_is_an_async_generator_function() -> None:
    assert inspect.isasyncgenfunction(CompletionsClient.__call__)
    assert inspect.isasyncgenfunction(CompletionsClient.batches)


def test_every_coroutine_takes_a_timeout() -> None:
    for name, member in inspect.getmembers(CompletionsClient, inspect.iscoroutinefunction):
        if not name.startswith("_"):
            assert "timeout" in inspect.signature(member).parameters, name


async def test_one_completion_comes_last(engine: FakeEngine, client: CompletionsClient) -> None:
    engine.script(Reply(cached_tokens=2, finish_reason="stop", stop_reason=7))
    items = [item async for item in client([1, 2, 3], {"max_tokens": 4})]
    assert [type(item) for item in items] == [TokenEvent] * 4 + [Completion]
    usage = Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=2)
    assert items[-1] == Completion(finish_reason="stop", stop_reason=7, usage=usage)


async def test_batches_hold_what_came_together_with_its_time(engine: FakeEngine, client: CompletionsClient) -> None:
    engine.script(Reply(tokens=6, tokens_per_event=3, pace=0.0, comments=True))
    before = time.perf_counter()
    batches = [batch async for batch in client.batches([1], {})]
    after = time.perf_counter()
    assert isinstance(batches.pop(), Completion)
    tokens = []
    for batch in batches:
        assert isinstance(batch, list)
        assert batch
        assert len({token.time for token in batch}) == 1
        tokens += batch
    assert [(token.token_id, token.text) for token in tokens] == [
        *((0, ""), (1, ""), (2, " 0 1 2")),
        *((3, ""), (4, ""), (5, " 3 4 5")),
    ]
    times = [token.time or 0.0 for token in tokens]
    assert times == sorted(times)
    assert before <= times[0] <= times[-1] <= after


# The model's name


async def test_model_is_asked_for_once(engine: FakeEngine) -> None:
    async with CompletionsClient(engine.base_url) as client:
        await asyncio.gather(*(consume(client) for _ in range(5)))
        assert client.model == "tiny"
        await consume(client)
    assert [request.path for request in engine.requests].count("/v1/models") == 1
    assert {request.json["model"] for request in engine.completions} == {"tiny"}


async def test_a_cancelled_caller_does_not_keep_the_others_from_the_model(engine: FakeEngine) -> None:
    engine.script(Reply(header_delay=60, body=b"{}"), path="/v1/models")
    async with CompletionsClient(engine.base_url) as client:
        tasks = [asyncio.create_task(consume(client)) for _ in range(2)]
        await engine.until(lambda: len(engine.requests) == 1)
        tasks[0].cancel()
        tokens, completion = await tasks[1]
        assert (len(tokens), type(completion)) == (16, Completion)


@pytest.mark.parametrize(
    ("names", "kind", "words"),
    [(["a", "b"], UsageError, "model=: a, b"), ([], EngineResponseError, "lists no model")],
)
async def test_no_single_model(engine: FakeEngine, names: list[str], kind: type[LMCacheError], words: str) -> None:
    body = json.dumps({"data": [{"id": name} for name in names]}).encode()
    engine.script(Reply(body=body, content_type="application/json"), path="/v1/models")
    async with CompletionsClient(engine.base_url) as client:
        _, error = await consume(client)
    assert isinstance(error, kind)
    assert words in str(error)
    assert engine.completions == []


async def test_a_request_may_choose_its_model_when_the_client_has_none(engine: FakeEngine) -> None:
    async with CompletionsClient(engine.base_url) as client:
        await consume(client, {"model": "tiny"})
    assert [request.path for request in engine.requests] == ["/v1/completions"]


# Address and key


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_base_url_with_and_without_v1(engine: FakeEngine, suffix: str) -> None:
    async with CompletionsClient(engine.base_url + suffix) as client:
        assert client.base_url == engine.base_url
        await consume(client)
        assert await client.tokenize("a", False) == [97]
    assert [request.path for request in engine.requests] == ["/v1/models", "/v1/completions", "/tokenize"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (None, "OPENAI_BASE_URL"),
        ("", "OPENAI_BASE_URL"),
        ("localhost:8000", "http://localhost:8000"),
        ("ftp://host", "http://localhost:8000"),
        ("http://", "http://localhost:8000"),
        ("http://host?x=1", "http://localhost:8000"),
        ("http://host:port", "base_url"),
        ("http://user:password@host", "api_key"),
    ],
)
def test_base_url_that_cannot_be_right(url: str | None, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        CompletionsClient(url)
    assert "password" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong", [{"connect_timeout": 0}, {"idle_timeout": -1}, {"retries": -1}, {"max_connections": -1}]
)
def test_numbers_that_cannot_be_right(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        CompletionsClient("http://host", **wrong)


async def test_environment(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", engine.base_url + "/v1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    async with CompletionsClient() as client:
        await consume(client)
        assert KEY not in repr(client)
    assert {request.headers["authorization"] for request in engine.requests} == {f"Bearer {KEY}"}


@pytest.mark.parametrize(
    "reply",
    [
        Reply(status=401, body=json.dumps({"error": {"message": f"bad key {KEY}"}}).encode()),
        Reply(status=401, body=f"bad key {KEY}".encode(), content_type="text/plain"),
        Reply(body=f"bad key {KEY}".encode(), content_type="text/plain"),
        Reply(body=json.dumps({"error": f"bad key {KEY}"}).encode(), content_type="application/json"),
        Reply(body=b'data: {"error": {"message": "bad key ' + KEY.encode() + b'"}}\n\n'),
        Reply(raw=b"garbage\r\n\r\n"),
        Reply(raw=b""),
    ],
)
async def test_key_shows_in_no_error(engine: FakeEngine, reply: Reply, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    engine.script(reply)
    async with CompletionsClient(engine.base_url, model="tiny", api_key=KEY, retries=0) as client:
        _, error = await consume(client)
    assert isinstance(error, EngineError)
    seen: BaseException | None = error
    while seen is not None:
        assert KEY not in repr(seen) + str(seen) + repr(vars(seen))
        seen = seen.__cause__ or seen.__context__
    assert KEY not in "".join(traceback.format_exception(error)) + caplog.text
    assert engine.requests[0].headers["authorization"] == f"Bearer {KEY}"


async def test_redirects_are_not_followed(engine: FakeEngine) -> None:
    async with FakeEngine() as elsewhere:
        engine.script(Reply(status=307, body=b"", headers={"location": elsewhere.base_url + "/v1/completions"}))
        async with CompletionsClient(engine.base_url, model="tiny", api_key=KEY) as client:
            _, error = await consume(client)
        assert isinstance(error, EngineResponseError)
        assert error.status == 307
        assert elsewhere.base_url in str(error)
        assert elsewhere.accepted == 0


# Leaving early


async def test_leaving_closes_the_response(engine: FakeEngine, client: CompletionsClient) -> None:
    engine.default = Reply(end_after=1, end=End.STALL)

    async def exhaust(items: AsyncGenerator[TokenEvent | Completion, None]) -> None:
        async for _ in items:
            pass

    async def by_break(items: AsyncGenerator[TokenEvent | Completion, None]) -> None:
        async for _ in items:
            break
        await items.aclose()

    async def by_error(items: AsyncGenerator[TokenEvent | Completion, None]) -> None:
        try:
            async with aclosing(items):
                async for _ in items:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass

    async def by_deadline(items: AsyncGenerator[TokenEvent | Completion, None]) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(exhaust(items), 0.05)

    async def by_forgetting(items: AsyncGenerator[TokenEvent | Completion, None]) -> None:
        assert isinstance(await anext(items), TokenEvent)

    for count, leave in enumerate((by_break, by_error, by_deadline, by_forgetting), start=1):
        await leave(client([1], {}))
        await engine.disconnected(count)
        assert in_use(client) == 0
    assert engine.connections == 0


@pytest.mark.parametrize(
    "reply",
    [
        Reply(header_delay=60),
        Reply(end_after=0, end=End.STALL),
        Reply(end_after=1, end=End.STALL),
        Reply(pace=60),
        Reply(status=500, body=b"xyz", end_after_bytes=1, end=End.STALL),
    ],
)
async def test_cancellation_closes_the_response(engine: FakeEngine, client: CompletionsClient, reply: Reply) -> None:
    engine.script(reply)
    task = asyncio.create_task(consume(client))
    await engine.until(lambda: len(engine.requests) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.disconnected()
    assert in_use(client) == 0
    assert engine.connections == 0
    tokens, _ = await consume(client)
    assert len(tokens) == 16


async def test_cancellation_at_every_pass_of_the_loop(engine: FakeEngine, client: CompletionsClient) -> None:
    engine.default = Reply(tokens=3, pace=0.0)
    passes = 0
    finished = False
    while not finished:
        task = asyncio.create_task(consume(client))
        for _ in range(passes):
            await asyncio.sleep(0)
        finished = not task.cancel()
        await asyncio.wait({task})
        assert finished or task.cancelled()
        assert in_use(client) == 0
        passes += 1
    assert passes > 5
    tokens, completion = await consume(client)
    assert tokens == first(3)
    assert isinstance(completion, Completion)


async def test_closing_the_client_breaks_its_streams_off(engine: FakeEngine) -> None:
    engine.script(Reply(end_after=1, end=End.STALL))
    client = CompletionsClient(engine.base_url, model="tiny")
    items = client([1], {})
    await anext(items)
    await client.aclose()
    with pytest.raises(EngineStreamError):
        await anext(items)
    await client.aclose()
    with pytest.raises(UsageError, match="closed"):
        await client.models()
    await engine.disconnected()


# Other questions


async def test_recorded_answers(engine: FakeEngine, client: CompletionsClient) -> None:
    def answer(name: str) -> Reply:
        return Reply(body=(DATA / "http" / f"{name}.json").read_bytes(), content_type="application/json")

    engine.script(answer("models"), path="/v1/models")
    engine.script(answer("tokenize"), path="/tokenize")
    engine.script(answer("detokenize"), path="/detokenize")
    assert await client.models() == [ModelCard(id="tiny", root="models/tiny", max_model_len=4096)]
    assert await client.tokenize("text") == [283, 78, 332, 1670, 1275]
    assert await client.detokenize([283, 78]) == "):ing s"
    assert [request.json for request in engine.requests] == [
        None,
        {"prompt": "text", "add_special_tokens": True, "model": "tiny"},
        {"tokens": [283, 78], "model": "tiny"},
    ]


async def test_there_and_back(client: CompletionsClient) -> None:
    ids = await client.tokenize("zwölf ✓", add_special_tokens=False)
    assert await client.detokenize(ids) == "zwölf ✓"
    assert len(await client.tokenize("a")) == 2
    assert await client.health() is True


async def test_unwell(engine: FakeEngine, client: CompletionsClient) -> None:
    engine.script(Reply(status=503, body=b""), Reply(header_delay=60), path="/health")
    assert await client.health() is False
    assert await client.health(timeout=0.05) is False


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        (Reply(body=b"[]", content_type="application/json"), EngineResponseError, "/v1/models"),
        (Reply(body=b"<html>", content_type="text/html"), EngineResponseError, "/v1/models"),
        (Reply(status=404, body=b'{"detail": "Not Found"}'), EngineResponseError, "HTTP 404: Not Found"),
        (Reply(header_delay=60), EngineConnectionError, "no answer"),
        (Reply(body=b"xyz", content_type="text/plain", end_after_bytes=1, end=End.CUT), EngineError, "no answer"),
    ],
)
async def test_answer_that_is_none(
    engine: FakeEngine, client: CompletionsClient, reply: Reply, kind: type[EngineError], words: str
) -> None:
    engine.script(*[reply] * 3, path="/v1/models")
    with pytest.raises(kind, match=words):
        await client.models(timeout=0.3 if reply.header_delay else 30)


# What a server or a user should not be able to do


@pytest.mark.parametrize(
    "body", [b'{"data": ' + b"[" * 100_000, b'{"other": ' + b'{"a":' * 100_000, b'{"data": [{"id": 1}]}']
)
async def test_models_that_are_none(engine: FakeEngine, client: CompletionsClient, body: bytes) -> None:
    engine.script(Reply(body=body, content_type="application/json"), path="/v1/models")
    with pytest.raises(EngineResponseError, match="/v1/models should"):
        await client.models()


@pytest.mark.parametrize("ids", [[-1], [1 << 63], [1.5], ["1"], [True], [[1]], 5])
async def test_ids_that_are_none(engine: FakeEngine, client: CompletionsClient, ids: Any) -> None:
    engine.script(Reply(tokens=4, token_ids=lambda _: ids))
    tokens, error = await consume(client)
    assert not tokens
    assert isinstance(error, EngineStreamError)


async def test_what_a_server_says_commands_no_terminal(engine: FakeEngine, client: CompletionsClient) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J"
    for reply in (
        Reply(status=400, body=json.dumps({"error": {"message": evil}}).encode()),
        Reply(status=400, body=json.dumps({"detail": [{"loc": [evil], "msg": evil}]}).encode()),
        Reply(status=400, body=json.dumps({"error": evil}).encode()),
        Reply(status=400, body=evil.encode(), content_type="text/plain"),
        Reply(body=f"data: {evil}\n\n".encode()),
    ):
        engine.script(reply)
        _, error = await consume(client)
        assert isinstance(error, EngineError)
        assert "\x1b" not in str(error)


SECRET = "hunter2hunter2"


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{SECRET}@host",
        f"http://{SECRET}@host/v1",
        f"http://user:{SECRET}/x@host",
        f"http://host?key={SECRET}",
        f"http://host#{SECRET}",
        f"ftp://user:{SECRET}@host",
        f"http://[{SECRET}",
        f"{SECRET}\n",
        5,
    ],
)
def test_a_refused_address_is_not_repeated_with_its_secret(url: Any) -> None:
    with pytest.raises(UsageError, match="base_url") as caught:
        CompletionsClient(url)
    if not str(url).startswith(SECRET):
        assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("key", [f"{SECRET}\n", f"{SECRET}\r\nx: y", f"{SECRET}\0", "schlüssel", "", 5])
def test_a_key_that_no_header_can_carry(key: Any) -> None:
    with pytest.raises(UsageError, match="api_key") as caught:
        CompletionsClient("http://host", api_key=key)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("model", ["", "a\nb", "a\0", "\ud800", 5])
def test_a_name_that_no_model_has(model: Any) -> None:
    with pytest.raises(UsageError, match="model"):
        CompletionsClient("http://host", model=model)


async def test_a_key_goes_nowhere_else(engine: FakeEngine) -> None:
    async with FakeEngine() as elsewhere:
        for status in (301, 302, 303, 307, 308):
            target = elsewhere.base_url.replace("//", f"//user:{SECRET}@") + f"/v1/models?key={SECRET}"
            engine.script(Reply(status=status, body=b"", headers={"location": target}), path="/v1/models")
            async with CompletionsClient(engine.base_url, api_key=KEY) as client:
                with pytest.raises(EngineResponseError, match="not followed") as caught:
                    await client.models()
                assert SECRET not in str(caught.value)
        assert elsewhere.accepted == 0
