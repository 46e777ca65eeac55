"""Measures edits: one forward pass a sample, and a short one for each edit of its KV."""

from __future__ import annotations

import hashlib
import itertools
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from lmcache_stream import __version__
from lmcache_stream.bench.journal import Edited, Journal, Outcome, Record
from lmcache_stream.bench.scoring import Prefilled, Probe, Scores, continue_greedily, prefill, score
from lmcache_stream.bench.statistics import Interval, wilson
from lmcache_stream.bench.summary import (
    QUALIFIES,
    Cell,
    Comparison,
    Needed,
    compare,
    samples_for,
    summarise,
)
from lmcache_stream.bench.tasks import FORMS, TASKS, TaskMaker, TaskSample
from lmcache_stream.bench.texts import Corpus, TextSample, draw_texts, sentences
from lmcache_stream.bench.variants import LeftOut, Variant
from lmcache_stream.editors import EditInput
from lmcache_stream.errors import UsageError
from lmcache_stream.progress import PhaseProgress, watching

if TYPE_CHECKING:
    from lmcache_stream.engine.model import CausalLM
    from lmcache_stream.progress import ProgressOption

__all__ = ["CONTINUATIONS", "Plan", "Report", "TaskReport", "measure"]

CONTINUATIONS: Final = ("true", "greedy")
ANSWER: Final = "answer"
DRY_TOKENS: Final = 128


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured.

    Args:
        variants: The edits.
        texts: Texts; None: as many as the pilot says.
        pilot: Texts of the pilot, which count for nothing else.
        half_width: Half-width in nats of the 95 % interval of a paired difference that the pilot aims for.
        max_texts: Most texts, whatever the pilot says.
        tasks: Names of tasks, each in both forms.
        task_samples: Questions a task and form.
        continuations: "true": the text's own next tokens; "greedy": those that the model generates with all KV.
        prompt_tokens: Tokens whose KV is edited.
        new_tokens: Tokens after them that are scored.
        chunk_size: Tokens a cache chunk.
        window: Last tokens that no editor drops.
        baseline: Editor that others are compared with; None for no such comparison.
        seed: Of texts, tasks and random editors.
    """

    variants: Sequence[Variant]
    texts: int | None = 20
    pilot: int = 20
    half_width: float = 0.015
    max_texts: int = 600
    tasks: Sequence[str] = tuple(TASKS)
    task_samples: int = 20
    continuations: Sequence[str] = CONTINUATIONS
    prompt_tokens: int = 704
    new_tokens: int = 63
    chunk_size: int = 32
    window: int = 32
    baseline: str | None = "streaming-llm"
    seed: int = 0

    @property
    def main(self) -> str:
        """The continuation that comparisons are made on."""
        return self.continuations[0]

    @property
    def queries(self) -> bool:
        """Whether an editor needs the prompt's queries."""
        return any("queries" in variant.editor.needs for variant in self.variants)


@dataclass(frozen=True, kw_only=True)
class TaskReport:
    """One task in one form.

    Args:
        group: Task and form.
        accuracy: Answers that are right with all KV.
        counts: Whether they are enough for the task to count; edits are measured only then.
        records: Its samples.
        cells: What each variant did.
    """

    group: str
    accuracy: Interval
    counts: bool
    records: list[Record]
    cells: list[Cell]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a measurement found.

    Args:
        plan: What was asked for.
        conditions: Model, texts and versions that the numbers depend on.
        corpus: What the texts are.
        left_out: What was not measured, and why.
        needed: What the pilot said; empty without a pilot.
        texts: The samples of text.
        cells: What each variant did to them.
        tasks: The tasks, those that do not count included.
        comparisons: Scopes and editors held against each other.
    """

    plan: Plan
    conditions: dict[str, str]
    corpus: Corpus
    left_out: list[LeftOut]
    needed: list[Needed]
    texts: list[Record]
    cells: list[Cell]
    tasks: list[TaskReport]
    comparisons: list[Comparison]


def measure(
    lm: CausalLM,
    tokenizer: Any,
    corpus: Corpus,
    plan: Plan,
    *,
    journal: Path | None = None,
    left_out: Sequence[LeftOut] = (),
    tolerant: bool = False,
    progress: ProgressOption = False,
) -> Report:
    """Measure all variants of a plan: one forward pass a sample, an edit and a short pass for each variant.

    Args:
        lm: The model; it must record queries where `plan.queries`.
        tokenizer: Its tokenizer.
        corpus: Texts, and the prose that facts are hidden in.
        plan: What to measure.
        journal: File to keep what was measured in, and to go on from.
        left_out: What was left out already, for the report.
        tolerant: Whether editors that cannot edit this model's KV are left out rather than an error.
        progress: As for a batch.

    Raises:
        UsageError: An editor cannot edit this KV, the corpus or the context is too short, or the journal is of another
            measurement.
    """
    plan, unusable = _usable(lm, plan, tolerant)
    _check_lengths(lm, plan)
    conditions = _conditions(lm, corpus, plan)
    with Journal(journal, conditions) as kept:
        for variant in plan.variants:
            kept.define(variant.label, variant.definition)
        measurer = _Measurer(lm, plan, kept, len(corpus.documents) > 1, progress)
        samples = draw_texts(corpus, tokenizer, plan.prompt_tokens + 1 + plan.new_tokens, plan.seed)
        needed: list[Needed] = []
        count = plan.texts
        if count is None:
            pilot = measurer.texts("pilot", list(itertools.islice(samples, plan.pilot)))
            if len(pilot) < 2:
                raise UsageError("a pilot needs at least two texts: give more with --pilot, or a larger --corpus")
            needed = samples_for(
                pilot, plan.variants, probe=plan.main, baseline=plan.baseline, half_width=plan.half_width
            )
            count = min(max((need.texts for need in needed), default=0), plan.max_texts)
        texts = measurer.texts("text", list(itertools.islice(samples, count)))
        tasks = measurer.tasks(tokenizer, corpus) if plan.tasks else []
    return Report(
        plan=plan,
        conditions=conditions,
        corpus=corpus,
        left_out=[*left_out, *unusable],
        needed=needed,
        texts=texts,
        cells=summarise(texts, plan.variants, plan.prompt_tokens),
        tasks=tasks,
        comparisons=compare(
            texts,
            [task.records for task in tasks if task.counts],
            plan.variants,
            probe=plan.main,
            baseline=plan.baseline,
        ),
    )


class _Measurer:
    """Fills the journal with the records that a plan asks for."""

    def __init__(self, lm: CausalLM, plan: Plan, journal: Journal, by_document: bool, progress: ProgressOption) -> None:
        self._lm = lm
        self._by_document = by_document
        self._plan = plan
        self._journal = journal
        self._progress = progress

    def texts(self, group: str, samples: Sequence[TextSample]) -> list[Record]:
        if not samples and self._plan.texts != 0:
            raise UsageError(
                f"the corpus holds no text of {self._plan.prompt_tokens + 1 + self._plan.new_tokens} tokens:"
                " name a larger --corpus, or fewer --prompt-tokens"
            )
        records = []
        for sample in self._watched(group, samples):
            if self._missing(group, sample.id, self._plan.variants):
                self._journal.add(self._text(group, sample))
            records.append(self._record(group, sample.id))
        return records

    def tasks(self, tokenizer: Any, corpus: Corpus) -> list[TaskReport]:
        plan = self._plan
        prose = sentences(corpus, plan.seed)
        maker = TaskMaker(tokenizer, prose, length=plan.prompt_tokens, window=plan.window, seed=plan.seed)
        reports = []
        for task, form in itertools.product(plan.tasks, FORMS):
            samples = [maker.make(task, form, index) for index in range(plan.task_samples)]
            group = samples[0].group
            records = self._questions(f"{group}, all KV", samples, [])
            right = sum(record.full[ANSWER].exact for record in records)
            counts = right >= QUALIFIES * len(records)
            if counts:
                records = self._questions(group, samples, plan.variants)
            reports.append(
                TaskReport(
                    group=group,
                    accuracy=wilson(right, len(records)),
                    counts=counts,
                    records=records,
                    cells=summarise(records, plan.variants, plan.prompt_tokens) if counts else [],
                )
            )
        return reports

    def _questions(self, phase: str, samples: Sequence[TaskSample], variants: Sequence[Variant]) -> list[Record]:
        records = []
        for sample in self._watched(phase, samples):
            if self._missing(sample.group, sample.id, variants):
                self._journal.add(self._question(sample, variants))
            records.append(self._record(sample.group, sample.id))
        return records

    def _text(self, group: str, sample: TextSample) -> Record:
        count = self._plan.prompt_tokens
        started = time.perf_counter()
        prefilled = prefill(self._lm, sample.tokens[:count], queries=self._plan.queries)
        prefill_s = time.perf_counter() - started
        probes = {}
        if "true" in self._plan.continuations:
            probes["true"] = Probe.of(sample.tokens[count : count + 1], sample.tokens[count + 1 :])
        if "greedy" in self._plan.continuations:
            tokens = continue_greedily(self._lm, prefilled, self._plan.new_tokens + 1)
            probes["greedy"] = Probe.of(tokens[:1], tokens[1:])
        return self._measured(
            group, sample.id, sample.document, None, prefilled, prefill_s, probes, self._plan.variants
        )

    def _question(self, sample: TaskSample, variants: Sequence[Variant]) -> Record:
        started = time.perf_counter()
        prefilled = prefill(self._lm, sample.cached, queries=self._plan.queries)
        prefill_s = time.perf_counter() - started
        probes = {ANSWER: Probe.of(sample.fed, sample.answer)}
        return self._measured(sample.group, sample.id, sample.id, sample.depth, prefilled, prefill_s, probes, variants)

    def _measured(
        self,
        group: str,
        id: str,
        cluster: str,
        depth: float | None,
        prefilled: Prefilled,
        prefill_s: float,
        probes: dict[str, Probe],
        variants: Sequence[Variant],
    ) -> Record:
        known = self._journal.get(group, id)
        full = {name: score(self._lm, prefilled.kv, probe) for name, probe in probes.items()}
        edited = dict(known.edited) if known is not None else {}
        for variant in variants:
            if variant.label not in edited:
                edited[variant.label] = self._edited(variant, prefilled, probes, full)
        return Record(
            group=group,
            id=id,
            cluster=cluster,
            depth=depth,
            prefill_s=round(prefill_s, 4),
            full={name: _outcome(scores, scores, probes[name]) for name, scores in full.items()},
            edited=edited,
        )

    def _edited(
        self, variant: Variant, prefilled: Prefilled, probes: dict[str, Probe], full: dict[str, Scores]
    ) -> Edited:
        started = time.perf_counter()
        edit = prefilled.edit(variant.editor, self._plan.chunk_size)
        edited = time.perf_counter()
        outcomes = {
            name: _outcome(score(self._lm, edit.kv, probe), full[name], probe) for name, probe in probes.items()
        }
        return Edited(
            kept=len(edit.tokens),
            edit_s=round(edited - started, 4),
            score_s=round(time.perf_counter() - edited, 4),
            probes=outcomes,
        )

    def _missing(self, group: str, id: str, variants: Sequence[Variant]) -> bool:
        known = self._journal.get(group, id)
        return known is None or any(variant.label not in known.edited for variant in variants)

    def _record(self, group: str, id: str) -> Record:
        """What the journal has about a sample, less variants of other plans."""
        record = self._journal.get(group, id)
        assert record is not None
        mine = {v.label: record.edited[v.label] for v in self._plan.variants if v.label in record.edited}
        return msgspec.structs.replace(record, edited=mine)

    def _watched(self, phase: str, samples: Sequence[Any]) -> Iterator[Any]:
        with watching(self._progress, phase, len(samples)) as show:
            for done, sample in enumerate(samples):
                show(PhaseProgress(phase, len(samples), done))
                yield sample
            show(PhaseProgress(phase, len(samples), len(samples)))


def _outcome(scores: Scores, full: Scores, probe: Probe) -> Outcome:
    targets = torch.tensor(probe.targets)
    return Outcome(
        nll=round(float(scores.nll.double().mean()), 6),
        agreement=round(float((scores.top == full.top).double().mean()), 6),
        exact=bool((scores.top == targets).all()),
    )


def _usable(lm: CausalLM, plan: Plan, tolerant: bool) -> tuple[Plan, list[LeftOut]]:
    """Let each method edit once, on noise: what cannot work is found before the work begins."""
    geometry = lm.geometry
    count = min(plan.prompt_tokens, DRY_TOKENS)
    noise = torch.Generator().manual_seed(plan.seed)
    kv = torch.randn(2, geometry.num_layers, count, geometry.hidden_dim, generator=noise)
    width = (geometry.num_heads or geometry.num_kv_heads) * geometry.head_dim
    queries = torch.randn(1, geometry.num_layers, count, width, generator=noise) if plan.queries else None
    x = EditInput(kv=kv, tokens=tuple(range(count)), geometry=geometry, chunk_size=plan.chunk_size, queries=queries)
    usable: list[Variant] = []
    left_out: list[LeftOut] = []
    tried: dict[tuple[str, str | None], str | None] = {}
    for variant in plan.variants:
        key = variant.method, variant.scope
        if key not in tried:
            try:
                variant.editor.edit(x)
                tried[key] = None
            except UsageError as error:
                if not tolerant:
                    raise
                tried[key] = str(error)
                left_out.append(LeftOut("/".join(filter(None, key)), str(error)))
        if tried[key] is None:
            usable.append(variant)
    return replace(plan, variants=usable), left_out


def _check_lengths(lm: CausalLM, plan: Plan) -> None:
    if plan.prompt_tokens % plan.chunk_size:
        raise UsageError(
            f"{plan.prompt_tokens} prompt tokens are not whole chunks of {plan.chunk_size}, and only those are stored:"
            f" take {max(plan.prompt_tokens // plan.chunk_size, 1) * plan.chunk_size}"
        )
    total = plan.prompt_tokens + plan.new_tokens + 1
    if total > lm.max_model_len:
        raise UsageError(
            f"the context of this model is {lm.max_model_len} tokens and {total} are needed: give fewer --prompt-tokens"
        )


def _conditions(lm: CausalLM, corpus: Corpus, plan: Plan) -> dict[str, str]:
    """What per-sample numbers depend on, apart from the variants."""
    return {
        "model": Path(lm.model.config._name_or_path).name or lm.name,
        "weights": _fingerprint(lm.model),
        "dtype": str(lm.geometry.dtype).removeprefix("torch."),
        "corpus": f"{corpus.name} {corpus.sha256[:16]}",
        "tokens": f"{plan.prompt_tokens} + {plan.new_tokens}, chunks of {plan.chunk_size}, window {plan.window}",
        "continuations": " ".join(plan.continuations),
        "seed": str(plan.seed),
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
        "lmcache-stream": __version__,
        "python": platform.python_version(),
    }


def _fingerprint(model: Any) -> str:
    """Tells models apart: the configuration, and some of each weight."""
    digest = hashlib.sha256(model.config.to_json_string().encode())
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            digest.update(name.encode())
            digest.update(parameter.flatten()[:256].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
