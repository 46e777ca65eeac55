"""The headline's arithmetic and its arms, on the embedded engine."""

from __future__ import annotations

import importlib
import os
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lmcache_stream import CompletionsClient, aconnect
from lmcache_stream.editors import StreamingLLM
from lmcache_stream.engine import EmbeddedEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="with space"} 0.5
vllm:num_preemptions_total{engine="0",model_name="m"} 1.2e+01
"""


@pytest.fixture
def headline(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("headline")


def arm(headline: Any, name: str, *, decode: float, edit: float = 0.0, **given: Any) -> Any:
    steps = dict.fromkeys(headline.STEPS, edit / 4)
    values = {"output_tokens": 100, "kv_tokens": 1000, "cached": 960, "taken": 960, "preemptions": 2, "recomputed": 0}
    return headline.Arm(
        name=name,
        edit=edit,
        steps=steps,
        decode=decode,
        **{**values, "running": 4.0, "used": 1.0, "ttft": 0.5, "others": 0.1, **given},
    )


def repeat(headline: Any, baseline: float, edited: float, edit: float, **given: Any) -> Any:
    arms = (arm(headline, "baseline", decode=baseline), arm(headline, "edited", decode=edited, edit=edit, **given))
    return headline.Repeat(prefill=3.0, arms=arms)


def test_gains_are_medians_of_ratios_within_a_repeat(headline: Any) -> None:
    repeats = [repeat(headline, 10, 5, 0), repeat(headline, 12, 4, 2), repeat(headline, 20, 16, 4)]
    found = headline.summary(repeats, {"prompts": 10}, 8)
    assert found["gains"] == pytest.approx([2, 3, 1.25])
    assert found["gains_with_edit"] == pytest.approx([2, 2, 1])
    assert (found["gain"], found["gain_with_edit"], found["edit_s"]) == pytest.approx((2, 2, 2))
    assert found["baseline"]["kv_bytes_per_request"] == 800
    assert found["no_headline"] is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"taken": 928}, "no headline: the engine took 1,888 of 1,920 tokens of the edited arm from the cache"),
        ({"output_tokens": 99}, "no headline: the arms did not decode equally many tokens"),
    ],
)
def test_what_is_no_headline(headline: Any, given: dict[str, int], why: str) -> None:
    repeats = [repeat(headline, 10, 5, 1), repeat(headline, 10, 5, 1, **given)]
    assert headline.verdict(repeats) == why
    assert headline.summary(repeats, {"prompts": 10}, 8)["no_headline"] == why


def test_a_baseline_that_is_recomputed_is_no_headline(headline: Any) -> None:
    slow = headline.Repeat(3.0, (arm(headline, "baseline", decode=9, taken=0), arm(headline, "edited", decode=5)))
    assert headline.verdict([slow]) == "no headline: the engine took 0 of 960 tokens of the baseline arm from the cache"


def test_gauges_are_summed_over_labels(headline: Any) -> None:
    assert headline.gauges(METRICS) == {
        "vllm:num_requests_running": 7,
        "vllm:kv_cache_usage_perc": 0.5,
        "vllm:num_preemptions_total": 12,
    }


def test_preempted_requests_come_back_from_the_cache_or_not(headline: Any) -> None:
    log = """\
WARNING <preempted> by preempted requests: {'cmpl-a-0', 'cmpl-b-0'}
INFO <resume-load> req=cmpl-a-0 apc=0 lmcache=640 load=640
WARNING <preempted> by preempted requests: {'cmpl-c-0'}
INFO <resume-load> req=cmpl-b-0 apc=0 lmcache=32 load=32
INFO <resume-load> req=cmpl-c-0 apc=64 lmcache=640 load=576
WARNING <preempted> by resumed requests: {'cmpl-c-0'}
"""
    assert headline.recomputed(log, 512, 3) == 1
    assert headline.recomputed(log, 32, 3) == 0
    assert headline.recomputed(log, 32, 4) is None
    lost = repeat(headline, 10, 5, 1, recomputed=1)
    assert "1 preempted requests of the edited arm did not get their KV back" in headline.verdict([lost])


async def test_both_arms_decode_from_the_cache(
    headline: Any, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def watching(_base_url: str) -> AsyncIterator[Any]:
        yield headline.Watch(running=[1.0], used=[1.0])

    monkeypatch.setattr(headline, "watching", watching)
    prompts = [[10 + (7 * step + index) % 1900 for step in range(130 + index)] for index in range(3)]
    async with (
        EmbeddedEngine(tiny_model_path, cache="memory://headline?chunk_size=32") as engine,
        CompletionsClient(engine.base_url) as client,
        aconnect("memory://headline", model_name=engine.model_name) as ctx,
    ):
        found = await headline.run_repeat(
            ctx,
            client,
            prompts,
            StreamingLLM(keep=0.5),
            8,
            2,
            salt="one",
            order=("edited", "baseline"),
            log=Path(os.devnull),
        )
    edited, baseline = found.arms
    assert (edited.name, baseline.name) == ("edited", "baseline")
    assert edited.output_tokens == baseline.output_tokens == 3 * 8
    assert (edited.cached, baseline.cached) == (edited.taken, baseline.taken) == (3 * 64, 3 * 128)
    assert (edited.kv_tokens, baseline.kv_tokens) == (3 * (64 + 2 + 1) + 3, 3 * (128 + 2 + 1) + 3)
    assert edited.edit > 0
    assert min(edited.steps.values()) > 0
    assert headline.verdict([found]) is None
