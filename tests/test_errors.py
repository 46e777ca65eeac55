from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from lmcache_stream import errors
from lmcache_stream.errors import LMCacheError

OPTIONS: dict[str, dict[str, Any]] = {
    "LMCacheStreamError": {"arrived": 3, "suffix_consumed": True},
    "CoverageTimeout": {"seen": 1, "wanted": 2},
    "EditNotUsed": {"stored": 4, "used": 3, "arrived": 2, "suffix_consumed": True},
    "LMCacheBatchedStreamError": {"failures": {"a": errors.EngineResponseError("no", status=404)}},
    "EngineResponseError": {"status": 503, "type": "t", "param": "p", "code": 7},
}


def attributes(value: object) -> object:
    if isinstance(value, LMCacheError):
        return type(value), str(value), value.args, attributes(vars(value))
    return {name: attributes(of) for name, of in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_can_be_copied_and_pickled(name: str, again: Callable[[LMCacheError], LMCacheError]) -> None:
    error = getattr(errors, name)("what went wrong", **OPTIONS.get(name, {}))
    error.add_note("a note")
    other = again(error)
    assert other is not error
    assert "what went wrong" in str(other)
    assert attributes(other) == attributes(error)


def test_an_error_of_a_user_can_be_copied_too() -> None:
    class OwnError(errors.CacheError):
        def __init__(self, *, place: str) -> None:
            super().__init__(f"no room at {place}")
            self.place = place

    other = copy.copy(OwnError(place="here"))
    assert (str(other), other.place) == ("no room at here", "here")
