"""The HTTP API: vLLM's shapes, errors, stops, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lmcache_stream.engine import EmbeddedEngine
from lmcache_stream.kvcache import aconnect

from .client import complete, events_of, post, some_ids

DATA = Path(__file__).parents[1] / "data"
PROMPT = list(range(300, 380))


def recorded(name: str) -> dict[str, Any]:
    requests = json.loads((DATA / "sse" / "index.json").read_text())
    request: dict[str, Any] = next(entry["request"] for entry in requests if entry["name"] == name)
    if request["prompt"] == "ids 300..379":
        request["prompt"] = PROMPT
    return request


def shape(value: object) -> object:
    """The keys and kinds of a JSON value: one kind for all numbers, and lists by their first item."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items() if key != "system_fingerprint"}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


@pytest.mark.parametrize("name", ["plain", "usage", "continuous-usage", "no-ids", "salted", "eos", "max-default"])
async def test_a_stream_has_the_shape_of_vllms(engine: EmbeddedEngine, name: str) -> None:
    request = {**recorded(name), "model": "tiny"}
    status, content_type, raw = await post(engine.base_url, "/v1/completions", request)
    ours, theirs = events_of(raw), events_of((DATA / "sse" / f"{name}.sse").read_bytes())

    for event in ours:
        if "usage" in event:
            assert event["usage"].pop("prompt_tokens_details").keys() == {"cached_tokens"}
    assert (status, content_type) == (200, "text/event-stream; charset=utf-8")
    assert len(ours) == len(theirs)
    assert [shape(event) for event in ours] == [shape(event) for event in theirs]
    assert [event.get("usage") for event in ours] == [event.get("usage") for event in theirs]


async def test_an_interval_gathers_tokens_but_the_first(engine: EmbeddedEngine) -> None:
    _, _, raw = await post(engine.base_url, "/v1/completions", {**recorded("interval-4"), "model": "tiny"})
    counts = [len(event["choices"][0]["token_ids"]) for event in events_of(raw)]
    assert counts == [1, 4, 4, 2]


async def test_an_answer_in_one_piece(engine: EmbeddedEngine) -> None:
    request = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    streamed = await complete(engine.base_url, PROMPT, max_tokens=5)

    _, content_type, raw = await post(engine.base_url, "/v1/completions", {**request, "return_token_ids": True})
    whole = json.loads(raw)
    assert content_type.startswith("application/json")
    assert whole["object"] == "text_completion"
    (choice,) = whole["choices"]
    assert choice["token_ids"] == streamed.ids
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["text"] == streamed.text
    assert choice["finish_reason"] == "length"
    assert whole["usage"] == {
        "prompt_tokens": 80,
        "completion_tokens": 5,
        "total_tokens": 85,
        "prompt_tokens_details": {"cached_tokens": 64},
    }

    _, _, raw = await post(engine.base_url, "/v1/completions", request)
    assert json.loads(raw)["choices"][0]["token_ids"] is None


@pytest.mark.parametrize(
    ("name", "param"),
    [("too-long", "input_tokens"), ("bad-salt", "cache_salt"), ("unknown-model", "model"), ("n-2", "n")],
)
async def test_an_error_has_the_shape_of_vllms(engine: EmbeddedEngine, name: str, param: str) -> None:
    body = (DATA / "sse" / f"{name}.sse").read_bytes()
    request = {**recorded(name), "model": "nope" if name == "unknown-model" else "tiny"}

    status, content_type, raw = await post(engine.base_url, "/v1/completions", request)

    theirs, ours = json.loads(body)["error"], json.loads(raw)["error"]
    assert content_type.startswith("application/json")
    assert ours.keys() == theirs.keys()
    assert status == ours["code"] == theirs["code"]
    assert ours["type"] == theirs["type"]
    assert ours["param"] == param


async def test_a_negative_token_is_named(engine: EmbeddedEngine) -> None:
    status, _, raw = await post(engine.base_url, "/v1/completions", {**recorded("negative-token"), "model": "tiny"})
    theirs = json.loads((DATA / "sse" / "negative-token.sse").read_bytes())["error"]
    ours = json.loads(raw)["error"]
    assert (status, ours["type"], ours["param"]) == (400, theirs["type"], theirs["param"])
    assert "-1" in ours["message"]


async def test_a_token_out_of_the_vocabulary_fails_inside_the_stream(engine: EmbeddedEngine) -> None:
    request = {**recorded("bad-token"), "model": "tiny"}
    status, content_type, raw = await post(engine.base_url, "/v1/completions", request)
    (ours,), (theirs,) = events_of(raw), events_of((DATA / "sse" / "bad-token.sse").read_bytes())
    assert (status, content_type) == (200, "text/event-stream; charset=utf-8")
    assert shape(ours) == shape(theirs)
    assert "999999" in ours["error"]["message"]

    status, _, raw = await post(engine.base_url, "/v1/completions", {**request, "stream": False})
    assert (status, json.loads(raw)["error"]["code"]) == (400, 400)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["two", "texts"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, 2.5]}, "body.prompt.1"),
        ({"prompt": [1, True]}, "body.prompt.1"),
        ({"prompt": 7}, "body.prompt"),
        ({"max_tokens": 0}, "body.max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "body"),
        ({"temperature": -1}, "body.temperature"),
        ({"temperature": "hot"}, "body.temperature"),
        ({"top_p": 0}, "body.top_p"),
        ({"top_k": -2}, "body.top_k"),
        ({"stop": [""]}, "body.stop.0"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"stop_token_ids": [9999], "min_tokens": 1}, "stop_token_ids"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 0}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"cache_salt": "a/b"}, "cache_salt"),
        ({"cache_salt": "x" * 129}, "cache_salt"),
    ],
)
async def test_what_cannot_be_right_is_refused(engine: EmbeddedEngine, change: dict[str, Any], param: str) -> None:
    status, _, raw = await post(engine.base_url, "/v1/completions", {"prompt": [5, 6], "max_tokens": 1, **change})
    error = json.loads(raw)["error"]
    assert (status, error["code"], error["param"]) == (400, 400, param), error


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1},
        {"echo": False},
        {"logprobs": None},
        {"temperature": None},
        {"response_format": {"type": "text"}},
        {"user": "x"},
        {"never_heard_of": 1},
        {"cache_salt": None},
        {"prompt": [[5, 6]]},
    ],
)
async def test_what_changes_nothing_is_ignored(engine: EmbeddedEngine, neutral: dict[str, Any]) -> None:
    status, _, raw = await post(engine.base_url, "/v1/completions", {"prompt": [5, 6], "max_tokens": 1, **neutral})
    assert status == 200, raw


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b""])
async def test_a_body_that_is_no_object(engine: EmbeddedEngine, body: bytes) -> None:
    async with (
        aiohttp.ClientSession(engine.base_url) as session,
        session.post("/v1/completions", data=body) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "Bad Request"


async def test_an_unknown_route_answers_in_json(engine: EmbeddedEngine) -> None:
    status, _, raw = await post(engine.base_url, "/v1/nothing", {})
    assert (status, json.loads(raw)["error"]["code"]) == (404, 404)


async def test_the_context_can_be_filled_but_not_overfilled(engine: EmbeddedEngine) -> None:
    prompt = some_ids(4090, seed=-20)
    answer = await complete(engine.base_url, prompt, max_tokens=6)
    assert (len(answer.ids), answer.finish_reason) == (6, "length")
    default = await complete(engine.base_url, prompt, max_tokens=None)
    assert (len(default.ids), default.finish_reason) == (6, "length")
    status, _, _ = await post(engine.base_url, "/v1/completions", {"prompt": prompt, "max_tokens": 7})
    assert status == 400


async def test_models_version_and_health(engine: EmbeddedEngine, tiny_model_path: Path) -> None:
    async with aiohttp.ClientSession(engine.base_url) as session:
        models = await (await session.get("/v1/models")).json()
        assert shape(models) == shape(json.loads((DATA / "http" / "models.json").read_text()))
        assert (models["data"][0]["id"], models["data"][0]["root"]) == ("tiny", str(tiny_model_path))
        assert models["data"][0]["max_model_len"] == 4096
        version = await (await session.get("/version")).json()
        assert shape(version) == shape(json.loads((DATA / "http" / "version.json").read_text()))
        assert (await session.get("/health")).status == 200


async def test_tokenize_and_detokenize(engine: EmbeddedEngine) -> None:
    text = "hello wörld 🎈 " * 200
    _, _, raw = await post(engine.base_url, "/tokenize", {"model": "tiny", "prompt": text})
    tokenized = json.loads(raw)
    assert shape(tokenized) == shape(json.loads((DATA / "http" / "tokenize.json").read_text()))
    assert tokenized["tokens"] == engine.tokenizer.encode(text)
    assert tokenized["count"] == len(tokenized["tokens"])

    _, _, raw = await post(engine.base_url, "/detokenize", {"model": "tiny", "tokens": tokenized["tokens"]})
    assert json.loads(raw) == {"prompt": text}

    _, _, raw = await post(engine.base_url, "/tokenize", {"prompt": "a b", "return_token_strs": True})
    assert len(json.loads(raw)["token_strs"]) == json.loads(raw)["count"]
    for path, body in (("/tokenize", {}), ("/tokenize", {"prompt": "a", "model": "no"}), ("/detokenize", {})):
        status, _, _ = await post(engine.base_url, path, body)
        assert status in (400, 404)


async def test_a_chat_without_a_template_is_refused(engine: EmbeddedEngine) -> None:
    status, _, raw = await post(engine.base_url, "/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
    assert (status, json.loads(raw)["error"]["param"]) == (400, "messages")


async def test_a_text_prompt_is_tokenized(engine: EmbeddedEngine) -> None:
    text = "banana tree and more"
    ids = engine.tokenizer.encode(text)
    by_text = await complete(engine.base_url, text, max_tokens=4)
    assert by_text.ids == (await complete(engine.base_url, ids, max_tokens=4)).ids
    assert by_text.events[0]["choices"][0]["prompt_token_ids"] == ids


async def test_the_text_is_the_decoded_output(engine: EmbeddedEngine) -> None:
    """Random tokens hold unfinished characters, and bytes that never become one."""
    answer = await complete(engine.base_url, PROMPT, max_tokens=300, temperature=1.5, seed=5)
    texts = [event["choices"][0]["text"] for event in answer.events[:-1]]
    assert answer.text == engine.tokenizer.decode(answer.ids, skip_special_tokens=True)
    assert "" in texts
    assert "\N{REPLACEMENT CHARACTER}" in answer.text


async def test_a_stop_string_cuts_the_text_and_keeps_its_tokens(engine: EmbeddedEngine) -> None:
    free = await complete(engine.base_url, PROMPT, max_tokens=40)
    texts = [event["choices"][0]["text"] for event in free.events[:-1]]
    stop = texts[10][-1:] + texts[11][:2]  # begins inside one token, ends inside the next
    at = free.text.index(stop)

    cut = await complete(engine.base_url, PROMPT, max_tokens=40, stop=stop)
    assert cut.text == free.text[:at]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.ids == free.ids[: len(cut.ids)]
    assert engine.tokenizer.decode(cut.ids).startswith(free.text[: at + len(stop)])

    kept = await complete(engine.base_url, PROMPT, max_tokens=40, stop=[stop], include_stop_str_in_output=True)
    assert kept.text == free.text[: at + len(stop)]
    late = await complete(engine.base_url, PROMPT, max_tokens=40, stop=[stop], min_tokens=40)
    assert late.text == free.text


async def test_text_held_back_for_a_stop_string_comes_at_the_end(engine: EmbeddedEngine) -> None:
    free = await complete(engine.base_url, PROMPT, max_tokens=5)
    held = await complete(engine.base_url, PROMPT, max_tokens=5, stop=[free.text + "and more that does not come"])
    texts = [event["choices"][0]["text"] for event in held.events[:-1]]
    assert texts == ["", "", "", "", free.text]
    assert held.finish_reason == "length"


async def test_a_stop_token_ends_without_its_text(engine: EmbeddedEngine) -> None:
    free = await complete(engine.base_url, PROMPT, max_tokens=20)
    stop = free.ids[12]
    first = free.ids.index(stop)
    answer = await complete(engine.base_url, PROMPT, max_tokens=20, stop_token_ids=[stop])
    assert answer.ids == free.ids[: first + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.text == engine.tokenizer.decode(free.ids[:first])


async def test_the_end_of_text_token(engine: EmbeddedEngine) -> None:
    bias = {"2": 100}
    answer = await complete(engine.base_url, PROMPT, max_tokens=5, ignore_eos=False, logit_bias=bias)
    assert (answer.ids, answer.text, answer.finish_reason, answer.stop_reason) == ([2], "", "stop", None)
    ignored = await complete(engine.base_url, PROMPT, max_tokens=5, logit_bias=bias)
    assert (ignored.ids, ignored.text, ignored.finish_reason) == ([2] * 5, "", "length")
    late = await complete(engine.base_url, PROMPT, max_tokens=5, ignore_eos=False, logit_bias=bias, min_tokens=3)
    assert (len(late.ids), late.ids[-1], late.ids.count(2)) == (4, 2, 1)


async def test_a_seed_repeats_a_random_choice(engine: EmbeddedEngine) -> None:
    async def draw(seed: int | None) -> list[int]:
        return (await complete(engine.base_url, PROMPT, max_tokens=12, temperature=1.0, seed=seed)).ids

    first, again, other, fresh, fresh_again = await asyncio.gather(*(draw(seed) for seed in (7, 7, 8, None, None)))
    assert first == again
    assert len({tuple(ids) for ids in (first, other, fresh, fresh_again)}) == 4


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_is_dropped(engine: EmbeddedEngine, stream: bool) -> None:
    prompt = some_ids(40, seed=-30 - stream)
    request = {"prompt": prompt, "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    async with aiohttp.ClientSession(engine.base_url) as session:
        going = asyncio.create_task(session.post("/v1/completions", json=request))
        async with aconnect(url="memory://tests-engine") as ctx:
            await ctx.wait_for(prompt, timeout=30)  # it is past its prefill
        assert engine.unfinished_requests == 1
        if stream:
            response = await going
            await response.content.readany()
            response.close()
        else:
            going.cancel()
    async with asyncio.timeout(30):
        while engine.unfinished_requests:  # noqa: ASYNC110 # its thread tells nobody
            await asyncio.sleep(0.005)


async def test_a_failing_step_fails_one_request(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = engine._core.lm  # type: ignore[union-attr] # running
    forward = lm.forward

    def fail_for_a_token(tokens: list[int], *args: Any) -> Any:
        if 1234 in tokens:
            raise RuntimeError("out of memory, say")
        return forward(tokens, *args)

    monkeypatch.setattr(lm, "forward", fail_for_a_token)
    good, (status, _, raw), (whole_status, _, whole) = await asyncio.gather(
        complete(engine.base_url, PROMPT, max_tokens=30),
        post(engine.base_url, "/v1/completions", {"prompt": [5, 1234], "stream": True}),
        post(engine.base_url, "/v1/completions", {"prompt": [5, 1234]}),
    )
    assert len(good.ids) == 30
    assert status == 200
    assert events_of(raw)[-1]["error"]["code"] == 500
    assert (whole_status, json.loads(whole)["error"]["type"]) == (500, "InternalServerError")
    assert engine.unfinished_requests == 0


async def test_too_many_requests_are_turned_away(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._scheduler, "_max_unfinished", 0)
    status, _, raw = await post(engine.base_url, "/v1/completions", {"prompt": [5]})
    assert (status, json.loads(raw)["error"]["code"]) == (503, 503)
