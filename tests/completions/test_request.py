from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_stream.completions.request import check_request, request_body
from lmcache_stream.errors import UsageError

OF_VLLM_032 = """
add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo frequency_penalty ignore_eos
include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs max_tokens min_p
min_tokens mm_payload model n presence_penalty priority prompt prompt_embeds prompt_logprobs repetition_detection
repetition_penalty request_id response_format return_mm_kwargs return_token_ids return_token_offsets
return_tokens_as_token_ids routed_experts_prompt_start seed session_id skip_special_tokens
spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options structured_outputs suffix
temperature thinking_token_budget top_k top_p truncate_prompt_tokens truncation_side use_beam_search user
vllm_xargs watermarking
"""
"""The fields of a completion request there."""

RESERVED = {"model", "prompt", "stream", "return_token_ids", "stream_options", "cache_salt"}
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=10,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text().filter(lambda key: key not in RESERVED), json_values, max_size=5))
def test_any_json_values_arrive_and_nothing_is_changed(params: dict[str, Any]) -> None:
    before = json.dumps(params)
    body = json.loads(request_body([1, 2], params, "salt", "m"))
    assert json.dumps(params) == before
    assert body == {
        **json.loads(before),
        "model": "m",
        "prompt": [1, 2],
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
        "cache_salt": "salt",
    }


def test_empty_salt_is_left_out() -> None:
    assert "cache_salt" not in json.loads(request_body([1], {}, "", "m"))
    assert "cache_salt" not in json.loads(request_body([1], {"cache_salt": ""}, "", "m"))


@pytest.mark.parametrize(
    ("given_options", "sent"),
    [
        (None, {"include_usage": True}),
        ({"continuous_usage_stats": True}, {"include_usage": True, "continuous_usage_stats": True}),
        ({"include_usage": False}, {"include_usage": False}),
    ],
)
def test_stream_options_are_merged(given_options: Any, sent: Any) -> None:
    params = {"stream_options": given_options}
    assert json.loads(request_body([1], params, "", "m"))["stream_options"] == sent
    assert params == {"stream_options": given_options}


@pytest.mark.parametrize(
    "params",
    [
        {"stream": False},
        {"return_token_ids": False},
        {"echo": True},
        {"n": 2},
        {"best_of": 4},
        {"use_beam_search": True},
        {"prompt_logprobs": 0},
        {"prompt": "text"},
        {"prompt_embeds": "AAAA"},
        {"cache_salt": "other"},
        {"model": "other"},
        {"stream_options": 3},
        {"temperature": float("nan")},
        {"logit_bias": {"2": float("inf")}},
        {"stop": ["a", float("inf")]},
    ],
)
def test_what_cannot_be_one_stream_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(params))):
        check_request([1], params, "salt", "m")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("max_token", "max_tokens"), ("max_new_tokens", "max_tokens"), ("temprature", "temperature"), ("Top-P", "top_p")],
)
def test_a_misspelt_name_is_refused(name: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"has '{name}', which engines pass over: is it '{meant}'"):
        check_request([1], {name: 1}, "", None)


@pytest.mark.parametrize("name", [*OF_VLLM_032.split(), "best_of", "top_a", "mirostat_tau", "typical_p", "my_plugin"])
def test_a_name_of_its_own_is_none(name: str) -> None:
    check_request([1], {name: True if name in ("stream", "return_token_ids") else None}, "", None)


@pytest.mark.parametrize(
    "params",
    [
        {"stream": True, "return_token_ids": True, "echo": False, "n": 1, "best_of": 1, "prompt_logprobs": None},
        {"cache_salt": "salt"},
        {"model": "m"},
        {"model": None, "n": None, "stream_options": None},
        {"logit_bias": {2: 100}, "stop_token_ids": (1, 2)},
    ],
)
def test_what_says_the_same_is_allowed(params: dict[str, Any]) -> None:
    check_request([1], params, "salt", "m")
    body = json.loads(request_body([1], params, "salt", "m"))
    assert (body["model"], body["cache_salt"], body["stream"]) == ("m", "salt", True)


@pytest.mark.parametrize("prompt", ["text", b"text", []])
def test_prompt_must_be_ids(prompt: Any) -> None:
    with pytest.raises(UsageError, match="prompt_token_ids"):
        check_request(prompt, {}, "", None)


def test_sampling_params_must_be_a_mapping() -> None:
    with pytest.raises(UsageError, match="sampling_params"):
        check_request([1], [("n", 1)], "", None)  # type: ignore[arg-type]


def test_what_json_has_no_word_for() -> None:
    with pytest.raises(UsageError, match="JSON"):
        request_body([1], {"seed": object()}, "", "m")


def test_any_sequence_of_ids() -> None:
    assert json.loads(request_body((1, 2), {}, "", "m"))["prompt"] == [1, 2]
    assert json.loads(request_body(range(3), {}, "", "m"))["prompt"] == [0, 1, 2]


def test_params_that_hold_themselves() -> None:
    params: dict[str, Any] = {}
    params["logit_bias"] = params
    with pytest.raises(UsageError, match="sampling_params"):
        check_request([1], params, "", None)


@pytest.mark.parametrize("salt", [5, b"salt", ["salt"]])
def test_a_salt_is_text(salt: Any) -> None:
    with pytest.raises(UsageError, match="cache_salt"):
        check_request([1], {}, salt, None)
