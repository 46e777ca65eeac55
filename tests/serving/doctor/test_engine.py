from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lmcache_stream import bodies
from lmcache_stream.serving.doctor import DoctorOptions, limits
from lmcache_stream.testing import End, FakeEngine, Reply
from lmcache_stream.testing.fake_cache_server import FakeCacheServer
from tests.serving.doctor.examination import examined, only_failure, the, with_engine_fault
from tests.serving.doctor.stack import CHUNK, geometry_of, stack
from tests.serving.endless import endless


async def test_is_not_there(model: str) -> None:
    async with stack(model) as (options, _):
        found = await examined(replace(options, base_url="http://127.0.0.1:1"))
    only_failure(found, "engine", "127.0.0.1:1", "start vLLM", "--base-url")
    assert found["geometry"].status == "pass"  # the only model that is registered
    assert found["offload"].detail == "needs: token ids, cache salt"


async def test_is_not_there_and_two_models_are_registered(model: str) -> None:
    async with stack(model) as (options, server):
        server.serve("another", geometry_of(model))
        found = await examined(replace(options, base_url="http://127.0.0.1:1"))
    only_failure(found, "engine")
    assert found["registration"].detail == "needs: model"


async def test_is_not_ready(model: str) -> None:
    found = await with_engine_fault(model, "/health", Reply(status=503, body=b"loading"))
    only_failure(found, "engine", "503", "loading", "wait until")


async def test_says_nothing(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "QUICK", 0.3)
    found = await with_engine_fault(model, "/health", Reply(header_delay=60))
    only_failure(found, "engine", "start vLLM")


async def test_is_something_else(model: str) -> None:
    page = Reply(body=b"<html>Welcome!</html>", content_type="text/html")
    found = await with_engine_fault(model, "/v1/models", page)
    only_failure(found, "model", "Welcome!", "--base-url")


async def test_wants_a_key(model: str) -> None:
    refusal = Reply(status=401, body=b'{"error": "Unauthorized"}', content_type="application/json")
    found = await with_engine_fault(model, "/v1/models", refusal)
    only_failure(found, "model", "401", "--api-key")


async def test_serves_another_model(model: str) -> None:
    async with stack(model) as (options, _):
        found = await examined(replace(options, model="mistaken"))
    only_failure(found, "model", "'mistaken'", "'served'", "--model")


async def test_serves_several_models(model: str) -> None:
    cards = json.dumps({"data": [{"id": "one", "root": model}, {"id": "two"}]}).encode()
    found = await with_engine_fault(model, "/v1/models", Reply(body=cards, content_type="application/json"))
    only_failure(found, "model", "'one', 'two'", "--model")


async def test_sends_no_ids(model: str) -> None:
    found = await with_engine_fault(model, "/v1/completions", Reply(ids=False))
    only_failure(found, "token ids", "0.10.2", "proxy")


async def test_counts_otherwise(model: str) -> None:
    found = await with_engine_fault(model, "/v1/completions", Reply(tokens=2))
    only_failure(found, "token ids", "2 ids", "max_tokens")


async def test_fails(model: str) -> None:
    error = json.dumps({"error": {"message": "EngineCore is dead", "code": 500}}).encode()
    found = await with_engine_fault(
        model, "/v1/completions", Reply(status=500, body=error, content_type="application/json")
    )
    only_failure(found, "token ids", "EngineCore is dead", "log")


async def test_hangs(model: str) -> None:
    with FakeCacheServer(chunk_size=CHUNK) as server:
        server.serve(model, geometry_of(model))
        async with FakeEngine(root=model) as engine:
            engine.script(Reply(end_after=0, end=End.STALL))
            found = await examined(
                DoctorOptions(base_url=engine.base_url, kv_url=server.url, kv_http_url=server.http_url, timeout=0.5)
            )
    only_failure(found, "token ids", "0.5 s", "--timeout")


async def test_refuses_salts(model: str) -> None:
    error = json.dumps({"error": {"message": "cache_salt is unknown", "code": 400}}).encode()
    refusal = Reply(status=400, body=error, content_type="application/json")
    found = await with_engine_fault(model, "/v1/completions", Reply(cached_tokens=0), refusal)
    only_failure(found, "cache salt", "cache_salt is unknown", "honour cache_salt")


async def test_reports_no_usage(model: str) -> None:
    found = await with_engine_fault(model, "/v1/completions", Reply(usage=False))
    assert {"token ids", "cached tokens"} <= set(the(found, "warn"))


async def test_does_not_tell_cached_tokens(model: str) -> None:
    async with stack(model, tells_cached=False) as (options, _):
        found = await examined(options)
    assert the(found, "warn") == ["cached tokens", "round trip"]
    for name in the(found, "warn"):
        assert "--enable-prompt-tokens-details" in found[name].remedy


async def test_answers_without_end(model: str) -> None:
    async with stack(model) as (options, _), endless() as url:
        found = await examined(replace(options, base_url=url))
    only_failure(found, "engine", f"{url}/health answers more than {bodies.MOST_BYTES} bytes", "--base-url")
