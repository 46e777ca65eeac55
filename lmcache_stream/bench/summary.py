"""What per-sample numbers say: differences with intervals, and which of them are settled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from lmcache_stream.bench.journal import Record
from lmcache_stream.bench.statistics import Interval, holm, mcnemar, mean_interval, samples_needed, wilson
from lmcache_stream.bench.variants import Variant

__all__ = [
    "QUALIFIES",
    "Cell",
    "Comparison",
    "Needed",
    "compare",
    "samples_for",
    "summarise",
]

QUALIFIES: Final = 0.6
"""Accuracy with all KV from which on a task counts."""

SETTLED: Final = 0.05

Verdict = Literal["better", "worse", "undetermined"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One variant on the texts, or on one task.

    Args:
        variant: The variant's label.
        group: "text", or task and form.
        kept: Mean share of tokens kept.
        nll: For each probe the paired difference of negative log-likelihood against all KV, in nats a token.
        agreement: For each probe the share of tokens where the likeliest one is that with all KV.
        accuracy: For tasks: answers that greedy decoding gets right.
        edit_s: Mean seconds of an edit.
        score_s: Mean seconds of all probes of a sample.
    """

    variant: str
    group: str
    kept: float
    nll: dict[str, Interval]
    agreement: dict[str, Interval]
    accuracy: Interval | None
    edit_s: float
    score_s: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two variants on the same samples.

    Args:
        family: "scopes" (a scope against "shared") or "editors" (an editor against the baseline): the family over
            which Holm's method holds the error.
        variant: Label of what is compared.
        against: Label of what it is compared with.
        group: "text", or task and form.
        measure: "nll" of a probe (lower is better) or "accuracy".
        difference: Of the measure, `variant` less `against`, paired.
        p: Two-sided, before Holm: paired t by document for "nll", McNemar's exact test for "accuracy".
        p_holm: After it.
        verdict: Whether `variant` is better or worse at a family-wise error of 0.05; else "undetermined".
    """

    family: str
    variant: str
    against: str
    group: str
    measure: str
    difference: Interval
    p: float
    p_holm: float
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Needed:
    """How many texts a comparison needs.

    Args:
        variant: Label of what is compared.
        against: What with; "all KV" for none.
        sd: Standard deviation of the paired difference in the pilot, in nats a token.
        texts: Texts for the half-width asked for.
    """

    variant: str
    against: str
    sd: float
    texts: int


def summarise(records: Sequence[Record], variants: Sequence[Variant], total: int) -> list[Cell]:
    """A cell for each variant on samples of one group; `total` is the tokens of a prompt."""
    return [_cell(records, variant, total) for variant in variants] if records else []


def compare(
    texts: Sequence[Record],
    tasks: Sequence[Sequence[Record]],
    variants: Sequence[Variant],
    *,
    probe: str,
    baseline: str | None,
) -> list[Comparison]:
    """Compare scopes with "shared" and editors with the baseline, on texts and on the tasks that count."""
    raw: list[tuple[str, Variant, Variant, str, str, Interval, float]] = []
    for family, variant, against in pairs(variants, baseline):
        if texts:
            difference = _difference(texts, variant, against, probe)
            raw.append((family, variant, against, "text", f"nll/{probe}", difference, difference.p))
        for records in tasks:
            exact = [(_exact(record, variant), _exact(record, against)) for record in records]
            difference = mean_interval([float(a) - float(b) for a, b in exact], [record.cluster for record in records])
            raw.append((family, variant, against, records[0].group, "accuracy", difference, mcnemar(exact)))
    found: list[Comparison] = []
    for family, items in itertools.groupby(sorted(raw, key=lambda item: item[0]), key=lambda item: item[0]):
        members = list(items)
        adjusted = holm([1.0 if math.isnan(item[6]) else item[6] for item in members])
        for (_, variant, against, group, measure, difference, p), p_holm in zip(members, adjusted, strict=True):
            found.append(
                Comparison(
                    family=family,
                    variant=variant.label,
                    against=against.label,
                    group=group,
                    measure=measure,
                    difference=difference,
                    p=p,
                    p_holm=p_holm,
                    verdict=_verdict(difference.mean, p_holm, lower_is_better=measure != "accuracy"),
                )
            )
    return found


def samples_for(
    pilot: Sequence[Record], variants: Sequence[Variant], *, probe: str, baseline: str | None, half_width: float
) -> list[Needed]:
    """Texts that each comparison needs, by the spread in a pilot; of each variant with all KV where there is none."""
    needed = []
    compared: list[tuple[Variant, Variant | None]] = [(one, other) for _, one, other in pairs(variants, baseline)]
    for variant, against in compared or [(variant, None) for variant in variants]:
        if against is None:
            sd = mean_interval(_against_full(pilot, variant, probe)).sd
        else:
            sd = _difference(pilot, variant, against, probe).sd
        label = "all KV" if against is None else against.label
        needed.append(Needed(variant=variant.label, against=label, sd=sd, texts=samples_needed(sd, half_width)))
    return needed


def pairs(variants: Sequence[Variant], baseline: str | None) -> Iterable[tuple[str, Variant, Variant]]:
    """What is compared with what: family, variant, and the one it is held against; nothing that keeps all KV."""
    dropping = [variant for variant in variants if variant.keep is not None and variant.keep != 1.0]
    shared = {(variant.method, variant.keep): variant for variant in dropping if variant.scope == "shared"}
    for variant in dropping:
        against = shared.get((variant.method, variant.keep))
        if against is not None and variant.scope != "shared":
            yield "scopes", variant, against
    for variant in dropping:
        against = shared.get((baseline, variant.keep)) if baseline is not None else None
        if against is not None and variant.method != baseline and variant.scope == "shared":
            yield "editors", variant, against


def _cell(records: Sequence[Record], variant: Variant, total: int) -> Cell:
    clusters = [record.cluster for record in records]
    edits = [record.edited[variant.label] for record in records]
    probes = list(records[0].full)
    exact = sum(edit.probes[probes[0]].exact for edit in edits)
    return Cell(
        variant=variant.label,
        group=records[0].group,
        kept=math.fsum(edit.kept for edit in edits) / len(edits) / total,
        nll={probe: mean_interval(_against_full(records, variant, probe), clusters) for probe in probes},
        agreement={
            probe: mean_interval([edit.probes[probe].agreement for edit in edits], clusters) for probe in probes
        },
        accuracy=wilson(exact, len(records)) if records[0].depth is not None else None,
        edit_s=math.fsum(edit.edit_s for edit in edits) / len(edits),
        score_s=math.fsum(edit.score_s for edit in edits) / len(edits),
    )


def _against_full(records: Sequence[Record], variant: Variant, probe: str) -> list[float]:
    return [record.edited[variant.label].probes[probe].nll - record.full[probe].nll for record in records]


def _difference(records: Sequence[Record], variant: Variant, against: Variant, probe: str) -> Interval:
    values = [
        record.edited[variant.label].probes[probe].nll - record.edited[against.label].probes[probe].nll
        for record in records
    ]
    return mean_interval(values, [record.cluster for record in records])


def _exact(record: Record, variant: Variant) -> bool:
    return next(iter(record.edited[variant.label].probes.values())).exact


def _verdict(difference: float, p: float, *, lower_is_better: bool) -> Verdict:
    if p >= SETTLED:
        return "undetermined"
    return "better" if (difference < 0) == lower_is_better else "worse"
