"""Benchmarks to make results of."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from lmcache_stream.bench.config import ServeOptions, load_options
from lmcache_stream.bench.records import GENERATE, EditRecord, Entry, Ledger, PhaseRecord, RequestRecord
from lmcache_stream.bench.result import Run

RECORDED = Path(__file__).parents[1] / "data" / "vllm-bench-serve.json"


def options(**given: Any) -> ServeOptions:
    return load_options(environ={}, **given)


def recorded() -> tuple[dict[str, Any], list[RequestRecord]]:
    """A result of `vllm bench serve`, and the requests that it is about."""
    result = json.loads(RECORDED.read_text())
    records = []
    for index, ttft in enumerate(result["ttfts"]):
        arrivals = np.cumsum([ttft, *result["itls"][index]]).tolist()
        records.append(
            RequestRecord(
                run=GENERATE,
                phase="generate",
                index=index,
                start=result["start_times"][index],
                duration=arrivals[-1],
                queue=result["queue_times"][index],
                input_tokens=result["input_lens"][index],
                events=[(at, 1) for at in arrivals],
                text=result["generated_texts"][index],
            )
        )
    return result, records


def trace(count: int, seed: int = 0) -> list[RequestRecord]:
    """Requests whose events bring several tokens; some failed, some with one token."""
    rng = random.Random(seed)
    records = []
    for index in range(count):
        at = rng.uniform(0.01, 0.3)
        events = []
        for _ in range(1 if index % 7 == 0 else rng.randint(2, 40)):
            events.append((at, rng.choice([1, 1, 1, 2, 5])))
            at += rng.uniform(0.001, 0.08)
        error = "EngineStreamError: it broke off" if index % 5 == 4 else ""
        start = rng.uniform(0, 3)
        records.append(
            RequestRecord(GENERATE, "generate", index, start, at, rng.uniform(0, 1), 10 + index, events, error=error)
        )
    return records


def finished(records: list[RequestRecord], *phases: PhaseRecord, edits: list[EditRecord] | None = None) -> Ledger:
    ledger = Ledger()
    entries: list[Entry] = [*records, *(edits or []), *phases]
    for entry in entries:
        ledger.add(entry)
    return ledger


def about(given: ServeOptions, count: int, editors: list[str] | None = None) -> Run:
    return Run(given, editors or [], "m", "t", "http://localhost", False, "digest", count, "20261129-120000", "0")
