"""The body of a streamed `/v1/completions` request. No I/O."""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lmcache_stream.errors import UsageError

__all__ = ["check_request", "encode", "request_body"]

_ONE_SEQUENCE: dict[str, tuple[object, ...]] = {
    "stream": (True,),
    "return_token_ids": (True,),
    "echo": (None, False),
    "n": (None, 1),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "prompt_logprobs": (None,),
    "prompt": (None,),
    "prompt_embeds": (None,),
}
"""Parameters that decide whether the answer is one stream of ids, and the values with which it is."""

_OFTEN_GIVEN = frozenset(
    {
        *("frequency_penalty", "ignore_eos", "logprobs", "max_tokens", "min_p", "min_tokens", "presence_penalty"),
        *("repetition_penalty", "seed", "stop", "stop_token_ids", "temperature", "top_k", "top_p"),
    }
)

_MISSPELT = 0.83
"""Likeness from which a name is taken for a misspelt one, which vLLM would pass over; `max_new_tokens` is one."""

_encode = msgspec.json.Encoder().encode


def check_request(
    prompt_token_ids: Sequence[int], sampling_params: Mapping[str, Any], cache_salt: str, model: str | None
) -> None:
    """Refuses what cannot be streamed as one sequence.

    Raises:
        UsageError: The prompt is text or empty, or a sampling parameter contradicts what is asked for here.
    """
    if not isinstance(sampling_params, Mapping):
        raise UsageError('sampling_params takes a mapping, such as {"max_tokens": 16}')
    if isinstance(prompt_token_ids, str | bytes):
        raise UsageError("prompt_token_ids takes token ids, not text: tokenize it first")
    if len(prompt_token_ids) == 0:
        raise UsageError("prompt_token_ids is empty: give at least one token id")
    for name in sampling_params:
        if name not in _OFTEN_GIVEN and (meant := _meant_by(str(name))):
            raise UsageError(f"sampling_params has {name!r}, which engines pass over: is it {meant!r}?")
    for name, allowed in _ONE_SEQUENCE.items():
        if name in sampling_params and not any(sampling_params[name] is value for value in allowed):
            raise UsageError(
                f"sampling_params has {name}={sampling_params[name]!r}, which cannot be streamed as one sequence of "
                f"token ids: leave {name} out"
            )
    if (sampling_params.get("cache_salt") or cache_salt) != cache_salt:
        raise UsageError("sampling_params has a cache_salt of its own: give it as the argument cache_salt")
    if model is not None and (sampling_params.get("model") or model) != model:
        raise UsageError(f"sampling_params asks for another model than the client's {model!r}: leave model out")
    if not isinstance(sampling_params.get("stream_options") or {}, Mapping):
        raise UsageError("sampling_params has a stream_options that is no mapping")
    if not isinstance(cache_salt, str):
        raise UsageError(f"cache_salt must be a string, not {type(cache_salt).__name__}")
    try:
        _refuse_what_json_lacks(sampling_params, "sampling_params")
    except RecursionError:
        raise UsageError("sampling_params is nested too deeply, or holds itself: give plain JSON values") from None


@functools.lru_cache(maxsize=256)
def _meant_by(name: str) -> str | None:
    near = difflib.get_close_matches(name.lower().replace("-", "_"), _OFTEN_GIVEN, 1, _MISSPELT)
    return near[0] if near else None


def request_body(
    prompt_token_ids: Sequence[int], sampling_params: Mapping[str, Any], cache_salt: str, model: str
) -> bytes:
    """The request as JSON: the caller's parameters with the prompt, ids and usage asked for; nothing is changed."""
    body: dict[str, Any] = {
        **sampling_params,
        "model": model,
        "prompt": prompt_token_ids if isinstance(prompt_token_ids, list) else list(prompt_token_ids),
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True, **(sampling_params.get("stream_options") or {})},
    }
    body.pop("cache_salt", None)
    if cache_salt:
        body["cache_salt"] = cache_salt
    return encode(body)


def encode(value: Any) -> bytes:
    """`value` as JSON.

    Raises:
        UsageError: It holds something that JSON has no word for.
    """
    try:
        return _encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as exc:
        raise UsageError(f"the request cannot be written as JSON, give plain Python values: {exc}") from exc


def _refuse_what_json_lacks(value: Any, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where} is {value}, which JSON cannot hold: give a finite number")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_what_json_lacks(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _refuse_what_json_lacks(item, f"{where}[{index}]")
