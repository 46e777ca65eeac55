from __future__ import annotations

import threading
from typing import cast

import pytest

from lmcache_stream.engine.generation import Delta, Generation
from lmcache_stream.engine.scheduler import Scheduler


class Script:
    """A generation of so many prompt pieces and tokens, which writes down its turns."""

    def __init__(self, name: str, turns: list[str], *, pieces: int = 1, tokens: int = 1, fails: bool = False) -> None:
        self.name = name
        self.turns = turns
        self.pieces = pieces
        self.tokens = tokens
        self.fails = fails
        self.cached_tokens = 0
        self.finished = False
        self.aborted = False
        self.ended = threading.Event()
        self.items: list[Delta | Exception] = []

    @property
    def prefilling(self) -> bool:
        return self.pieces > 0

    def step(self) -> Delta | None:
        if self.fails:
            raise RuntimeError(self.name)
        if self.pieces:
            self.turns.append(f"{self.name}:piece")
            self.pieces -= 1
            if self.pieces:
                return None
        else:
            self.turns.append(f"{self.name}:token")
        self.tokens -= 1
        if self.tokens == 0:
            self.end()
        return Delta(token_ids=(1,), finish_reason="length" if self.finished else None)

    def emit(self, item: Delta | Exception) -> None:
        self.items.append(item)
        if self.finished:
            self.ended.set()

    def end(self) -> None:
        self.finished = True

    def abort(self) -> None:
        self.aborted = True


def submit(scheduler: Scheduler, *scripts: Script) -> list[bool]:
    return [scheduler.submit(cast(Generation, script)) for script in scripts]


def run(scheduler: Scheduler, *scripts: Script) -> None:
    """Submit all before the first round, and run until each has ended."""
    assert all(submit(scheduler, *scripts))
    scheduler.start()
    for script in scripts:
        assert script.ended.wait(10)
    scheduler.stop()
    scheduler.join()


def test_a_long_prompt_holds_up_the_others_by_one_piece_a_round() -> None:
    turns: list[str] = []
    run(Scheduler(), Script("short", turns, tokens=4), Script("long", turns, pieces=4))
    assert turns == [
        "short:piece",
        *["short:token", "long:piece"] * 3,
        "long:piece",
    ]


def test_prompts_take_turns() -> None:
    turns: list[str] = []
    run(Scheduler(), Script("a", turns, pieces=3), Script("b", turns, pieces=2), Script("c", turns))
    assert turns == ["a:piece", "b:piece", "c:piece", "a:piece", "b:piece", "a:piece"]


def test_no_more_run_at_once_than_allowed() -> None:
    turns: list[str] = []
    run(Scheduler(max_running=1), Script("a", turns, tokens=3), Script("b", turns, tokens=2))
    assert turns == ["a:piece", "a:token", "a:token", "b:piece", "b:token"]


def test_too_many_are_turned_away() -> None:
    scheduler = Scheduler(max_unfinished=2)
    assert submit(scheduler, *(Script(name, []) for name in "abc")) == [True, True, False]


def test_a_failure_ends_one() -> None:
    turns: list[str] = []
    bad, good = Script("bad", turns, fails=True), Script("good", turns, tokens=2)
    run(Scheduler(), bad, good)
    assert [str(item) for item in bad.items] == ["bad"]
    assert len(good.items) == 2


@pytest.mark.parametrize("pieces", [1, 50])
def test_an_aborted_one_is_dropped_before_its_next_step(pieces: int) -> None:
    turns: list[str] = []
    scheduler = Scheduler()
    gone, waiting, other = (
        Script("gone", turns, pieces=pieces, tokens=1000),
        Script("waiting", turns, tokens=1000),
        Script("other", turns, tokens=100),
    )
    waiting.abort()

    def abort_early(item: Delta | Exception) -> None:
        Script.emit(other, item)
        gone.abort()

    other.emit = abort_early  # type: ignore[method-assign]
    assert all(submit(scheduler, gone, waiting, other))
    scheduler.start()
    assert other.ended.wait(10)
    scheduler.stop()
    scheduler.join()
    assert gone.finished
    assert len([turn for turn in turns if turn.startswith("gone")]) <= 3
    assert "waiting:piece" not in turns
    assert scheduler.unfinished == 0


def test_stopping_ends_all_as_aborted() -> None:
    turns: list[str] = []
    scheduler = Scheduler(max_running=2)
    scripts = [Script(name, turns, tokens=10**9) for name in "abc"]
    assert all(submit(scheduler, *scripts))
    scheduler.start()
    scheduler.stop()
    scheduler.join()
    assert [script.items[-1] for script in scripts] == [Delta(finish_reason="abort")] * 3
    assert scheduler.unfinished == 0
    assert submit(scheduler, Script("late", turns)) == [False]


def test_one_that_never_started_can_be_joined() -> None:
    scheduler = Scheduler()
    scheduler.stop()
    scheduler.join()
