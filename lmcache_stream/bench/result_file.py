"""What a result file has: beside the keys of `vllm bench serve`, one object of our own; and how it is read and written.

`itl_spread_ms` has each gap between two events spread over the tokens of its event.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from lmcache_stream.errors import UsageError
from lmcache_stream.metrics.statistics import deviation, mean, percentile_of_sorted

__all__ = [
    "SCHEMA_VERSION",
    "Distribution",
    "EditsResult",
    "EditsWhileDecodingResult",
    "ModifyResult",
    "PhaseResult",
    "RunResult",
    "StreamResult",
    "Throughput",
    "read_result",
    "write_result",
]

SCHEMA_VERSION: Final = 1
_MS: Final = 1000.0


class _Part(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True)


class Distribution(_Part):
    """How values spread, in milliseconds.

    Args:
        count: Values.
        mean: Their mean.
        median: Their median.
        std: Their standard deviation (of a population).
        p90: Their 90th percentile.
        p99: Their 99th percentile.
        quantiles: Their percentiles 0, 1, ... 100.
    """

    count: int
    mean: float
    median: float
    std: float
    p90: float
    p99: float
    quantiles: list[float]

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Distribution | None:
        """The distribution of values in seconds; None of none."""
        values = sorted(seconds)
        if not values:
            return None
        quantiles = [percentile_of_sorted(values, q) * _MS for q in range(101)]
        return cls(
            count=len(values),
            mean=mean(values) * _MS,
            std=deviation(values) * _MS,
            median=quantiles[50],
            p90=quantiles[90],
            p99=quantiles[99],
            quantiles=quantiles,
        )


class Throughput(_Part):
    """What came out over a time.

    Args:
        duration: Seconds.
        requests: Requests a second.
        output_tokens: Generated tokens a second.
    """

    duration: float
    requests: float
    output_tokens: float


class PhaseResult(_Part):
    """A phase of requests.

    Args:
        duration: Seconds.
        completed: Requests that succeeded.
        failed: Requests that failed.
        input_tokens: Tokens of the prompts that were sent, of successful requests, as are all below.
        output_tokens: Tokens generated.
        cached_tokens: Prompt tokens that the engine took from a cache; None if it does not say.
        edit_shortfall: Tokens of stored edits that it did not.
        ttft_ms: Time to the first token.
        tpot_ms: Each request's mean time per token after the first.
        itl_ms: Gaps between events.
        itl_spread_ms: Gaps between tokens: an event's gap spread over its tokens.
        e2el_ms: Time to the last token.
        throughput: `[second, generated tokens a second]` over the phase, of all requests.
    """

    duration: float
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    edit_shortfall: int = 0
    ttft_ms: Distribution | None = None
    tpot_ms: Distribution | None = None
    itl_ms: Distribution | None = None
    itl_spread_ms: Distribution | None = None
    e2el_ms: Distribution | None = None
    throughput: list[tuple[float, float]] = []


class EditsResult(_Part):
    """Edits.

    Args:
        completed: Edits that succeeded.
        tokens_before: Tokens whose KV was edited.
        tokens_after: Tokens that the edits gave back.
        recomputed: Tokens of them that fill no chunk, so that the engine computes them anew.
        chunks_stored: Chunks stored.
        bytes_moved: Bytes of KV read and written.
        edit_ms: Time of an edit, with waiting, reading and storing.
        steps_ms: The same by step: wait, retrieve, edit, store.
    """

    completed: int
    tokens_before: int
    tokens_after: int
    recomputed: int
    chunks_stored: int
    bytes_moved: int
    edit_ms: Distribution | None = None
    steps_ms: dict[str, Distribution] = {}


class ModifyResult(EditsResult):
    """A phase of edits.

    Args:
        duration: Seconds.
        failed: Edits that failed.
    """

    duration: float
    failed: int


class EditsWhileDecodingResult(EditsResult):
    """Edits between the passes of decodes; one that fails ends its request.

    Args:
        every: Tokens between two edits of a request.
        seconds: Time of all edits together; in each request's own time, and in `without_edit_time` too.
        share: That, over the time of all requests that succeeded together.
    """

    every: int
    seconds: float
    share: float


class RunResult(_Part):
    """A run over all prompts.

    Args:
        run: Its name: "generate", "baseline", or the editor as it was asked for.
        editor: The editor; None without one.
        phases: Its phases of requests by name: generate, or prefill and decode. The prefill is common to all runs.
        modify: Its phase of edits; None without one.
        edits_while_decoding: Edits between the passes of its decodes; None without `edit_every`.
        kept_ratio: Tokens after the edits over tokens before, in the phase of edits; None without one.
        bytes_moved: Bytes of KV read and written by all edits.
        edit_time: Seconds of the phase of edits.
        without_edit_time: Throughput over the time of the last phase; edits while decoding are part of that.
        with_edit_time: Throughput over that and the time of the phase of edits.
        edit_taken_ratio: Share of the stored edits' tokens that the engine took from the cache; None if it does not
            say, or without edits. Below 1, this run measures something else than decoding from edits.
        gain_without_edit_time: Output throughput over the baseline's; None without one.
        gain_with_edit_time: The same, with edit time counted.
    """

    run: str
    editor: str | None = None
    phases: dict[str, PhaseResult]
    modify: ModifyResult | None = None
    edits_while_decoding: EditsWhileDecodingResult | None = None
    kept_ratio: float | None = None
    bytes_moved: int = 0
    edit_time: float = 0.0
    without_edit_time: Throughput
    with_edit_time: Throughput
    edit_taken_ratio: float | None = None
    gain_without_edit_time: float | None = None
    gain_with_edit_time: float | None = None

    @property
    def last(self) -> PhaseResult:
        """The phase that generates."""
        return self.phases.get("decode") or self.phases["generate"]


class StreamResult(RunResult):
    """What a result file has under "lmcache_stream": the run that the flat keys describe, and all others.

    Args:
        schema_version: Of this object.
        version: Of the package.
        base_url: The engine's address.
        embedded: Whether engine and cache ran in the benchmark's own process.
        itl_spread_ms: The run's gaps between tokens, beside the flat `*_itl_ms`.
        other_runs: The baseline, and further editors.
        samples: Fingerprint of the prompts.
        options: What was asked for.
        interrupted: Whether it ended before everything was done.
        unfinished: Requests of the run that are neither completed nor failed.
        resumed: Records taken over from an earlier process.
        repeated: Prefills and edits done again because the cache had lost their KV; in no figure.
    """

    schema_version: int = SCHEMA_VERSION
    version: str
    base_url: str
    embedded: bool
    itl_spread_ms: Distribution | None = None
    other_runs: list[RunResult] = []
    samples: str
    options: dict[str, Any] = {}
    interrupted: bool = False
    unfinished: int = 0
    resumed: int = 0
    repeated: int = 0


def write_result(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        UsageError: There is no such folder, or it cannot be written to.
        OSError: The file cannot be written.
    """
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_result(path: Path) -> tuple[dict[str, Any], StreamResult | None]:
    """Read a result file: its content, and our own object, which a file of `vllm bench serve` lacks.

    Raises:
        UsageError: It cannot be read, or is no such result.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read the result {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or not {"duration", "completed", "output_throughput"} <= content.keys():
        raise UsageError(f"{path} is no result of bench serve")
    ours = content.get("lmcache_stream")
    try:
        return content, None if ours is None else StreamResult.model_validate(ours)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"{path}: lmcache_stream.{place}: {first['msg'].lower()}") from error
