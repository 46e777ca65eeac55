"""The soak: it counts, it finds what is wrong, and a short one on the fake servers is clean."""

from __future__ import annotations

import asyncio
import importlib
import mmap
import random
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lmcache_stream.errors import EditNotUsed, LMCacheStreamError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The soak's modules."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    names = {"soak": "soak", "fakes": "soaking.fakes", "tally": "soaking.tally", "holdings": "soaking.holdings"}
    return types.SimpleNamespace(**{name: importlib.import_module(module) for name, module in names.items()})


def world(parts: Any, tally: Any, **options: Any) -> Any:
    return parts.fakes.FakeWorld(tally, 3, **{"streams": 4, "storm_s": 1.0, "calm_s": 0.5, **options})


@pytest.mark.parametrize("shared_memory", [True, False])
async def test_a_short_soak_is_clean(parts: Any, shared_memory: bool) -> None:
    tally = parts.tally.Tally()
    soak = parts.soak.Soak(world(parts, tally, shared_memory=shared_memory), tally, 1.5, 3)
    await soak.run()
    found = soak.found()
    assert (found["wrong"], found["unexpected_samples"], found["left"]) == ([], {}, [])
    assert found["ok"]
    assert found["rounds"] >= 1
    assert found["tokens_checked"] > 0
    assert sum(found["faults"].values()) > 0
    parts.soak.show(found)


async def test_it_notices_wrong_tokens(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = parts.fakes.KnownModel.tokens
    off_by_one = {"engine": False}

    def reply_tokens(self: Any, kv: Any, count: int) -> list[int]:
        found: list[int] = tokens(self, kv, count)
        caller = sys._getframe(1).f_code.co_name
        return [found[0] + 1, *found[1:]] if off_by_one["engine"] and caller == "_reply_to" else found

    monkeypatch.setattr(parts.fakes.KnownModel, "tokens", reply_tokens)
    tally = parts.tally.Tally()
    async with world(parts, tally) as calm:
        job = calm.job(random.Random(1))
        step = parts.fakes.Step("prefill", 1)
        for wrong in (False, True):
            off_by_one["engine"] = wrong
            job.before(step)
            await job.stream.generate({"max_tokens": 1})
            job.requested(step, None, tally)
            assert tally.wrong_tokens == wrong
    assert "of an edit of 0 with chunks ['right'" in tally.wrong[0]


async def test_it_notices_what_is_left_at_the_server_and_in_the_process(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts.soak, "LET_GO_S", 0.2)
    tally = parts.tally.Tally()
    calm = world(parts, tally)
    soak = parts.soak.Soak(calm, tally, 1, 3)

    async def held() -> dict[str, int]:
        return {"read locks": 2}

    monkeypatch.setattr(calm, "held", held)
    before = parts.holdings.holdings(calm.owns)
    await soak._nothing_held()
    task = asyncio.ensure_future(asyncio.Event().wait())
    with (BENCHMARKS / "soak.py").open():
        await soak._nothing_more_than(before, "now")
    task.cancel()
    assert "{'read locks': 2}" in tally.left[0]
    assert "'tasks': {'Event.wait': 1}" in tally.left[1]
    assert "soak.py" in tally.left[1]
    assert tally.bad == 2


def test_memory_that_grows_is_seen_after_the_warm_up(parts: Any) -> None:
    memory = parts.holdings.Memory()
    warm_up = [(0.0, 0), (10.0, 200 << 20), (20.0, 300 << 20)]
    memory.samples = [*warm_up, *((30.0 + 10 * at, (300 << 20) + (at << 20)) for at in range(6))]
    assert memory.slope() * 60 == pytest.approx(6 << 20)
    assert memory.growth() == pytest.approx(5 << 20)
    at, size = memory.samples[-2]
    memory.samples[-2] = at, size + (200 << 20)  # given back by the next look
    assert memory.growth() == pytest.approx(5 << 20)
    memory.samples = warm_up
    assert memory.growth() == 0


def test_memory_is_what_the_process_has_alone(parts: Any) -> None:
    memory = parts.holdings.Memory()
    memory.look(0.0)
    with mmap.mmap(-1, 64 << 20, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as pool:
        pool.write(bytes(64 << 20))
        memory.look(1.0)
    own = bytearray(b"a") * (64 << 20)
    memory.look(2.0)
    del own
    sizes = [size for _, size in memory.samples]
    assert abs(sizes[1] - sizes[0]) < 16 << 20
    assert sizes[2] - sizes[1] > 48 << 20
    assert memory.shared[1] - memory.shared[0] == 64 << 20
    assert memory.to_dict()["shared"][2] == memory.to_dict()["shared"][0]


def test_errors_are_counted_with_their_causes(parts: Any) -> None:
    tally = parts.tally.Tally()
    error = LMCacheStreamError("no")
    error.__cause__ = ConnectionError("gone")
    tally.error(error, expected=True, during="decode")
    tally.error(EditNotUsed("lost", stored=1, used=0), expected=True, during="decode")
    assert tally.bad == 0
    tally.error(error, expected=False, during="decode")
    assert tally.expected == Counter(LMCacheStreamError=1, EditNotUsed=1)
    assert tally.samples == {"LMCacheStreamError": ["decode: LMCacheStreamError: no <- ConnectionError: gone"]}
    assert tally.bad == 1
