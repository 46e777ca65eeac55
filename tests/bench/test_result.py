from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmcache_stream.bench.records import (
    GENERATE,
    EditRecord,
    EditWhileDecoding,
    Ledger,
    PhaseRecord,
    RequestRecord,
)
from lmcache_stream.bench.result import build_result
from lmcache_stream.bench.result_file import read_result, write_result
from lmcache_stream.bench.runner import BASELINE, SHARED
from lmcache_stream.errors import UsageError
from tests.bench.results import RECORDED, about, finished, options, recorded


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
