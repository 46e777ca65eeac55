"""Our editors beside kvpress: do they keep the same tokens, and does the model go on as well?

The same model, float32, texts, budgets and parameters. Each text is prefilled once; from that pass both select, each
layer and KV head for itself, and the next tokens of the text are scored after what either kept.

- kept sets: Jaccard index of the positions kept, for each layer and head. `same rule`: kvpress's scores under our rule
  for equal scores (the earlier token first; torch's topk, which kvpress calls, has no rule).
- NLL: of the next 63 tokens, each with positions as it has them by default: ours re-rotates keys to `0 .. n-1` and goes
  on at `n`; kvpress leaves them where they were and goes on at the prompt's length. On the first `--crossed` texts also
  both without re-rotation and both with it (kvpress's `KeyRerotationPress`).

`h2o` has no equal in kvpress: `ObservedAttentionPress` takes the mean of the attention over the queries that can see a
token, and has no recent window. `h2o as observed` is our H2O with these two changed. `random` draws for each by itself,
`random, same draw` takes kvpress's draw for both, so that only positions differ.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from common import machine, rounded
from kvpress_side import Pressed, eager_attention, import_kvpress, pressing, pruned_cache, ratio_that_keeps
from rich.console import Console
from rich.table import Table

from lmcache_stream import editors
from lmcache_stream.bench.scoring import Prefilled, Probe, prefill, score
from lmcache_stream.bench.statistics import Interval, mean_interval
from lmcache_stream.bench.texts import TextSample, draw_texts, load_corpus
from lmcache_stream.editors import H2O, EditInput, ExpectedAttention, QueryStatistics, Random, TokenDropping
from lmcache_stream.editors.base import Layer
from lmcache_stream.engine import ensure_smollm2
from lmcache_stream.engine.model import CausalLM, load_model, load_tokenizer

CHUNK = 32
PROMPT_TOKENS = 640
NEW_TOKENS = 63
KEEPS = (0.5, 0.25, 0.1)
JACCARD_GOAL = 0.95
NLL_GOAL = 0.02
DEFAULT_TEXTS = 40


@dataclass(frozen=True, kw_only=True)
class ObservedAttention(H2O):
    """H2O's scores as kvpress's `ObservedAttentionPress` has them: the mean over the queries that can see a token."""

    recent: float = 0.0

    def score_layer(self, layer: Layer, budget: int) -> torch.Tensor:
        """The sum over all queries, divided by their number."""
        total = layer.keys.shape[1]
        return super().score_layer(layer, budget) / torch.arange(total, 0, -1, device=layer.keys.device)


@dataclass(frozen=True, kw_only=True)
class Given(TokenDropping):
    """Keeps the tokens that rank highest in given `[L, H, T]` scores."""

    scores: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def score(self, x: EditInput, budget: int) -> torch.Tensor:
        """What is given."""
        return self.scores


@dataclass(frozen=True, eq=False)
class Pair:
    """A method that both have.

    Args:
        name: What it is called.
        editor: Ours; filled in are `keep`, the press's scores where it is `Given`, and statistics of the text's queries
            where it needs them, which kvpress measures on the text, too.
        press: Name of kvpress's class.
        parameters: What the press takes, so that both mean the same.
        same: Whether both define the same kept set, up to rounding.
        eager: Whether the press needs attention weights.
    """

    name: str
    editor: TokenDropping
    press: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    same: bool = True
    eager: bool = False


UNMEASURED = QueryStatistics(mean=torch.zeros(1, 1, 1), covariance=torch.zeros(1, 1, 1, 1))


def all_pairs() -> list[Pair]:
    return [
        Pair("streaming-llm", dropping("streaming-llm", sinks=4), "StreamingLLMPress", {"n_sink": 4}),
        Pair("knorm", dropping("knorm"), "KnormPress"),
        Pair("keydiff", dropping("keydiff"), "KeyDiffPress"),
        # Sinks and the last, unrated tokens, up to twice the lag, must fit into the smallest budget.
        Pair("lagkv", dropping("lagkv", sinks=4, lag=16), "LagKVPress", {"n_sink": 4, "lag_size": 16}),
        Pair(
            "snapkv",
            dropping("snapkv", window=32, kernel_size=5),
            "SnapKVPress",
            {"window_size": 32, "kernel_size": 5},
        ),
        Pair("tova", dropping("tova"), "TOVAPress"),
        Pair(
            "expected-attention",
            dropping("expected-attention", sinks=4, n_future=512, statistics=UNMEASURED),
            "ExpectedAttentionPress",
            {"n_sink": 4, "n_future_positions": 512},
        ),
        Pair("h2o", dropping("h2o"), "ObservedAttentionPress", same=False, eager=True),
        Pair("h2o as observed", ObservedAttention(scope="head"), "ObservedAttentionPress", eager=True),
        Pair("random", dropping("random"), "RandomPress", same=False),
        Pair("random, same draw", Given(scope="head"), "RandomPress"),
    ]


def dropping(name: str, **parameters: Any) -> TokenDropping:
    scope = "shared" if name == "streaming-llm" else "head"
    editor = editors.get(name, scope=scope, **parameters)
    assert isinstance(editor, TokenDropping)
    return editor


# Kept sets.


def jaccard(ours: torch.Tensor, theirs: torch.Tensor, total: int) -> torch.Tensor:
    """The share of positions in either set that are in both: `[L, H, n]` twice -> float32 `[L, H]`."""
    a, b = (torch.zeros(*kept.shape[:2], total, dtype=torch.bool).scatter_(2, kept, True) for kept in (ours, theirs))
    return (a & b).sum(-1) / (a | b).sum(-1)


def best_of(scores: torch.Tensor, budget: int) -> torch.Tensor:
    """Positions of the `budget` best of `[L, H, T]`; of equal scores, the earlier token."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :budget]


def by_head(kept: torch.Tensor, layers: int, heads: int) -> torch.Tensor:
    """`[n]`, `[L, n]` or `[L, H, n]` -> `[L, H, n]`."""
    if kept.dim() == 2:
        kept = kept.unsqueeze(1)
    return kept.expand(layers, heads, -1)


# Measuring.


Pressing = tuple[str, float]
"""A press by name, and the ratio that it keeps."""


@dataclass(frozen=True)
class Case:
    """A pair at a budget."""

    pair: Pair
    keep: float

    @property
    def label(self) -> str:
        """Method and ratio."""
        return f"{self.pair.name} {self.keep:g}"

    @property
    def pressing(self) -> Pressing:
        """What kvpress has to do for it; two of our editors may stand beside one press."""
        return self.pair.press, self.keep


@dataclass(frozen=True)
class Found:
    """What one text gave for a case.

    Args:
        document: What the text was taken from.
        jaccard: By layer and head.
        same_rule: The same, with equal scores resolved by our rule.
        nll: Mean over the tokens, by "full", "ours" and "kvpress".
        crossed: By "ours original", "ours rerotated", "kvpress original" and "kvpress rerotated"; None where it was
            not asked for.
    """

    document: str
    jaccard: list[list[float]]
    same_rule: list[list[float]]
    nll: dict[str, float]
    crossed: dict[str, float] | None = None


def measure_text(
    lm: CausalLM, sample: TextSample, cases: Sequence[Case], seed: int, *, crossed: bool, check: bool
) -> Iterator[tuple[Case, Found]]:
    """Let both select and prune, and score what follows; with `check`, also that kvpress by itself prunes so."""
    tokens, rest = sample.tokens[:PROMPT_TOKENS], sample.tokens[PROMPT_TOKENS:]
    probe = Probe.of(rest[:1], rest[1:])
    prefilled, pressed = both_select(lm, tokens, cases)
    if check:
        check_against_kvpress(lm, tokens, cases, pressed)
    assert prefilled.queries is not None
    statistics = QueryStatistics.measure(prefilled.queries, prefilled.geometry, skip=4)
    full = mean_nll(lm, prefilled.kv, probe)
    pressed_nll = {
        key: mean_nll(lm, theirs.kv(rerotated=False), probe, PROMPT_TOKENS) for key, theirs in pressed.items()
    }
    for case in cases:
        theirs = pressed[case.pressing]
        editor = ours_of(case, theirs, statistics, seed)
        edit = prefilled.edit(editor, CHUNK)
        assert edit.kept_positions is not None
        kept = by_head(edit.kept_positions, prefilled.geometry.num_layers, prefilled.geometry.num_kv_heads)
        ruled = best_of(torch.stack(theirs.scores), kept.shape[-1])
        nll = {"full": full, "ours": mean_nll(lm, edit.kv, probe), "kvpress": pressed_nll[case.pressing]}
        other = None
        if crossed:
            unmoved = prefilled.edit(replace(editor, rerotate=False), CHUNK)
            other = {
                "ours original": mean_nll(lm, unmoved.kv, probe, PROMPT_TOKENS),
                "ours rerotated": nll["ours"],
                "kvpress original": nll["kvpress"],
                "kvpress rerotated": mean_nll(lm, theirs.kv(rerotated=True), probe),
            }
        yield (
            case,
            Found(
                document=sample.document,
                jaccard=jaccard(kept, torch.stack(theirs.kept), PROMPT_TOKENS).tolist(),
                same_rule=jaccard(kept, ruled, PROMPT_TOKENS).tolist(),
                nll=nll,
                crossed=other,
            ),
        )


def both_select(
    lm: CausalLM, tokens: Sequence[int], cases: Iterable[Case]
) -> tuple[Prefilled, dict[Pressing, Pressed]]:
    """One pass for ours and most presses, another for those that need attention weights."""
    presses: dict[bool, dict[Pressing, Any]] = {False: {}, True: {}}
    for case in cases:
        presses[case.pair.eager][case.pressing] = press_of(case)
    with pressing(lm.model, presses[False]) as pressed:
        prefilled = prefill(lm, tokens, queries=True)
    with eager_attention(lm.model), pressing(lm.model, presses[True]) as weighed:
        if weighed:
            prefill(lm, tokens, queries=False)
    return prefilled, {**pressed, **weighed}


def press_of(case: Case) -> Any:
    ratio = ratio_that_keeps(budget_of(case), PROMPT_TOKENS)
    return getattr(import_kvpress(), case.pair.press)(compression_ratio=ratio, **case.pair.parameters)


def ours_of(case: Case, theirs: Pressed, statistics: QueryStatistics, seed: int) -> TokenDropping:
    editor = replace(case.pair.editor, keep=case.keep)
    if isinstance(editor, Given):
        return replace(editor, scores=torch.stack(theirs.scores))
    if isinstance(editor, ExpectedAttention):
        return replace(editor, statistics=statistics)
    return replace(editor, seed=seed) if isinstance(editor, Random) else editor


def budget_of(case: Case) -> int:
    editor = case.pair.editor
    return replace(editor, keep=case.keep).budget(PROMPT_TOKENS, CHUNK, editor.sinks + editor.window)


def mean_nll(lm: CausalLM, kv: torch.Tensor, probe: Probe, position: int | None = None) -> float:
    return float(score(lm, kv, probe, position=position).nll.double().mean())


def check_against_kvpress(
    lm: CausalLM, tokens: Sequence[int], cases: Iterable[Case], pressed: Mapping[Pressing, Pressed]
) -> None:
    """Let kvpress prune as its users let it, and compare the caches. Random presses draw anew each time."""
    for case in {case.pressing: case for case in cases}.values():
        if case.keep != KEEPS[0] or case.pair.press == "RandomPress":
            continue
        with eager_attention(lm.model) if case.pair.eager else contextlib.nullcontext():
            cache = pruned_cache(lm.model, tokens, press_of(case))
        found = pressed[case.pressing]
        for layer, (keys, values) in enumerate(cache):
            torch.testing.assert_close(found.keys[layer], keys, rtol=0, atol=0)
            torch.testing.assert_close(found.values[layer], values, rtol=0, atol=0)


@dataclass(frozen=True)
class Journal:
    """What was measured, text by text, so that the same command goes on after an interruption.

    Args:
        path: A file of JSON lines; None keeps nothing.
        conditions: What the numbers depend on, apart from text and case.
    """

    path: Path | None
    conditions: Mapping[str, Any]

    def read(self) -> dict[tuple[str, str], Found]:
        """By text and case.

        Raises:
            SystemExit: It is of other conditions.
        """
        if self.path is None or not self.path.exists():
            return {}
        found: dict[tuple[str, str], Found] = {}
        for line in self.path.read_text("utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # the last line of a run that was killed
                entry = json.loads(line)
                if entry["conditions"] != self.conditions:
                    raise SystemExit(f"{self.path} holds measurements under other conditions: remove it")
                found |= {(entry["text"], case): Found(**values) for case, values in entry["cases"].items()}
        return found

    def add(self, text: str, found: Mapping[str, Found]) -> None:
        """Append the cases of one text."""
        if self.path is None:
            return
        cases = {case: asdict(values) for case, values in found.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"conditions": self.conditions, "text": text, "cases": cases}) + "\n")


# Reporting.


@dataclass(frozen=True)
class Row:
    """What is said of a case: Jaccard indices and nats; intervals are paired and of 95 %.

    Attributes:
        jaccard: Mean over texts, layers and heads.
        lowest_head: The lowest layer and head's mean over texts.
        lowest: The lowest of any text, layer and head.
        same_rule: Mean, with equal scores resolved by our rule.
        same_rule_lowest_head: Of these, the lowest layer and head's mean over texts.
        kept_sets: "agree" where `lowest_head` reaches the goal, "agree but for ties" where `same_rule_lowest_head`
            does, else "differ"; "differ by design" where the methods are not the same.
        full: NLL with all KV.
        ours: NLL with what ours kept.
        kvpress: NLL with what kvpress kept.
        difference: Ours less kvpress.
        nll: "no worse" where the upper limit of the difference stays below the goal, "worse" where the lower one
            does not either, else "open".
        original: Ours less kvpress, both with original positions; None without such texts.
        rerotated: Ours less kvpress, both re-rotated; None without such texts.
    """

    method: str
    keep: float
    press: str
    jaccard: float
    lowest_head: float
    lowest: float
    same_rule: float
    same_rule_lowest_head: float
    kept_sets: str
    full: float
    ours: float
    kvpress: float
    difference: Interval
    nll: str
    original: Interval | None
    rerotated: Interval | None


def row_of(case: Case, found: Sequence[Found]) -> Row:
    kept, ruled = (torch.tensor([getattr(each, name) for each in found]) for name in ("jaccard", "same_rule"))
    lowest_head, ruled_lowest_head = (float(each.mean(0).min()) for each in (kept, ruled))
    documents = [each.document for each in found]
    nll = {name: [each.nll[name] for each in found] for name in ("full", "ours", "kvpress")}
    difference = paired(nll["ours"], nll["kvpress"], documents)
    return Row(
        method=case.pair.name,
        keep=case.keep,
        press=case.pair.press,
        jaccard=float(kept.mean()),
        lowest_head=lowest_head,
        lowest=float(kept.min()),
        same_rule=float(ruled.mean()),
        same_rule_lowest_head=ruled_lowest_head,
        kept_sets=kept_sets(lowest_head, ruled_lowest_head, same=case.pair.same),
        full=mean(nll["full"]),
        ours=mean(nll["ours"]),
        kvpress=mean(nll["kvpress"]),
        difference=difference,
        nll=nll_verdict(difference),
        original=crossed_difference(found, "original"),
        rerotated=crossed_difference(found, "rerotated"),
    )


def crossed_difference(found: Sequence[Found], positions: str) -> Interval | None:
    crossed = [(each.document, each.crossed) for each in found if each.crossed is not None]
    if not crossed:
        return None
    ours, theirs = ([nll[f"{whose} {positions}"] for _, nll in crossed] for whose in ("ours", "kvpress"))
    return paired(ours, theirs, [document for document, _ in crossed])


def kept_sets(lowest_head: float, ruled_lowest_head: float, *, same: bool) -> str:
    """See `Row.kept_sets`."""
    if not same:
        return "differ by design"
    if lowest_head >= JACCARD_GOAL:
        return "agree"
    return "agree but for ties" if ruled_lowest_head >= JACCARD_GOAL else "differ"


def nll_verdict(difference: Interval) -> str:
    """See `Row.nll`."""
    if difference.high < NLL_GOAL:
        return "no worse"
    return "worse" if difference.low >= NLL_GOAL else "open"


def paired(ours: Sequence[float], theirs: Sequence[float], documents: Sequence[str]) -> Interval:
    """The mean difference; texts of one document may depend on each other."""
    return mean_interval([a - b for a, b in zip(ours, theirs, strict=True)], documents)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def show(rows: Sequence[Row], notes: Sequence[str]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
    table = Table(title="Our editors beside kvpress", title_justify="left", title_style="bold")
    for name in ("method", "kept"):
        table.add_column(name)
    for name in ("Jaccard", "same rule", "all KV", "ours", "kvpress", "ours - kvpress", "original", "re-rotated"):
        table.add_column(name, justify="right")
    for name in ("kept sets", "NLL"):
        table.add_column(name)
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
    for note in notes:
        console.print(note, markup=False)


def cells(row: Row) -> list[str]:
    return [
        row.method,
        f"{row.keep:g}",
        f"{row.jaccard:.3f} / {row.lowest_head:.3f}",
        f"{row.same_rule:.3f} / {row.same_rule_lowest_head:.3f}",
        f"{row.full:.3f}",
        f"{row.ours:.3f}",
        f"{row.kvpress:.3f}",
        interval_cell(row.difference),
        interval_cell(row.original),
        interval_cell(row.rerotated),
        row.kept_sets,
        row.nll,
    ]


def interval_cell(interval: Interval | None) -> str:
    if interval is None:
        return ""
    return f"{interval.mean:+.4f} ± {interval.half_width:.4f}"


def is_known(found: Found | None, *, crossed: bool) -> bool:
    return found is not None and (found.crossed is not None or not crossed)


def summary(
    rows: Sequence[Row], options: argparse.Namespace, conditions: Mapping[str, Any], texts: int
) -> dict[str, Any]:
    packages = ("kvpress", "transformers", "torch", "lmcache-stream")
    return {
        "texts": texts,
        "crossed_texts": min(options.crossed, texts),
        **conditions,
        "tokens": f"{PROMPT_TOKENS} + {NEW_TOKENS}, chunks of {CHUNK}",
        "goals": {"jaccard": JACCARD_GOAL, "nll_upper_limit": NLL_GOAL},
        "kept_sets": by_verdict((row.kept_sets, row) for row in rows),
        "nll": by_verdict((row.nll, row) for row in rows),
        "rows": [plain(rounded(asdict(row), 5)) for row in rows],
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "machine": machine(),
        "command": shlex.join(["python", *sys.argv]),
    }


def by_verdict(judged: Iterable[tuple[str, Row]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for verdict, row in judged:
        found[verdict].append(f"{row.method} {row.keep:g}")
    return dict(found)


def plain(value: Any) -> Any:
    """`value` with null for every NaN, which JSON lacks."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def chosen(pairs: Sequence[Pair], names: Sequence[str] | None) -> Iterator[Pair]:
    unknown = set(names or ()) - {pair.name for pair in pairs}
    if unknown:
        raise SystemExit(f"no method {', '.join(sorted(unknown))}: choose from {', '.join(p.name for p in pairs)}")
    yield from (pair for pair in pairs if not names or pair.name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--texts", type=int, default=DEFAULT_TEXTS, help=f"texts to measure on ({DEFAULT_TEXTS})")
    parser.add_argument("--crossed", type=int, default=5, help="texts that are scored with other positions, too (5)")
    parser.add_argument("--only", nargs="*", metavar="METHOD", help="these methods only")
    parser.add_argument("--model", type=Path, help="folder of a Llama-like model (SmolLM2-135M-Instruct)")
    parser.add_argument("--corpus", default="speeches", help="speeches, python, or .txt files (speeches)")
    parser.add_argument("--seed", type=int, default=0, help="seed of texts and random kept sets (0)")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="PATH",
        help="write the last line to this file, too; the same command goes on after an interruption",
    )
    options = parser.parse_args()
    import_kvpress()

    started = time.monotonic()
    cases = [Case(pair, keep) for pair in chosen(all_pairs(), options.only) for keep in KEEPS]
    folder = options.model or ensure_smollm2()
    corpus = load_corpus(options.corpus)
    conditions = {"model": Path(folder).name, "corpus": f"{corpus.name} {corpus.sha256[:16]}", "seed": options.seed}
    journal = Journal(options.json and options.json.with_name(options.json.name + ".journal"), conditions)
    known = journal.read()
    lm = CausalLM(load_model(folder, torch.float32), chunk_size=CHUNK, queries=True)
    try:
        texts = draw_texts(corpus, load_tokenizer(folder), PROMPT_TOKENS + 1 + NEW_TOKENS, options.seed)
        samples = list(islice(texts, options.texts))
        for index, sample in enumerate(samples):
            crossed = index < options.crossed
            missing = [case for case in cases if not is_known(known.get((sample.id, case.label)), crossed=crossed)]
            if missing:
                torch.manual_seed(options.seed * 100_000 + index)  # kvpress's random press draws from it
                measured = measure_text(lm, sample, missing, options.seed, crossed=crossed, check=index == 0)
                found = {case.label: values for case, values in measured}
                journal.add(sample.id, found)
                known |= {(sample.id, label): values for label, values in found.items()}
            sys.stderr.write(f"{index + 1} of {len(samples)} texts, {time.monotonic() - started:.0f} s\n")
    finally:
        lm.close()
    rows = [row_of(case, [known[sample.id, case.label] for sample in samples]) for case in cases]
    result = summary(rows, options, conditions, len(samples))
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    notes = [
        f"{result['texts']} texts of {result['tokens']}; each layer and head keeps its own. {versions}.",
        "Jaccard: mean / lowest layer and head's mean. NLL in nats a token, differences paired, ± half of the 95 % "
        f"interval. original, re-rotated: where both do the same with positions, {result['crossed_texts']} texts.",
        f"Goals: the lowest layer and head's Jaccard at least {JACCARD_GOAL}; the upper limit of ours - kvpress below "
        f"{NLL_GOAL}.",
    ]
    show(rows, notes)
    line = json.dumps(result)
    if options.json is not None:
        options.json.write_text(line + "\n")
    print(line, flush=True)


if __name__ == "__main__":
    main()
