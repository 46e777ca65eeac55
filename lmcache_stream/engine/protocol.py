"""Requests, answers and errors of the engine's HTTP API, in vLLM's shapes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lmcache_stream.engine.generation import Delta
from lmcache_stream.engine.sampling import SamplingParams

__all__ = ["CompletionAnswer", "CompletionRequest", "DetokenizeRequest", "RequestError", "TokenizeRequest"]

DONE = b"data: [DONE]\n\n"

UNSUPPORTED: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "logprobs": None,
    "prompt_logprobs": None,
    "suffix": "",
    "use_beam_search": False,
    "prompt_embeds": None,
    "truncate_prompt_tokens": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "logits_processors": [],
    "response_format": {"type": "text"},
    "structured_outputs": None,
    "guided_json": None,
    "guided_regex": None,
    "guided_choice": None,
    "guided_grammar": None,
}
"""Fields that would change the answer, and the value that leaves it as it is."""


class RequestError(Exception):
    """An answer that is an error.

    Args:
        message: What is wrong.
        status: HTTP status.
        type: The error's name, as vLLM calls it.
        param: The request parameter at fault.
    """

    def __init__(
        self, message: str, *, status: int = 400, type: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.status}}

    @classmethod
    def of(cls, error: Exception) -> RequestError:
        """What a client is told of an exception."""
        if isinstance(error, RequestError):
            return error
        return cls(f"{type(error).__name__}: {error}", status=500, type="InternalServerError")


class Request(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def null_is_default(cls, data: Any) -> Any:
        """Take null for the default, as vLLM does."""
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, Mapping) else data

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read a request from JSON.

        Raises:
            RequestError: It is no JSON object, or a field is wrong.
        """
        return cls.checked(json_object(body))

    @classmethod
    def checked(cls, data: Mapping[str, Any]) -> Self:
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise invalid(error) from error


class StreamOptions(BaseModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class CompletionRequest(SamplingParams, Request):
    """The body of `POST /v1/completions`: sampling parameters and those of the request itself.

    Args:
        model: The served model's name; None for the only one.
        prompt: A text or its token ids.
        stream: Whether tokens are sent as they come.
        stream_options: Whether and where a stream carries usage.
        stream_interval: Tokens an event of a stream, but for the first and the last.
        return_token_ids: Whether ids are part of the answer.
        add_special_tokens: Whether a text gets the tokenizer's special tokens.
        cache_salt: Separates this request's cached KV from others'.
        request_id: Part of the answer's id.
    """

    model: str | None = None
    prompt: str | list[int]
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    stream_interval: Annotated[int, Field(ge=1)] = 1
    return_token_ids: bool = False
    add_special_tokens: bool = True
    cache_salt: str = ""
    request_id: str = Field(default_factory=lambda: uuid.uuid4().hex[:16])

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read a request from JSON.

        Raises:
            RequestError: It is no JSON object, a field is wrong, or asks for what this engine does not do.
        """
        data = json_object(body)
        if data.get("cache_salt") == "":
            raise RequestError("cache_salt must not be empty: leave it out, or give it a value", param="cache_salt")
        for field, neutral in UNSUPPORTED.items():
            if data.get(field) not in (None, neutral):
                raise RequestError(f"this engine does not support {field}={data[field]!r}", param=field)
        if data.get("stream_options") and not data.get("stream"):
            raise RequestError("stream_options needs stream=true", param="stream_options")
        return cls.checked({**data, "prompt": single_prompt(data.get("prompt"))})


class TokenizeRequest(Request):
    """The body of `POST /tokenize`: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def check_one_given(self) -> TokenizeRequest:
        """Refuse both a prompt and messages, and neither."""
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Request):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


class CompletionAnswer:
    """Builds what is sent back for one request, as JSON."""

    def __init__(self, request: CompletionRequest, model: str, prompt: list[int]) -> None:
        self._request = request
        self._prompt = prompt
        self._completed = 0
        self._first = True
        self._head = {
            "id": f"cmpl-{request.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, delta: Delta) -> bytes:
        """The answer to a request that does not stream."""
        self._completed = len(delta.token_ids)
        with_ids = self._request.return_token_ids
        choice = {
            "index": 0,
            "text": delta.text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "token_ids": delta.token_ids if with_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": self._prompt if with_ids else None,
        }
        return msgspec.json.encode({**self._head, "choices": [choice], "usage": self._usage(delta)})

    def event(self, delta: Delta) -> bytes:
        """One server-sent event of a stream."""
        self._completed += len(delta.token_ids)
        with_ids = self._request.return_token_ids
        choice = {
            "index": 0,
            "text": delta.text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "prompt_token_ids": self._prompt if with_ids and self._first else None,
            "token_ids": delta.token_ids if with_ids else None,
        }
        self._first = False
        body = {**self._head, "choices": [choice]}
        if self._request.stream_options.continuous_usage_stats:
            body["usage"] = self._usage(delta)
        return sse(body)

    def end(self, last: Delta) -> bytes:
        """What ends a stream."""
        if self._request.stream_options.include_usage:
            return sse({**self._head, "choices": [], "usage": self._usage(last)}) + DONE
        return DONE

    def failure(self, error: RequestError) -> bytes:
        """What ends a stream that has failed."""
        return sse(error.body()) + DONE

    def _usage(self, delta: Delta) -> dict[str, Any]:
        prompt = len(self._prompt)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + self._completed,
            "completion_tokens": self._completed,
            "prompt_tokens_details": {"cached_tokens": delta.cached_tokens},
        }


def sse(body: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def json_object(body: bytes) -> dict[str, Any]:
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is no JSON: {error}", type="Bad Request", param="body") from error
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object", type="Bad Request", param="body")
    return data


def single_prompt(prompt: object) -> str | list[int]:
    """The one prompt of a request, which may be wrapped in a list."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and any(isinstance(item, str | list) for item in prompt):
        raise RequestError("this engine takes one prompt a request", param="prompt")
    if not prompt:
        raise RequestError("prompt must be a text or a list of token ids, not empty", param="prompt")
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise RequestError("prompt must be a text or a list of token ids", type="Bad Request", param="body.prompt")
    for at, token in enumerate(prompt):
        if type(token) is not int or token < 0:
            message = f"a token id is an integer of at least 0, not {token!r}"
            raise RequestError(message, type="Bad Request", param=f"body.prompt.{at}")
    return prompt


def invalid(error: ValidationError) -> RequestError:
    faults = error.errors(include_url=False, include_context=False)
    text = "; ".join(f"{'.'.join(map(str, fault['loc'])) or 'body'}: {fault['msg']}" for fault in faults)
    param = ".".join(["body", *map(str, faults[0]["loc"])])
    return RequestError(text, type="Bad Request", param=param)
