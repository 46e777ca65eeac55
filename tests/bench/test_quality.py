from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from lmcache_stream.bench import experiment, quality
from lmcache_stream.bench.experiment import Plan, Report, measure
from lmcache_stream.bench.quality_report import show, to_json, write_plot
from lmcache_stream.bench.scoring import Probe, continue_greedily, prefill, score
from lmcache_stream.bench.statistics import mean_interval
from lmcache_stream.bench.variants import Variant, make_variants
from lmcache_stream.console import JsonOutput
from lmcache_stream.editors import EditInput, Random, SnapKV, StreamingLLM
from lmcache_stream.engine.model import CausalLM
from lmcache_stream.errors import UsageError
from tests.bench.corpus import made_up_corpus
from tests.reference import forward_kv, greedy

PROMPT, NEW, CHUNK = 128, 15, 16


@pytest.fixture(scope="module")
def lm(tiny_model_path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    made = CausalLM(model, chunk_size=CHUNK, queries=True)
    yield made
    made.close()


def variants(*specs: str, keeps: tuple[float, ...] = (0.5,), scopes: tuple[str, ...] = ("shared",)) -> list[Variant]:
    return make_variants(specs, scopes=scopes, keeps=keeps, window=16, seed=0)


def plan(edits: list[Variant], **changes: Any) -> Plan:
    small: dict[str, Any] = {
        "texts": 10,
        "tasks": (),
        "task_samples": 3,
        "prompt_tokens": PROMPT,
        "new_tokens": NEW,
        "chunk_size": CHUNK,
        "window": 16,
    }
    return Plan(variants=edits, **{**small, **changes})


def measured(lm: CausalLM, tiny_model: tuple[Any, Any], edits: list[Variant], **changes: Any) -> Report:
    others = {name: changes.pop(name) for name in ("journal", "tolerant") if name in changes}
    return measure(lm, tiny_model[1], made_up_corpus(), plan(edits, **changes), **others)


def ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(10, 2000, (count,), generator=generator)]


@torch.no_grad()
def plain_nll(model: Any, kv: torch.Tensor, fed: list[int], targets: list[int], first: int) -> list[float]:
    """Negative log-likelihoods token by token, with plain transformers."""
    cache, past = DynamicCache(), kv.shape[2]
    for layer in range(kv.shape[1]):
        cache.update(*(kv[p, layer].view(past, -1, 64).transpose(0, 1)[None].clone() for p in (0, 1)), layer)
    found = []
    for index, token in enumerate(fed):
        position = torch.tensor([[first + index]])
        logits = model(torch.tensor([[token]]), cache=cache, position_ids=position, use_cache=True).logits[0, -1]
        found.append(logits.double())
    wanted = found[len(fed) - len(targets) :]
    return [float(-row.log_softmax(-1)[target]) for row, target in zip(wanted, targets, strict=True)]


@pytest.mark.parametrize("position", [None, PROMPT])
@pytest.mark.parametrize("editor", [StreamingLLM(keep=0.5), SnapKV(keep=0.5, window=16, scope="head")])
def test_scores_equal_a_plain_computation_over_the_same_edited_cache(
    lm: CausalLM, tiny_model: tuple[Any, Any], editor: Any, position: int | None
) -> None:
    prompt, fed, targets = ids(PROMPT), ids(NEW, 1), ids(NEW - 3, 2)
    prefilled = prefill(lm, prompt, queries=True)
    edit = prefilled.edit(editor, CHUNK)
    torch.testing.assert_close(prefilled.kv, forward_kv(tiny_model[0], prompt), rtol=1e-4, atol=1e-4)
    again = editor.edit(
        EditInput(
            kv=forward_kv(tiny_model[0], prompt),
            tokens=tuple(prompt),
            geometry=lm.geometry,
            chunk_size=CHUNK,
            queries=prefilled.queries,
        )
    )
    scores = score(lm, edit.kv, Probe(tuple(fed), tuple(targets)), position=position)
    expected = plain_nll(tiny_model[0], again.kv, fed, targets, edit.kv.shape[2] if position is None else position)
    assert scores.nll.tolist() == pytest.approx(expected, abs=2e-3)


def test_the_greedy_continuation_is_the_models_own(lm: CausalLM, tiny_model: tuple[Any, Any]) -> None:
    prompt = ids(PROMPT)
    assert list(continue_greedily(lm, prefill(lm, prompt, queries=False), 8)) == greedy(tiny_model[0], None, prompt, 8)


def test_keeping_everything_changes_nothing(lm: CausalLM, tiny_model: tuple[Any, Any]) -> None:
    report = measured(lm, tiny_model, variants("keydiff", "snapkv", keeps=(1.0,)))
    for cell in report.cells:
        assert cell.kept == 1
        for probe in ("true", "greedy"):
            assert (cell.nll[probe].mean, cell.nll[probe].half_width, cell.agreement[probe].mean) == (0, 0, 1)
    assert report.comparisons == []


def test_every_number_comes_from_the_samples(lm: CausalLM, tiny_model: tuple[Any, Any]) -> None:
    edits = variants("random", "streaming-llm", "keydiff", keeps=(0.5, 0.25))
    report = measured(lm, tiny_model, edits)
    assert len({record.id for record in report.texts}) == 10
    for cell in report.cells:
        differences = [r.edited[cell.variant].probes["greedy"].nll - r.full["greedy"].nll for r in report.texts]
        expected = mean_interval(differences, [record.cluster for record in report.texts])
        assert cell.nll["greedy"] == expected
        assert cell.nll["greedy"].mean > 0  # what the model said with all KV is less likely without
        assert cell.kept == float(cell.variant.rpartition("/")[2])
    assert all(record.full["greedy"].exact for record in report.texts)
    assert all(not record.full["true"].exact for record in report.texts)


def test_a_record_is_what_one_edit_of_one_text_gives(lm: CausalLM, tiny_model: tuple[Any, Any]) -> None:
    (variant,) = edits = variants("snapkv", scopes=("head",))
    report = measured(lm, tiny_model, edits, texts=1)
    (sample,) = report.texts
    name, start = sample.id.split("@")
    text = next(document.text for document in made_up_corpus().documents if document.name == name)
    tokens = tiny_model[1].encode(text, add_special_tokens=False)[int(start) :]
    prefilled = prefill(lm, tokens[:PROMPT], queries=True)
    edit = prefilled.edit(variant.editor, CHUNK)
    fed, targets = tokens[PROMPT : PROMPT + NEW], tokens[PROMPT + 1 : PROMPT + NEW + 1]
    expected = plain_nll(tiny_model[0], edit.kv, fed, targets, len(edit.tokens))
    assert sample.edited[variant.label].probes["true"].nll == pytest.approx(math.fsum(expected) / NEW, abs=2e-3)
    assert sample.edited[variant.label].kept == PROMPT // 2


def test_scopes_and_editors_are_compared_in_pairs(lm: CausalLM, tiny_model: tuple[Any, Any]) -> None:
    edits = variants("streaming-llm", "keydiff", "snapkv", scopes=("shared", "layer", "head"))
    report = measured(lm, tiny_model, edits)
    found = {(one.family, one.variant, one.against) for one in report.comparisons}
    assert found == {
        ("editors", "keydiff/shared/0.5", "streaming-llm/shared/0.5"),
        ("editors", "snapkv/shared/0.5", "streaming-llm/shared/0.5"),
        *(("scopes", f"{m}/{s}/0.5", f"{m}/shared/0.5") for m in ("keydiff", "snapkv") for s in ("layer", "head")),
    }
    for one in report.comparisons:
        assert one.p <= one.p_holm <= 1
        assert (one.verdict == "undetermined") == (one.p_holm >= 0.05)
        a, b = (next(c for c in report.cells if c.variant == label) for label in (one.variant, one.against))
        assert one.difference.mean == pytest.approx(a.nll["true"].mean - b.nll["true"].mean)


def test_the_pilot_fixes_the_number_of_texts_and_is_not_measured_again(
    lm: CausalLM, tiny_model: tuple[Any, Any], tmp_path: Path
) -> None:
    edits = variants("keydiff", "streaming-llm")
    journal = tmp_path / "journal"
    report = measured(
        lm,
        tiny_model,
        edits,
        texts=None,
        pilot=4,
        half_width=0.2,
        max_texts=7,
        journal=journal,
        continuations=("true",),
    )
    (need,) = report.needed
    assert len(report.texts) == min(need.texts, 7)
    groups: dict[str, set[str]] = {"pilot": set(), "text": set()}
    for line in journal.read_text().splitlines():
        item = json.loads(line)
        if item.get("type") == "sample":
            groups[item["record"]["group"]].add(item["record"]["id"])
    assert len(groups["pilot"]) == 4
    assert not groups["pilot"] & groups["text"]


def test_an_interrupted_measurement_goes_on_where_it_stopped(
    lm: CausalLM, tiny_model: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edits = variants("keydiff", "random")
    whole = measured(lm, tiny_model, edits)
    passes = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == 5:
            raise KeyboardInterrupt
        return prefill(*args, **kwargs)

    monkeypatch.setattr(experiment, "prefill", counted)
    with pytest.raises(KeyboardInterrupt):
        measured(lm, tiny_model, edits, journal=tmp_path / "journal")
    report = measured(lm, tiny_model, edits, journal=tmp_path / "journal")
    assert passes == 5 + 6
    assert [cell.nll for cell in report.cells] == [cell.nll for cell in whole.cells]

    more = measured(lm, tiny_model, [*edits, *variants("knorm")], journal=tmp_path / "journal")
    assert passes == 5 + 6 + 10
    assert [cell.nll for cell in more.cells[:2]] == [cell.nll for cell in whole.cells]
    fewer = measured(lm, tiny_model, edits[:1], texts=3, journal=tmp_path / "journal")
    assert passes == 5 + 6 + 10
    assert all(list(record.edited) == ["keydiff/shared/0.5"] for record in fewer.texts)


def test_tasks_that_the_model_cannot_do_are_listed_and_not_edited(lm: CausalLM, tiny_model: tuple[Any, Any]) -> None:
    report = measured(
        lm, tiny_model, variants("keydiff"), texts=0, prompt_tokens=384, window=128, tasks=("haystack", "variables")
    )
    assert [task.group for task in report.tasks] == [
        f"{task}/{form}" for task in ("haystack", "variables") for form in ("after", "inside")
    ]
    for task in report.tasks:
        assert (task.counts, task.cells, task.accuracy.n) == (False, [], 3)
        assert all(not record.edited for record in task.records)


def test_tasks_that_count_are_compared(
    lm: CausalLM, tiny_model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "QUALIFIES", 0.0)
    report = measured(
        lm,
        tiny_model,
        variants("keydiff", "streaming-llm", "quantize"),
        texts=0,
        prompt_tokens=384,
        window=128,
        tasks=("haystack",),
    )
    for task in report.tasks:
        assert task.counts
        assert [cell.variant for cell in task.cells] == ["keydiff/shared/0.5", "streaming-llm/shared/0.5", "quantize"]
        for cell in task.cells:
            right = sum(record.edited[cell.variant].probes["answer"].exact for record in task.records)
            assert cell.accuracy is not None
            assert cell.accuracy.mean == right / 3
    assert {one.group for one in report.comparisons} == {"haystack/after", "haystack/inside"}


def test_what_cannot_edit_this_model_is_an_error_when_named_and_left_out_else(
    lm: CausalLM, tiny_model: tuple[Any, Any]
) -> None:
    (good,) = variants("keydiff")
    bad = Variant("broken", Broken(), 0.5, "shared")
    with pytest.raises(UsageError, match="does not work"):
        measured(lm, tiny_model, [good, bad], texts=1)
    report = measured(lm, tiny_model, [good, bad], texts=1, tolerant=True)
    assert [variant.label for variant in report.plan.variants] == [good.label]
    assert [(out.what, out.why) for out in report.left_out] == [("broken/shared", "it does not work")]


class Broken(Random):
    def edit(self, x: EditInput) -> Any:
        raise UsageError("it does not work")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"texts": None, "pilot": 1}, "pilot"),
        ({"prompt_tokens": 100}, "whole chunks"),
        ({"prompt_tokens": 8192}, "context"),
        ({"new_tokens": 3500}, "no text"),
    ],
)
def test_lengths_that_cannot_be(lm: CausalLM, tiny_model: tuple[Any, Any], changes: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        measured(lm, tiny_model, variants("keydiff"), **changes)


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    quality.add_arguments(parser)
    return parser.parse_args(arguments)


def small(tiny_model_path: Path, folder: Path, *more: str) -> argparse.Namespace:
    for document in made_up_corpus().documents:
        (folder / f"{document.name}.txt").write_text(document.text)
    return parsed(
        *("--model", str(tiny_model_path), "--corpus", str(folder), "--prompt-tokens", "128", "--new-tokens", "15"),
        *(
            "--chunk-size",
            "16",
            "--window",
            "16",
            "--texts",
            "10",
            "--tasks",
            "--json",
            str(folder / "out.json"),
            *more,
        ),
    )


def test_ten_texts_from_the_command_line(
    tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    quality.run(small(tiny_model_path, tmp_path, "--keep", "0.5", "--scope", "shared", "--scope", "head"))
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["schema"] == 1
    assert found["plan"]["texts"] == len(found["samples"]) == 10
    labels = [variant["label"] for variant in found["variants"]]
    assert {"snapkv/head/0.5", "random/shared/0.5", "quantize", "merge/head/0.5"} <= set(labels)
    assert [cell["variant"] for cell in found["results"]] == labels
    for cell in found["results"]:
        differences = [
            sample["edited"][cell["variant"]]["probes"]["true"]["nll"] - sample["full"]["true"]["nll"]
            for sample in found["samples"]
        ]
        assert cell["nll"]["true"]["mean"] == pytest.approx(math.fsum(differences) / 10)
    out = capsys.readouterr().out
    assert "streaming-llm/shared/0.5" in out
    assert "Left out: compose" in out


def test_the_baseline_is_found_under_both_spellings(tiny_model_path: Path, tmp_path: Path) -> None:
    edits = ("--editor", "streaming-llm", "--editor", "keydiff", "--keep", "0.5")
    quality.run(small(tiny_model_path, tmp_path, *edits, "--baseline", "streaming_llm"))
    found = json.loads((tmp_path / "out.json").read_text())
    assert {one["against"] for one in found["comparisons"]} == {"streaming-llm/shared/0.5"}


def test_the_command_line_goes_on_from_its_journal(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    options = small(tiny_model_path, tmp_path, "--keep", "0.5", "--editor", "keydiff")
    with monkeypatch.context() as patched:
        patched.setattr(experiment, "score", interrupt)
        with pytest.raises(KeyboardInterrupt):
            quality.run(options)
    assert "out.json.journal" in capsys.readouterr().err
    quality.run(options)
    with monkeypatch.context() as patched:
        patched.setattr(experiment, "score", interrupt)
        quality.run(options)


@pytest.mark.parametrize(
    "arguments",
    [["--keep", "1.5"], ["--keep", "0"], ["--texts", "-1"], ["--tasks", "nonsense"], ["--half-width", "0"]],
)
def test_wrong_arguments_do_not_parse(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(*arguments)


def test_results_that_cannot_be_written_are_found_first(tiny_model_path: Path, tmp_path: Path) -> None:
    options = small(tiny_model_path, tmp_path)
    options.json = JsonOutput(str(tmp_path / "missing" / "out.json"))
    with pytest.raises(UsageError, match="a folder that exists"):
        quality.run(options)


def test_a_plot_has_a_line_for_each_method_and_scope(lm: CausalLM, tiny_model: tuple[Any, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = measured(lm, tiny_model, variants("keydiff", "random", keeps=(0.5, 0.25), scopes=("shared", "head")))
    write_plot(report, tmp_path / "plot.svg")
    write_plot(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.svg").read_text().count("<!-- keydiff by head -->") == 1
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "out.json").write_text(to_json(report))
    assert json.loads((tmp_path / "out.json").read_text())["corpus"]["name"] == "made-up"


def test_tables_fit_a_narrow_terminal_and_cut_no_number(
    lm: CausalLM, tiny_model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = measured(lm, tiny_model, variants("keydiff", "random", keeps=(0.5,)))
    monkeypatch.setenv("COLUMNS", "60")
    show(report)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 60
    assert "…" not in out
