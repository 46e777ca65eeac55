from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lmcache_stream.bench.config import ServeOptions, load_options
from lmcache_stream.bench.records import (
    GENERATE,
    EditRecord,
    EditWhileDecoding,
    Entry,
    Ledger,
    PhaseRecord,
    RequestRecord,
)
from lmcache_stream.bench.result import Run, build_result, flat_keys, read_result, write_result
from lmcache_stream.bench.runner import BASELINE, SHARED
from lmcache_stream.errors import UsageError

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


class TestFlatKeys:
    def test_equal_what_vllm_made_of_the_same_requests(self) -> None:
        result, records = recorded()
        given = options(max_concurrency=4, save_detailed=True, goodput={"ttft": 1000.0, "tpot": 1000.0})
        flat = flat_keys(records, result["duration"], given)
        for key, value in flat.items():
            if key == "itls":
                assert [pytest.approx(gaps) for gaps in value] == result[key]
            else:
                assert value == pytest.approx(result[key]), key

    @pytest.mark.parametrize("seed", range(3))
    def test_equal_an_independent_computation(self, seed: int) -> None:
        records = trace(40, seed)
        given = options(
            goodput={"ttft": 200.0, "tpot": 30.0, "e2el": 900.0},
            percentile_metrics="ttft,tpot,itl,e2el,client_queue_time,e2el_including_client_queue",
            metric_percentiles="25,50,99,99.9",
            max_concurrency=8,
            request_rate=10,
        )
        flat = flat_keys(records, 4.0, given)
        good = [one for one in records if not one.error]
        arrivals = [np.array([at for at, _ in one.events]) for one in good]
        tokens = np.array([sum(count for _, count in one.events) for one in good])
        ttft = np.array([times[0] for times in arrivals])
        e2el = np.array([times[-1] for times in arrivals])
        many = tokens > 1
        tpot = (e2el[many] - ttft[many]) / (tokens[many] - 1)
        queue = np.array([one.queue for one in good])
        expected = {
            "ttft": ttft,
            "tpot": tpot,
            "itl": np.concatenate([np.diff(times) for times in arrivals]),
            "e2el": e2el,
            "client_queue_time": queue,
            "e2el_including_client_queue": e2el + queue,
        }
        for metric, values in expected.items():
            assert flat[f"mean_{metric}_ms"] == pytest.approx(1000 * np.mean(values))
            assert flat[f"median_{metric}_ms"] == pytest.approx(1000 * np.median(values))
            assert flat[f"std_{metric}_ms"] == pytest.approx(1000 * np.std(values))
            for name, q in (("p25", 25), ("p50", 50), ("p99", 99), ("p99.9", 99.9)):
                assert flat[f"{name}_{metric}_ms"] == pytest.approx(1000 * np.percentile(values, q))
        zero_for_one = np.where(many, (e2el - ttft) / np.maximum(tokens - 1, 1), 0)
        met = (ttft <= 0.2) & (zero_for_one <= 0.03) & (e2el <= 0.9)
        assert flat["request_goodput"] == pytest.approx(met.sum() / 4.0)
        assert 0 < met.sum() < len(good)
        assert (flat["completed"], flat["failed"]) == (32, 8)
        assert flat["total_output_tokens"] == tokens.sum()
        assert flat["output_throughput"] == pytest.approx(tokens.sum() / 4.0)

    def test_of_nothing(self) -> None:
        flat = flat_keys([], 0.0, options())
        assert (flat["completed"], flat["output_throughput"], flat["mean_ttft_ms"]) == (0, 0.0, 0.0)
        assert flat["p99_itl_ms"] == 0.0

    def test_a_spread_gap_is_shared_by_the_tokens_of_its_event(self) -> None:
        one = RequestRecord(GENERATE, "generate", 0, 0.0, 1.0, events=[(0.1, 2), (0.4, 3), (0.5, 1)])
        assert one.itl == pytest.approx([0.3, 0.1])
        assert one.itl_spread == pytest.approx([0.0, 0.1, 0.1, 0.1, 0.1])
        assert one.tpot == pytest.approx(0.4 / 5)


def finished(records: list[RequestRecord], *phases: PhaseRecord, edits: list[EditRecord] | None = None) -> Ledger:
    ledger = Ledger()
    entries: list[Entry] = [*records, *(edits or []), *phases]
    for entry in entries:
        ledger.add(entry)
    return ledger


def about(given: ServeOptions, count: int, editors: list[str] | None = None) -> Run:
    return Run(given, editors or [], "m", "t", "http://localhost", False, "digest", count, "20261129-120000", "0")


class TestFile:
    def test_has_the_keys_of_vllm_and_one_of_ours(self) -> None:
        there, records = recorded()
        given = options(max_concurrency=4, num_prompts=8, save_detailed=True, goodput={"ttft": 1000})
        result = build_result(about(given, 8), finished(records, PhaseRecord(GENERATE, "generate", 0.9)))
        assert result.keys() == there.keys() | {"lmcache_stream"}
        assert list(result)[:-1] == list(there)
        assert (result["request_rate"], result["max_concurrency"], result["duration"]) == ("inf", 4, 0.9)

    def test_without_details_lacks_what_vllm_leaves_out(self) -> None:
        _, records = recorded()
        result = build_result(about(options(), 8), finished(records))
        for key in ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors"):
            assert key not in result

    def test_metadata_stands_beside(self) -> None:
        result = build_result(about(options(metadata={"gpu": "none", "duration": "x"}), 0), Ledger())
        assert result["gpu"] == "none"
        assert result["duration"] == 0.0

    def test_is_read_back(self, tmp_path: Path) -> None:
        _, records = recorded()
        result = build_result(about(options(), 8), finished(records))
        write_result(tmp_path / "result.json", json.dumps(result))
        content, ours = read_result(tmp_path / "result.json")
        assert content == result
        assert ours is not None
        assert ours.schema_version == 1
        assert ours.itl_spread_ms is not None
        assert ours.itl_spread_ms.count == 120
        assert ours.model_dump(mode="json") == result["lmcache_stream"]
        assert [path.name for path in tmp_path.iterdir()] == ["result.json"]

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"cannot write .*none/x\.json"):
            write_result(tmp_path / "none" / "x.json", "")

    def test_a_result_of_vllm_is_read(self) -> None:
        content, ours = read_result(RECORDED)
        assert content["completed"] == 8
        assert ours is None

    @pytest.mark.parametrize(
        ("content", "said"),
        [("{", "not JSON"), ("[]", "no result"), ('{"a": 1}', "no result")],
    )
    def test_another_file(self, content: str, said: str, tmp_path: Path) -> None:
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(UsageError, match=said):
            read_result(tmp_path / "x.json")
        with pytest.raises(UsageError, match="No such file"):
            read_result(tmp_path / "none.json")


def request(run: str, phase: Any, index: int, **given: Any) -> RequestRecord:
    events = [(0.1 * (step + 1), 1) for step in range(10 if phase == "decode" else 1)]
    return RequestRecord(run, phase, index, start=0.0, duration=1.0, events=events, **given)


class TestEditedRuns:
    EDITOR = "knorm:keep=0.5"

    def build(self) -> dict[str, Any]:
        records = [request(SHARED, "prefill", index, input_tokens=100) for index in range(3)]
        records.append(request(SHARED, "prefill", 3, error="it broke"))
        edits = [
            EditRecord(
                self.EDITOR,
                index,
                0.0,
                0.2,
                tokens_before=96,
                tokens_after=64,
                bytes_moved=1000,
                chunks_stored=2,
                stored=[1] * 64,
                seconds={"edit": 0.1, "store": 0.05},
            )
            for index in range(2)
        ]
        edits.append(EditRecord(self.EDITOR, 2, 0.0, 0.2, error="CoverageTimeout: nothing"))
        records += [
            request(self.EDITOR, "decode", index, input_tokens=65, cached_tokens=64 - 32 * index) for index in (0,)
        ]
        records.append(request(self.EDITOR, "decode", 1, input_tokens=65, cached_tokens=32, edit_shortfall=32))
        records += [request(BASELINE, "decode", index, input_tokens=101) for index in range(3)]
        phases = [
            PhaseRecord(SHARED, "prefill", 4.0),
            PhaseRecord(self.EDITOR, "modify", 0.5),
            PhaseRecord(self.EDITOR, "decode", 1.5),
            PhaseRecord(BASELINE, "decode", 3.0),
        ]
        given = options(num_prompts=4, editor=["knorm"], keep=0.5, compare_baseline=True, save_detailed=True)
        return build_result(about(given, 4, [self.EDITOR]), finished(records, *phases, edits=edits))

    def test_flat_keys_describe_the_decode_of_the_editor(self) -> None:
        result = self.build()
        assert (result["completed"], result["failed"], result["duration"]) == (2, 2, 1.5)
        assert (result["total_input_tokens"], result["total_output_tokens"]) == (130, 20)
        assert result["errors"] == ["", "", "modify: CoverageTimeout: nothing", "prefill: it broke"]

    def test_throughput_with_and_without_edit_time(self) -> None:
        ours = self.build()["lmcache_stream"]
        assert ours["edit_time"] == 0.5
        assert ours["without_edit_time"] == {
            "duration": 1.5,
            "requests": pytest.approx(2 / 1.5),
            "output_tokens": pytest.approx(20 / 1.5),
        }
        assert ours["with_edit_time"]["output_tokens"] == pytest.approx(10.0)
        assert ours["gain_without_edit_time"] == pytest.approx(20 / 1.5 / 10)
        assert ours["gain_with_edit_time"] == pytest.approx(1.0)

    def test_edits_while_decoding(self) -> None:
        def later(duration: float, chunks: int) -> EditWhileDecoding:
            moved: dict[str, Any] = {"bytes_moved": 10, "seconds": {"edit": duration / 2}, "chunks_stored": chunks}
            return EditWhileDecoding(0.1, duration, 48, 32 if chunks else 48, **moved)

        edits = [
            EditRecord(self.EDITOR, 0, 0.0, 0.2, tokens_before=96, tokens_after=64, stored=[1] * 64, bytes_moved=5)
        ]
        done = request(self.EDITOR, "decode", 0, cached_tokens=40, edit_shortfall=24)
        broken = request(self.EDITOR, "decode", 1, error="it broke")
        records = [
            msgspec.structs.replace(done, edits=[later(0.1, 2), later(0.3, 0)]),
            msgspec.structs.replace(broken, edits=[later(9.0, 2)]),
        ]
        given = options(num_prompts=2, editor=["knorm:keep=32"], edit_every=8)
        ours = build_result(about(given, 2, [self.EDITOR]), finished(records, edits=edits))["lmcache_stream"]
        found = ours["edits_while_decoding"]
        assert (found["every"], found["completed"], found["chunks_stored"]) == (8, 2, 2)
        assert (found["tokens_before"], found["tokens_after"]) == (96, 80)
        assert found["seconds"] == pytest.approx(0.4)
        assert found["share"] == pytest.approx(0.4 / done.duration)
        assert found["steps_ms"]["edit"]["mean"] == pytest.approx(100.0)
        assert ours["bytes_moved"] == 25
        # 64 tokens of the prompt's edit and 32 of the one later edit that stored something.
        assert ours["edit_taken_ratio"] == pytest.approx(1 - 24 / 96)

    def test_what_the_edits_did(self) -> None:
        ours = self.build()["lmcache_stream"]
        assert ours["editor"] == self.EDITOR
        assert ours["kept_ratio"] == pytest.approx(64 / 96)
        assert ours["bytes_moved"] == 2000
        assert (ours["modify"]["completed"], ours["modify"]["failed"]) == (2, 1)
        assert ours["modify"]["steps_ms"]["edit"]["mean"] == pytest.approx(100.0)
        assert ours["edit_taken_ratio"] == pytest.approx(1 - 32 / 128)

    def test_the_prefill_is_apart(self) -> None:
        prefill = self.build()["lmcache_stream"]["phases"]["prefill"]
        assert (prefill["duration"], prefill["completed"], prefill["failed"]) == (4.0, 3, 1)
        assert prefill["input_tokens"] == 300

    def test_the_baseline_is_another_run(self) -> None:
        (baseline,) = self.build()["lmcache_stream"]["other_runs"]
        assert (baseline["run"], baseline["editor"], baseline["edit_time"]) == (BASELINE, None, 0.0)
        assert baseline["without_edit_time"]["output_tokens"] == pytest.approx(10.0)
        assert baseline["gain_without_edit_time"] is None
