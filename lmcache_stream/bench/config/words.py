"""How options are written, and the values that their words stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict

from lmcache_stream.completions.request import check_request
from lmcache_stream.errors import UsageError

__all__ = ["EditorSpec"]

CONSTANTS: Final[Mapping[str, Any]] = {"true": True, "false": False, "null": None, "none": None}
BEFORE_PARAMETER: Final = re.compile(r",(?=[\w\s-]*=)")
"""The comma before a parameter, not one within a JSON value."""

OBJECTIVES: Final = ("ttft", "tpot", "e2el")


class EditorSpec(BaseModel):
    """An editor as it is asked for: `NAME[:k=v,...]`.

    Args:
        name: The editor's name.
        params: Its parameters.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    name: str
    params: dict[str, Any] = {}

    @classmethod
    def parse(cls, text: str) -> EditorSpec:
        """Read `NAME[:k=v,...]`; values are JSON (`0.5`, `4`, `[1, 2]`), true, false or none in any case, or words.

        Raises:
            UsageError: It is not of that form.
        """
        name, _, rest = text.partition(":")
        params = {}
        for pair in BEFORE_PARAMETER.split(rest) if rest else ():
            key, separator, value = pair.partition("=")
            if not separator or not key.strip():
                raise UsageError(f"{text!r} is not of the form NAME:KEY=VALUE,KEY=VALUE")
            params[key.strip().replace("-", "_")] = parameter(value.strip())
        if not name.strip():
            raise UsageError(f"{text!r} names no editor")
        return cls(name=name.strip(), params=params)

    def with_keep(self, keep: float | int | None) -> EditorSpec:
        """The same with `keep`, unless it has one of its own."""
        if keep is None or "keep" in self.params:
            return self
        return EditorSpec(name=self.name, params={"keep": keep, **self.params})

    def __str__(self) -> str:
        params = ",".join(f"{key}={json.dumps(value).strip(chr(34))}" for key, value in self.params.items())
        return f"{self.name}:{params}" if params else self.name


def parameter(text: str) -> Any:
    return CONSTANTS[text.lower()] if text.lower() in CONSTANTS else json_or_word(text)


def json_or_word(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def editors(given: Any) -> Any:
    given = given.split() if isinstance(given, str) else given
    return [EditorSpec.parse(one) if isinstance(one, str) else one for one in given]


def rate(given: Any) -> Any:
    rate = float(given)
    if not rate > 0:
        raise ValueError(f"a rate is above 0, or inf, not {given}")
    return rate


def keep(given: Any) -> Any:
    keep = json_or_word(given) if isinstance(given, str) else given
    if isinstance(keep, bool) or not isinstance(keep, int | float) or keep <= 0 or (type(keep) is float and keep > 1):
        raise ValueError(f"{given!r} is neither a ratio such as 0.5, up to 1.0, nor a count of tokens")
    return keep


def pairs(given: Any, separator: str) -> Any:
    given = given.split() if isinstance(given, str) else given
    if isinstance(given, Mapping):
        return given
    pairs = {}
    for pair in given:
        key, found, value = str(pair).partition(separator)
        if not found or not key.strip():
            raise ValueError(f"{pair!r} is not of the form KEY{separator}VALUE")
        pairs[key.strip()] = value.strip()
    return pairs


def objectives(given: dict[str, float]) -> dict[str, float]:
    for name, value in given.items():
        if name not in OBJECTIVES:
            raise ValueError(f"{name!r} is no objective: choose from {', '.join(OBJECTIVES)}")
        if not value >= 0:
            raise ValueError(f"{name}:{value} is no time in milliseconds")
    return given


def names(given: Any) -> Any:
    return [name.strip() for name in given.split(",") if name.strip()] if isinstance(given, str) else given


def percentiles(given: Any) -> Any:
    return names(given) if isinstance(given, str) else ([given] if isinstance(given, int | float) else given)


def ratios(given: Any) -> Any:
    given = json_or_word(given) if isinstance(given, str) else given
    pair = given if isinstance(given, Mapping) else {"input": given, "output": given}
    ratios = {name: pair.get(name, 0.0) for name in ("input", "output")}
    if set(pair) - set(ratios) or not all(type(ratio) in (int, float) and 0 <= ratio < 1 for ratio in ratios.values()):
        raise ValueError('a ratio is at least 0.0 and less than 1.0: 0.3, or {"input": 0.3, "output": 0.5}')
    return ratios


def json_value(given: Any) -> Any:
    return json.loads(given) if isinstance(given, str) else given


def extra_body(given: dict[str, Any]) -> dict[str, Any]:
    if "max_tokens" in given:
        raise ValueError("max_tokens is not for here: prompts bring their lengths, see --random-output-len and others")
    try:
        check_request([0], given, "", None)
    except UsageError as error:
        raise ValueError(str(error).replace("sampling_params", "it")) from error
    return given


def resume(given: Any) -> Any:
    return {"": True, "true": True, "1": True, "false": None, "0": None, False: None}.get(given, given)
