from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_stream import AsyncLMCacheStream, CompletionsClient, aconnect, editors, portal
from lmcache_stream.bench import serve
from lmcache_stream.bench.config import load_options
from lmcache_stream.bench.datasets import load_samples
from lmcache_stream.bench.place import LocalTokenizer
from lmcache_stream.bench.serve import bench_serve
from lmcache_stream.engine import EmbeddedEngine
from lmcache_stream.engine.model import load_tokenizer
from lmcache_stream.errors import UsageError
from lmcache_stream.journal import read_journal
from lmcache_stream.kvcache.memory import EmbeddedCache
from lmcache_stream.testing import End, FakeEngine, Reply
from tests.bench.test_report import quality_file

TOTALS = (
    *("completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("input_lens", "output_lens", "generated_texts", "errors"),
)
SMALL = {"num_prompts": 12, "random_input_len": 20, "random_output_len": 5, "max_concurrency": 3}


EMPTY = b"""data: {"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": "stop"}]}

data: [DONE]

"""


def quiet(_line: str) -> None:
    pass


def bench(**given: Any) -> dict[str, Any]:
    return bench_serve(environ={}, say=quiet, **{"save_detailed": True, **given})


def totals(result: dict[str, Any]) -> dict[str, Any]:
    return {key: result[key] for key in TOTALS}


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as running:
        yield running


class TestGenerate:
    def test_a_thousand_streams_and_none_is_lost(self, engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
        engine.default = Reply(pace=0, tokens_per_event=4)
        result = bench(base_url=engine.base_url, num_prompts=1000, random_input_len=16, random_output_len=64)
        assert (result["completed"], result["failed"]) == (1000, 0)
        assert result["output_lens"] == [64] * 1000
        assert len(engine.completions) == 1000
        asked = [request.json for request in engine.completions]
        assert result["total_input_tokens"] == sum(len(one["prompt"]) for one in asked)
        assert result["total_output_tokens"] == sum(one["max_tokens"] for one in asked) == 64_000
        assert result["generated_texts"] == ["".join(map(" {}".format, range(64)))] * 1000
        assert "1,000" in capsys.readouterr().out

    def test_what_is_sent(self, engine: FakeEngine) -> None:
        bench(base_url=engine.base_url, **SMALL, temperature=0.5, extra_body={"stop": ["x"]})
        sent = engine.completions[0].json
        assert sent["max_tokens"] == 5
        assert (sent["temperature"], sent["stop"], sent["ignore_eos"]) == (0.5, ["x"], True)
        assert "cache_salt" not in sent

    def test_the_bound_on_requests_at_once_holds(self, engine: FakeEngine) -> None:
        engine.default = Reply(pace=0)
        result = bench(base_url=engine.base_url, **SMALL)
        intervals = list(zip(result["start_times"], result["latencies"], strict=True))
        for start, _ in intervals:
            assert sum(other <= start < other + latency for other, latency in intervals) <= 3

    def test_a_rate_spreads_the_arrivals(self, engine: FakeEngine) -> None:
        from lmcache_stream.bench.load import arrival_times

        given = {**SMALL, "max_concurrency": None, "request_rate": 100.0, "seed": 5}
        result = bench(base_url=engine.base_url, **given)
        arrivals = arrival_times(12, 100.0, 1.0, 5)
        assert all(start >= at for start, at in zip(result["start_times"], arrivals, strict=True))
        assert result["request_rate"] == 100.0

    def test_warm_ups_are_apart(self, engine: FakeEngine) -> None:
        result = bench(base_url=engine.base_url, **SMALL, num_warmups=2)
        assert result["completed"] == 12
        salts = Counter(request.json.get("cache_salt", "") for request in engine.completions)
        assert salts[""] == 12
        assert sum(salts.values()) == 14

    def test_failures_are_counted_and_told(self, engine: FakeEngine) -> None:
        engine.script(Reply(end_after=2, end=End.CUT), Reply(error_after=1), Reply(body=EMPTY))
        result = bench(base_url=engine.base_url, **{**SMALL, "max_concurrency": 1})
        assert (result["completed"], result["failed"]) == (9, 3)
        assert result["output_lens"][:4] == [0, 0, 0, 5]
        assert "the engine failed" in result["errors"][1]
        assert result["errors"][2] == "no token came"
        assert result["total_output_tokens"] == 45

    def test_when_nothing_succeeds_the_status_says_so(self, engine: FakeEngine) -> None:
        engine.default = Reply(status=500, body=b"{}")
        assert run_flags("--base-url", engine.base_url, "--num-prompts", "2", "--random-input-len", "5") == 1

    def test_prompts_from_a_file(self, engine: FakeEngine, tmp_path: Path) -> None:
        path = tmp_path / "prompts.jsonl"
        path.write_text('{"prompt": "abc", "output_tokens": 3}\n')
        given = {"dataset_name": "custom", "dataset_path": path, "skip_chat_template": True, "custom_output_len": -1}
        result = bench(base_url=engine.base_url, num_prompts=2, **given)
        assert result["input_lens"] == [4, 4]
        assert result["output_lens"] == [3, 3]
        assert engine.completions[0].json["prompt"][1:] == list(b"abc")

    def test_a_failure_is_told(self, engine: FakeEngine) -> None:
        engine.script(Reply(), Reply(error_after=1))
        said: list[str] = []
        given: dict[str, Any] = {**SMALL, "max_concurrency": 1, "base_url": engine.base_url}
        bench_serve(environ={}, say=said.append, **given)
        assert any(re.match("1 failed, the first: generate, generate: .*the engine failed", line) for line in said)

    def test_kv_bytes_need_the_shape_of_the_kv(self, engine: FakeEngine) -> None:
        with pytest.raises(UsageError, match="shape of the KV"):
            bench(base_url=engine.base_url, **SMALL, max_kv_bytes="1GiB")


def run_flags(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return serve.run(parser.parse_args(arguments))


class TestFiles:
    def test_result_report_and_journal(self, engine: FakeEngine, tmp_path: Path) -> None:
        result = bench(base_url=engine.base_url, **SMALL, save_result=True, result_dir=tmp_path / "there")
        (result_path,) = (tmp_path / "there").glob("*.json")
        (journal,) = (tmp_path / "there").glob("*.journal.jsonl")
        (report,) = (tmp_path / "there").glob("*.report.html")
        assert json.loads(result_path.read_text()) == result
        assert result_path.name.startswith("vllm-infqps-concurrency3-fake-")
        assert report.read_text().startswith("<!doctype html>")
        assert len(read_journal(journal).lines) == 12 + 1

    def test_quality_is_drawn_into_the_report(self, engine: FakeEngine, tmp_path: Path) -> None:
        given = {"base_url": engine.base_url, **SMALL, "save_result": True, "result_dir": tmp_path / "there"}
        with pytest.raises(UsageError, match=r"cannot read --quality .*none\.json"):
            bench(**given, quality=tmp_path / "none.json")
        assert engine.requests == []
        bench(**given, quality=quality_file(tmp_path))
        (report,) = (tmp_path / "there").glob("*.report.html")
        assert "Quality by kept ratio" in report.read_text()

    def test_nothing_is_written_unasked(
        self, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        bench(base_url=engine.base_url, **SMALL)
        assert list(tmp_path.iterdir()) == []

    def test_a_run_is_not_overwritten(self, engine: FakeEngine, tmp_path: Path) -> None:
        given = {"base_url": engine.base_url, **SMALL, "save_result": True, "result_dir": tmp_path}
        bench(**given, result_filename="x.json")
        with pytest.raises(UsageError, match="--resume"):
            bench(**given, result_filename="x.json")


class TestResume:
    def broken_off(self, engine: FakeEngine, folder: Path) -> tuple[dict[str, Any], Path]:
        """An unbroken run, and its journal to be cut."""
        engine.default = Reply(tokens=lambda asked: [asked["prompt"][0], len(asked["prompt"]), 3])
        given = {"base_url": engine.base_url, **SMALL, "random_range_ratio": 0.5}
        result = bench(**given, save_result=True, result_dir=folder, result_filename="x.json")
        return {**given, "whole": result}, folder / "x.journal.jsonl"

    @pytest.mark.parametrize("share", [0.0, 0.3, 0.55, 0.999, 1.0])
    def test_cut_anywhere_totals_equal_an_unbroken_run(self, share: float, engine: FakeEngine, tmp_path: Path) -> None:
        given, journal = self.broken_off(engine, tmp_path)
        whole = given.pop("whole")
        content = journal.read_bytes()
        header = content.index(b"\n") + 1
        journal.write_bytes(content[: header + int(share * (len(content) - header))])
        there = sum(b'"request"' in line for line in read_journal(journal).lines)
        before = len(engine.completions)
        result = bench(**given, resume=journal)
        assert totals(result) == totals(whole)
        assert len(engine.completions) - before == 12 - there
        assert result["lmcache_stream"]["resumed"] == there
        assert json.loads((tmp_path / "x.json").read_text()) == result

    def test_killed_and_resumed(self, engine: FakeEngine, tmp_path: Path) -> None:
        given, _ = self.broken_off(engine, tmp_path)
        whole = given.pop("whole")
        engine.default = Reply(tokens=engine.default.tokens, pace=0.01)
        start = len(engine.completions)
        flags = {**given, "save_result": True, "result_dir": str(tmp_path / "killed")}
        program = "import json, sys; from lmcache_stream.bench.serve import bench_serve\n"
        program += "bench_serve(environ={}, **json.loads(sys.argv[1]))"
        victim = subprocess.Popen([sys.executable, "-c", program, json.dumps(flags)], stderr=subprocess.DEVNULL)
        try:
            portal.run(engine.until, lambda: len(engine.completions) >= start + 8, timeout=60)
        finally:
            victim.kill()
            victim.wait()
        (journal,) = (tmp_path / "killed").glob("*.journal.jsonl")
        there = len(read_journal(journal).lines)
        assert 0 < there < 12
        before = len(engine.completions)
        result = bench(**given, resume=True, result_dir=tmp_path / "killed")
        assert totals(result) == totals(whole)
        assert len(engine.completions) - before == 12 - there

    def interrupted(self, flags: dict[str, Any], engine: FakeEngine, *, started: int, presses: int) -> tuple[str, str]:
        """What a benchmark prints that Ctrl-C ends once `started` requests have come to the engine."""
        program = "import json, sys; from lmcache_stream.bench import serve\n"
        program += "result = serve.bench_serve(environ={}, **json.loads(sys.argv[1]))\n"
        program += "sys.exit(130 if result['lmcache_stream']['interrupted'] else 0)"
        process = subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(flags)],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        portal.run(engine.until, lambda: len(engine.completions) >= started, timeout=60)
        for _ in range(presses):
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
        assert "Traceback" not in err
        return out, err

    @pytest.mark.parametrize("presses", [1, 2])
    def test_ctrl_c_leaves_a_result_and_a_journal(self, presses: int, engine: FakeEngine, tmp_path: Path) -> None:
        engine.script(*[Reply()] * 4)
        engine.default = Reply(end_after=1, end=End.STALL)
        flags = {"base_url": engine.base_url, **SMALL, "save_result": True, "result_dir": str(tmp_path)}
        out, err = self.interrupted(flags, engine, started=4 + 3, presses=presses)
        assert "--resume" in err
        assert "Not done" in out
        (written,) = (path for path in tmp_path.glob("*.json"))
        result = json.loads(written.read_text())
        assert result["completed"] == 4
        assert result["lmcache_stream"]["interrupted"]
        assert result["lmcache_stream"]["unfinished"] == 8
        portal.run(engine.disconnected, 3)
        engine.default = Reply()
        engine.requests.clear()
        whole = bench(**{**flags, "save_result": False}, resume=True)
        assert (whole["completed"], whole["failed"], len(engine.completions)) == (12, 0, 8)

    def test_ctrl_c_before_the_first_request_ended_prints_no_table(self, engine: FakeEngine) -> None:
        engine.default = Reply(end_after=0, end=End.STALL)
        out, err = self.interrupted({"base_url": engine.base_url, **SMALL}, engine, started=3, presses=1)
        assert out == ""
        assert "interrupted, before any request ended" in err

    def test_other_options_do_not_go_on(self, engine: FakeEngine, tmp_path: Path) -> None:
        given, journal = self.broken_off(engine, tmp_path)
        given.pop("whole")
        with pytest.raises(UsageError, match="max_concurrency is 3 there and 4 here"):
            bench(**{**given, "max_concurrency": 4}, resume=journal)
        with pytest.raises(UsageError, match="samples is"):
            bench(**{**given, "seed": 0, "random_input_len": 21}, resume=journal)
        with pytest.raises(UsageError, match="no journal of a run with these options"):
            bench(**{**given, "seed": 9}, resume=True, result_dir=tmp_path)


EDIT: dict[str, Any] = {
    "num_prompts": 4,
    "random_input_len": 70,
    "random_output_len": 6,
    "temperature": 0.0,
    "modify_timeout": 20.0,
    "editor": ["streaming-llm", "knorm:keep=32"],
    "keep": 0.5,
    "compare_baseline": True,
}
ROUNDS: dict[str, Any] = {"editor": ["keydiff"], "keep": 32, "edit_every": 6, "random_output_len": 20}


class TestEditedRuns:
    @pytest.fixture
    def served(self, tiny_model_path: Path) -> Iterator[EmbeddedEngine]:
        with EmbeddedEngine(tiny_model_path, cache="memory://bench-tests?chunk_size=16") as engine:
            yield engine

    @pytest.fixture
    def at(self, served: EmbeddedEngine, tiny_model_path: Path) -> dict[str, Any]:
        return {
            "base_url": served.base_url,
            "kv_url": "memory://bench-tests",
            "tokenizer": str(tiny_model_path),
            **EDIT,
        }

    def test_phases_of_all_runs(self, at: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
        result = bench(**at)
        assert (result["completed"], result["failed"], result["total_output_tokens"]) == (4, 0, 24)
        ours = result["lmcache_stream"]
        assert ours["run"] == "streaming-llm:keep=0.5"
        assert ours["kept_ratio"] == pytest.approx(0.5)
        assert ours["edit_taken_ratio"] == 1.0
        assert ours["phases"]["prefill"]["completed"] == 4
        assert ours["phases"]["decode"]["output_tokens"] == 24
        assert ours["with_edit_time"]["output_tokens"] < ours["without_edit_time"]["output_tokens"]
        assert [one["run"] for one in ours["other_runs"]] == ["knorm:keep=32", "baseline"]
        printed = capsys.readouterr().out
        assert "Over the baseline" in printed
        assert "Time of all edits (s)" in printed

    @pytest.mark.parametrize("given", [{"keep": 0.5}, ROUNDS])
    def test_the_budget_reaches_the_editor_inside_another(self, at: dict[str, Any], given: dict[str, Any]) -> None:
        result = bench(**{**at, **given, "compare_baseline": False, "editor": ["merge"]})
        assert (result["completed"], result["failed"]) == (4, 0), result["errors"]
        ours = result["lmcache_stream"]
        assert ours["run"] == f"merge:keep={given['keep']}"
        assert ours["modify"]["tokens_after"] == 4 * 32
        assert ours["edit_taken_ratio"] == 1.0

    def test_the_embedded_default(self, tiny_model_path: Path) -> None:
        result = bench(model=str(tiny_model_path), **{**EDIT, "num_prompts": 2, "editor": ["snapkv"]})
        assert (result["completed"], result["failed"]) == (2, 0), result["errors"]
        assert result["lmcache_stream"]["embedded"]
        assert result["tokenizer_id"] == str(tiny_model_path)

    def test_the_embedded_default_without_a_number_of_prompts(self, tiny_model_path: Path) -> None:
        class Enough(Exception):
            pass

        def say(line: str) -> None:
            if line == "the embedded engine takes hours for that: Ctrl-C ends it, --num-prompts 8 is a first look":
                raise Enough

        with pytest.raises(Enough):
            bench_serve(model=str(tiny_model_path), random_input_len=8, random_output_len=2, say=say)

    def test_edits_within_a_budget_of_kv(self, at: dict[str, Any], served: EmbeddedEngine) -> None:
        token = 2 * served.geometry.num_layers * served.geometry.hidden_dim * 4
        assert bench(**at, max_kv_bytes=200 * token)["completed"] == 4
        with pytest.raises(UsageError, match=r"--max-kv-bytes .* is less than one request needs"):
            bench(**at, max_kv_bytes=100 * token)

    def test_prompts_shorter_than_a_chunk_fail_by_name(self, at: dict[str, Any]) -> None:
        result = bench(**{**at, "random_input_len": 10})
        assert (result["completed"], result["failed"]) == (0, 4)
        assert "less than one chunk" in result["errors"][0]

    def test_a_cache_that_is_too_small_is_refused(self, tiny_model_path: Path) -> None:
        with pytest.raises(UsageError, match="does not fit the embedded cache"):
            bench(model=str(tiny_model_path), kv_url="memory://small?max_bytes=1MB", **EDIT)

    @pytest.mark.parametrize("lost", [False, True])
    def test_cut_anywhere_totals_equal_an_unbroken_run(self, lost: bool, at: dict[str, Any], tmp_path: Path) -> None:
        whole = bench(**at, save_result=True, result_dir=tmp_path, result_filename="x.json")
        journal = tmp_path / "x.journal.jsonl"
        lines = journal.read_bytes().splitlines(keepends=True)
        done = 1 + (4 + 1) * 6  # the header, then six phases of four records and an end each
        assert len(lines) == done
        for left in (3, 8, 13, 18, 24, done - 1, done):
            journal.write_bytes(b"".join(lines[:left]) + b'{"kind":"requ')
            if lost:
                cache = EmbeddedCache.open("memory://bench-tests")
                cache.clear()
                cache.close()
            result = bench(**at, resume=journal)
            assert totals(result) == totals(whole)
            assert list(map(counts, runs(result))) == list(map(counts, runs(whole)))
            assert (result["lmcache_stream"]["repeated"] > 0) is (lost and left < done - 1)

    def test_edits_while_decoding(
        self, at: dict[str, Any], served: EmbeddedEngine, capsys: pytest.CaptureFixture[str]
    ) -> None:
        result = bench(**{**at, **ROUNDS})
        assert (result["completed"], result["total_output_tokens"]) == (4, 80), result["errors"]
        ours, baseline = runs(result)
        edits = ours["edits_while_decoding"]
        # 20 tokens in rounds of 6: 6, 6, 6 and 2.
        assert (edits["every"], edits["completed"], edits["edit_ms"]["count"]) == (6, 4 * 3, 4 * 3)
        assert edits["tokens_after"] == 4 * 3 * 32
        assert baseline["edits_while_decoding"] is None
        token = 2 * served.geometry.num_layers * served.geometry.hidden_dim * 4
        moved = edits["tokens_before"] + 16 * edits["chunks_stored"]
        assert edits["bytes_moved"] == moved * token
        assert ours["bytes_moved"] == ours["modify"]["bytes_moved"] + edits["bytes_moved"]
        assert ours["edit_taken_ratio"] == 1.0
        assert 0 < edits["share"] < 1
        assert edits["seconds"] == pytest.approx(edits["edit_ms"]["mean"] * 12 / 1000)
        assert "Edits every 6 tokens" in capsys.readouterr().out

    def test_edits_while_decoding_generate_what_a_stream_by_itself_does(self, at: dict[str, Any]) -> None:
        given = {**at, **ROUNDS}
        result = bench(**given)
        params = {"temperature": 0.0, "ignore_eos": True, "repetition_penalty": 1.0}

        async def by_hand(ids: list[int]) -> str:
            async with (
                CompletionsClient(at["base_url"]) as client,
                aconnect("memory://bench-tests", model_name=(await client.models())[0].id) as cache,
            ):
                stream = AsyncLMCacheStream(cache, client, ids)
                editor = editors.get("keydiff", keep=32)
                await stream.generate({**params, "max_tokens": 1})
                await stream.modify_kv(editor)
                before = len(stream.output_text())
                await stream.generate({**params, "max_tokens": 20}, edit_every=6, editor=editor)
                return stream.output_text()[before:]

        tokenizer = LocalTokenizer(load_tokenizer(at["tokenizer"]), at["tokenizer"])
        samples = load_samples(load_options(environ={}, **given), tokenizer)
        texts = [asyncio.run(by_hand(sample.prompt_token_ids)) for sample in samples]
        assert result["generated_texts"] == texts

    @pytest.mark.parametrize("lost", [False, True])
    def test_cut_anywhere_while_edits_go_on(self, lost: bool, at: dict[str, Any], tmp_path: Path) -> None:
        at = {**at, **ROUNDS}
        whole = bench(**at, save_result=True, result_dir=tmp_path, result_filename="x.json")
        journal = tmp_path / "x.journal.jsonl"
        lines = journal.read_bytes().splitlines(keepends=True)
        for left in (12, len(lines) - 3, len(lines)):
            journal.write_bytes(b"".join(lines[:left]) + b'{"kind":"requ')
            if lost:
                cache = EmbeddedCache.open("memory://bench-tests")
                cache.clear()
                cache.close()
            result = bench(**at, resume=journal)
            assert totals(result) == totals(whole)
            assert list(map(counts, runs(result))) == list(map(counts, runs(whole)))
        with pytest.raises(UsageError, match="edit_every is 6 there and 7 here"):
            bench(**{**at, "edit_every": 7}, resume=journal)

    def test_an_edit_that_changes_nothing_is_no_shortfall(self, at: dict[str, Any]) -> None:
        result = bench(**{**at, "editor": ["keydiff"], "keep": 4096})
        ours = result["lmcache_stream"]
        assert (result["completed"], ours["kept_ratio"], ours["modify"]["chunks_stored"]) == (4, 1.0, 0)
        assert ours["edit_taken_ratio"] is None


def runs(result: dict[str, Any]) -> list[dict[str, Any]]:
    ours = result["lmcache_stream"]
    return [ours, *ours["other_runs"]]


def counts(run: dict[str, Any]) -> list[Any]:
    of_requests = ("completed", "failed", "input_tokens", "output_tokens")
    of_edits = ("completed", "tokens_before", "tokens_after", "chunks_stored", "bytes_moved")
    phases = [[phase[key] for key in of_requests] for phase in run["phases"].values()]
    modify = run["modify"] and [run["modify"][key] for key in of_edits]
    rounds = run["edits_while_decoding"] and [run["edits_while_decoding"][key] for key in of_edits]
    return [run["run"], phases, modify, rounds, run["kept_ratio"], run["edit_taken_ratio"]]


class TestUsage:
    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"model": "other"}, "does not serve --model other: give one of fake"),
            ({"dataset_name": "custom", "dataset_path": "/none.jsonl"}, "cannot read --dataset-path /none.jsonl"),
            ({"editor": ["nothing"], "kv_url": "memory://x"}, "no editor is called 'nothing'"),
            ({"editor": ["knorm:colour=3"], "kv_url": "memory://x"}, "knorm has no parameter colour"),
            ({"editor": ["knorm"], "kv_url": "memory://x", "edit_every": 4, "keep": 0.5}, "such as --keep 512"),
            ({"editor": ["knorm"], "kv_url": "memory://x", "edit_every": 4}, "knorm a count of tokens instead of 0.5"),
            ({"editor": ["merge"], "kv_url": "memory://x", "edit_every": 4}, "give merge a count of tokens"),
            (
                {"editor": ['compose:editors=["quantize","knorm"]'], "kv_url": "memory://x", "edit_every": 4},
                "give compose a count of tokens instead of 0.5",
            ),
            (
                {"editor": ["quantize"], "kv_url": "memory://x", "keep": 64},
                "quantize keeps every token: it takes no keep",
            ),
            ({"editor": ["snapkv:keep=64"], "kv_url": "memory://x", "edit_every": 4}, "does not go with snapkv"),
            (
                {"editor": ["merge:editor=snapkv"], "keep": 64, "kv_url": "memory://x", "edit_every": 4},
                "does not go with merge",
            ),
            ({"editor": ["knorm", "knorm"], "kv_url": "memory://x"}, "there twice"),
            ({"kv_url": "tcp://127.0.0.1:9", "kv_http_url": "http://127.0.0.1:9"}, "correct --kv-http-url"),
            ({"random_input_len": 5000}, "do not fit the 4,096 that the engine takes"),
            ({"random_input_len": 10**9}, "do not fit the 4,096 that the engine takes"),
            ({"random_input_len": 3980, "random_output_len": 117}, "do not fit the 4,096 that the engine takes"),
            (
                {"dataset_name": "prefix_repetition", "prefix_repetition_prefix_len": 4000},
                "do not fit the 4,096 that the engine takes",
            ),
            ({"base_url": "localhost:8000"}, "--base-url is 'localhost:8000'"),
            ({"kv_url": "nonsense", "kv_http_url": "http://127.0.0.1:9"}, "no cache backend serves 'nonsense'"),
            ({"tokenizer": "/none"}, "--tokenizer /none"),
            ({"resume": Path("/none.journal.jsonl")}, "there is no journal /none"),
        ],
    )
    def test_what_is_wrong_is_one_line(self, given: dict[str, Any], said: str, engine: FakeEngine) -> None:
        with pytest.raises(UsageError) as error:
            bench(**{"base_url": engine.base_url, "num_prompts": 2, **given})
        assert said in str(error.value)
        assert "\n" not in str(error.value)
        assert engine.completions == []

    def test_edits_that_would_never_come(self, tiny_model_path: Path) -> None:
        with pytest.raises(UsageError, match="--edit-every 6 would edit nothing: no prompt has more than 6 tokens"):
            bench(model=str(tiny_model_path), **{**EDIT, "editor": ["knorm"], "keep": 32, "edit_every": 6})

    def test_an_engine_that_cannot_be_reached(self, free_tcp_port: int) -> None:
        with pytest.raises(
            UsageError, match=f"--base-url leads to no engine: http://127.0.0.1:{free_tcp_port}.*lmcache-stream up"
        ):
            bench(base_url=f"http://127.0.0.1:{free_tcp_port}")

    async def test_inside_an_event_loop(self) -> None:
        with pytest.raises(UsageError, match="to_thread"):
            bench()

    def test_a_model_that_is_no_folder(self) -> None:
        with pytest.raises(UsageError, match="--model /none is no model's folder"):
            bench(model="/none")

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--num-prompts", "none"],
            ["--base-url", "http://127.0.0.1:9", "--num-prompts", "1"],
            ["--dataset-name", "sharegpt"],
            ["--editor", "nothing"],
        ],
    )
    def test_on_the_command_line_the_status_is_2(
        self, arguments: list[str], command: Callable[..., tuple[int, str]]
    ) -> None:
        status, said = command(*arguments)
        assert status == 2
        assert said.startswith("lmcache-stream: ")
        assert said.count("\n") == 1

    @pytest.fixture
    def command(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> Callable[..., tuple[int, str]]:
        from lmcache_stream import cli

        for name in list(os.environ):
            if name.startswith("LMCACHE_STREAM_"):
                monkeypatch.delenv(name)
        monkeypatch.setitem(cli.COMMANDS, "serve-tests", ("lmcache_stream.bench.serve", "for tests"))

        def run(*arguments: str) -> tuple[int, str]:
            status = cli.main(["serve-tests", *arguments])
            return status, capsys.readouterr().err

        return run
