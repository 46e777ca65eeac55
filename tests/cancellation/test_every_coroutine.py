"""Every public coroutine, cancelled at every point at which it, or a task of its own, waits."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest

from tests.cancelling import WatchedRun, tasks_watched
from tests.test_public import ROOMS

from .cases import CASES, Case
from .places import Place, place_at
from .traces import Traces, pending_futures

SPECIAL = {"__call__", "__aenter__", "__aexit__"}
ELSEWHERE = {f"EmbeddedEngine.{name}" for name in ("start", "aclose", "__aenter__", "__aexit__")}
"""In `test_embedded_engine.py`."""

LIMIT = 400

INSISTENT = ("shared memory+async", "memory+http")
"""Where calls are also cancelled again and again."""


def is_asynchronous(thing: Any) -> bool:
    """Whether calling it gives something to await, to enter or to iterate over asynchronously."""
    function = inspect.unwrap(getattr(thing, "__func__", thing))
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return True
    if not inspect.isfunction(function):
        return False
    returns = str(inspect.get_annotations(function).get("return", ""))
    if returns.startswith(("AsyncGenerator", "AsyncIterator", "AsyncIterable", "Awaitable", "Coroutine")):
        return True
    result = getattr(sys.modules[function.__module__], returns, None)
    return inspect.isclass(result) and (hasattr(result, "__await__") or hasattr(result, "__aenter__"))


def public_coroutines() -> set[str]:
    """Names of everything public that can be awaited."""
    found = set()
    for room in ROOMS:
        for name in room.__all__:
            thing = getattr(room, name)
            if not inspect.isclass(thing):
                found |= {name} if is_asynchronous(thing) else set()
                continue
            if getattr(thing, "_is_protocol", False):
                continue
            for member in dir(thing):
                if (not member.startswith("_") or member in SPECIAL) and is_asynchronous(
                    inspect.getattr_static(thing, member)
                ):
                    found.add(f"{name}.{member}")
    return found


def test_every_public_coroutine_has_its_case() -> None:
    assert public_coroutines() == CASES.keys() | ELSEWHERE


@pytest.fixture(scope="module", autouse=True)
def what_was_there_before_is_not_looked_through() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def rows() -> Iterator[Any]:
    for name, cases in CASES.items():
        for number, (case, places) in enumerate(cases):
            for where in places:
                known_as = f"{name}-{number}-{where.replace(' ', '_')}"
                yield pytest.param(case, where, False, id=f"{known_as}-once")
                if where in INSISTENT and "Batched" not in name:
                    yield pytest.param(case, where, True, id=f"{known_as}-again_and_again")


async def run(case: Case, place: Place, at: int | None, *, insist: bool = False) -> tuple[WatchedRun, bool, Any]:
    """One run of a case, cancelled at one point; what it came to in the end."""
    steps = case(place)
    async with aclosing(steps):
        watched = WatchedRun(at, insist=insist)
        cancelled = await watched(await anext(steps))
        return watched, cancelled, await steps.asend(cancelled)


@pytest.mark.parametrize(("case", "where", "insist"), list(rows()))
async def test_cancelled_at_every_point(case: Case, where: str, insist: bool) -> None:
    backend, _, kind = where.partition("+")
    async with place_at(backend, kind) as place:
        with tasks_watched():
            await run(case, place, None)  # what is made at first use is made
            _, cancelled, undisturbed = await run(case, place, None)
            assert not cancelled
            place.warm()
            pending = len(pending_futures())
            standing, users = Traces.now(), place.cache.users
            for at in range(LIMIT):
                watched, cancelled, result = await run(case, place, at, insist=insist)
                assert result == undisturbed, f"cancelled at {at}"
                await standing.gone(watched.tasks, held=lambda: place.held)
                place.cache.check()
                assert place.cache.users == users
                if not cancelled:
                    assert watched.points < at
                    break
            else:
                raise AssertionError(f"more than {LIMIT} points")
            assert len(pending_futures()) <= pending
