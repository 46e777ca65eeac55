"""How long editors take on 8,000 tokens at Qwen3-8B's geometry, beside plain copies and plain formulations.

Keys are a shared direction and noise, so that a good share of them is similar, as in real models. Everything is
bfloat16 on the CPU, with the threads that torch takes by itself.

- `copy`: the kept half copied twice into memory that is there already; `fresh`: the same into new memory, which an
  editor's result is, too, unless its input is spent.
- `spent`: the edit as `modify_kv` asks for it, of KV that nobody looks at afterwards: the result takes its place.
- `plain`: the same edit in the steps of LMCache's token-dropping notebooks, all in float32: layer by layer, keys and
  queries converted whole, attention with an added mask, similarities in blocks of 1,024 rows by all columns; then the
  kept tokens indexed and cloned, and each layer's keys turned back to position 0 and on to the new one. Its result is
  checked against the editor's.
- memory: the most resident memory that the process had meanwhile, sampled every two milliseconds, less what it had
  before and less the result, as a share of the input. It counts what torch's own counters leave out, such as the
  scratch memory of matrix products. Freed memory is given back to the system before.

Editors quadratic in the tokens, and plain formulations that are, see fewer tokens unless `--full` is given. What takes
more than `--long` seconds is timed once, while its memory is watched.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from common import arguments, interleaved, median, report, rss_bytes

from lmcache_stream import editors
from lmcache_stream.editors import (
    Compose,
    Edit,
    EditInput,
    Editor,
    Quantize,
    QueryStatistics,
    StreamingLLM,
    TokenDropping,
)
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.rotary import Rotary

T = TypeVar("T")

CHUNK = 256
QWEN3_8B = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "max_position_embeddings": 40960,
    "rope_theta": 1_000_000.0,
    "torch_dtype": "bfloat16",
}
GEOMETRY = KVGeometry.from_config(QWEN3_8B, chunk_size=CHUNK)
QUADRATIC_PLAIN = ("rkv",)
"""Editors whose plain formulation takes time and memory quadratic in the tokens."""


def every_editor() -> dict[str, Editor]:
    made: dict[str, Editor] = {}
    for name in editors.names():
        if name == "compose":
            made[name] = Compose(editors=(StreamingLLM(), Quantize()))
        elif name == "expected-attention":
            made[name] = editors.get(name, statistics=statistics())
        else:
            made[name] = editors.get(name)
    made["random, scope layer"] = editors.get("random", scope="layer")
    made["snapkv, scope head"] = editors.get("snapkv", scope="head")
    return made


def statistics() -> QueryStatistics:
    """Made-up ones: what they say does not change the time."""
    generator = torch.Generator().manual_seed(1)
    heads = (GEOMETRY.num_layers, GEOMETRY.num_heads or GEOMETRY.num_kv_heads, GEOMETRY.head_dim)
    spread = torch.randn(*heads, 4, generator=generator)
    return QueryStatistics(
        mean=torch.randn(*heads, generator=generator), covariance=spread @ spread.transpose(-1, -2) / 4
    )


def prompt(tokens: int) -> EditInput:
    """An input whose layers repeat a few drawn ones, shifted: making it must not take longer than editing it."""
    layers, heads, head_dim = GEOMETRY.num_layers, GEOMETRY.num_kv_heads, GEOMETRY.head_dim
    query_heads = GEOMETRY.num_heads or heads
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> torch.Tensor:
        towards = torch.randn(1, count, head_dim, generator=generator)
        return (torch.randn(tokens, count, head_dim, generator=generator) + towards).flatten(1).bfloat16()

    kv = torch.empty(2, layers, tokens, heads * head_dim, dtype=torch.bfloat16)
    queries = torch.empty(1, layers, tokens, query_heads * head_dim, dtype=torch.bfloat16)
    few = [(drawn(heads), drawn(heads), drawn(query_heads)) for _ in range(2)]
    for layer in range(layers):
        keys, values, asked = few[layer % len(few)]
        kv[0, layer], kv[1, layer], queries[0, layer] = (part.roll(37 * layer, 0) for part in (keys, values, asked))
    return EditInput(
        kv=kv, tokens=tuple(range(tokens)), geometry=GEOMETRY, chunk_size=CHUNK, queries=queries, generator=None
    )


# Plain formulations.


def plain_positions(editor: Editor, x: EditInput) -> torch.Tensor:
    """The positions that `streaming-llm` and `random` keep are cheap to find: take them as given."""
    assert isinstance(editor, TokenDropping)
    budget = editor.budget(len(x.tokens), x.chunk_size, editor.sinks + editor.window)
    scores = editor.score(x, budget)[0, 0].clone()
    scores[: editor.sinks] = math.inf
    return scores.topk(budget).indices.sort().values


def plain_heads(states: torch.Tensor) -> torch.Tensor:
    """`[T, heads * head_dim]` -> float32 `[T, heads, head_dim]`."""
    return states.to(torch.float32).reshape(len(states), -1, GEOMETRY.head_dim)


def plain_attention(x: EditInput, layer: int, window: int) -> torch.Tensor:
    """Attention that the last `window` queries pay to those before: float32 `[H, G, T - window]`, their mean."""
    assert x.queries is not None
    total, heads = len(x.tokens), GEOMETRY.num_kv_heads
    keys = plain_heads(x.kv[0, layer]).permute(1, 0, 2)
    queries = plain_heads(x.queries[0, layer]).reshape(total, heads, -1, GEOMETRY.head_dim)
    logits = torch.einsum("hgwd,htd->hgwt", queries[-window:].permute(1, 2, 0, 3), keys) / math.sqrt(GEOMETRY.head_dim)
    logits[..., -window:] += torch.full((window, window), torch.finfo(torch.float32).min).triu(1)
    return torch.softmax(logits, dim=-1)[..., : total - window].mean(dim=-2)


def plain_best(scores: torch.Tensor, x: EditInput, window: int) -> torch.Tensor:
    best = scores.topk(plain_budget(x) - window).indices.sort().values
    return torch.cat([best, torch.arange(len(scores), len(x.tokens))])


def plain_snapkv(_: Editor, x: EditInput, window: int = 32, kernel_size: int = 5) -> torch.Tensor:
    scores = torch.zeros(len(x.tokens) - window)
    for layer in range(GEOMETRY.num_layers):
        attention = plain_attention(x, layer, window).reshape(1, -1, len(scores))
        pooled = torch.nn.functional.avg_pool1d(attention, kernel_size, stride=1, padding=kernel_size // 2)
        scores += pooled[0].mean(dim=0)
    return plain_best(scores, x, window)


def plain_rkv(
    _: Editor, x: EditInput, window: int = 8, kernel_size: int = 7, mix: float = 0.1, threshold: float = 0.5
) -> torch.Tensor:
    scores = torch.zeros(len(x.tokens) - window)
    for layer in range(GEOMETRY.num_layers):
        attention = plain_attention(x, layer, window).reshape(1, -1, len(scores))
        pooled = torch.nn.functional.max_pool1d(attention, kernel_size, stride=1, padding=kernel_size // 2)
        importance = pooled.reshape(GEOMETRY.num_kv_heads, -1, len(scores)).mean(dim=1)
        redundancy = plain_redundancy(plain_heads(x.kv[0, layer]).permute(1, 0, 2), threshold)
        scores += (mix * importance - (1 - mix) * redundancy[:, : len(scores)]).mean(dim=0)
    return plain_best(scores, x, window)


def plain_redundancy(keys: torch.Tensor, threshold: float, rows: int = 1024) -> torch.Tensor:
    """All pairs of keys `[H, T, head_dim]`, `rows` of them at a time -> `[H, T]`."""
    total = keys.shape[1]
    keys = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    columns = torch.zeros(keys.shape[:2])
    for start in range(0, total, rows):
        similar = keys[:, start : start + rows] @ keys.transpose(-1, -2)
        own = torch.arange(similar.shape[1])
        similar[:, own, start + own] = 0.0
        above = similar > threshold
        last = total - 1 - above.flip(-1).to(torch.uint8).argmax(dim=-1)
        last = torch.where(above.any(dim=-1), last, start + own)
        similar.scatter_(-1, last.unsqueeze(-1), 0.0)
        columns += similar.sum(dim=-2)
    return (columns / total).softmax(dim=-1)


def plain_budget(x: EditInput) -> int:
    return StreamingLLM().budget(len(x.tokens), x.chunk_size, 0)


def plain_drop(x: EditInput, kept: torch.Tensor) -> torch.Tensor:
    """Gather, then take the keys of one layer after the other back to position 0 and on to their new one."""
    kv = x.kv[:, :, kept, :].clone()
    assert GEOMETRY.rotary is not None
    for layer, rotary in enumerate(GEOMETRY.rotary):
        assert rotary is not None
        keys = plain_heads(kv[0, layer])
        cos, sin = plain_angles(kept, rotary)
        keys = keys * cos - plain_half_turned(keys) * sin
        cos, sin = plain_angles(torch.arange(len(kept)), rotary)
        keys = keys * cos + plain_half_turned(keys) * sin
        kv[0, layer] = keys.reshape(len(kept), -1)
    return kv


def plain_angles(positions: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(positions.to(torch.float32), torch.tensor(rotary.inv_freq))
    angles = torch.cat([angles, angles], dim=-1)[:, None, :]
    return angles.cos(), angles.sin()


def plain_half_turned(keys: torch.Tensor) -> torch.Tensor:
    first, second = keys.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


PLAIN: dict[str, Callable[[Editor, EditInput], torch.Tensor]] = {
    "random": plain_positions,
    "streaming-llm": plain_positions,
    "snapkv": plain_snapkv,
    "rkv": plain_rkv,
}


def plain(name: str, editor: Editor, x: EditInput) -> tuple[torch.Tensor, torch.Tensor]:
    """The KV `[2, L, n, D]` and the positions `[n]` that the plain formulation keeps."""
    kept = PLAIN[name](editor, x)
    return plain_drop(x, kept), kept


def check_same(edit: Edit, kv: torch.Tensor, kept: torch.Tensor) -> None:
    """The same tokens, but for a few that rounding alone decides, and the same KV to bfloat16's rounding."""
    assert edit.kept_positions is not None
    ours = edit.kept_positions
    assert ours.shape == kept.shape
    common = torch.isin(ours, kept).sum().item()
    if common < 0.995 * len(kept):
        raise SystemExit(f"the plain formulation keeps other tokens: {common} of {len(kept)} are the same")
    # Where a token differs, those behind it have moved by one: compare the layers where all is the same.
    if torch.equal(ours, kept):
        for layer in range(0, kv.shape[1], 7):
            torch.testing.assert_close(edit.kv[:, layer].float(), kv[:, layer].float(), rtol=2e-2, atol=2e-2)


# Measuring.


class Peak:
    """The most memory that the process had meanwhile, beyond what it had before."""

    def __enter__(self) -> Peak:
        gc.collect()
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        self._before = self._most = rss_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.bytes = self._most - self._before

    def _watch(self) -> None:
        while True:
            self._most = max(self._most, rss_bytes())
            if self._stop.wait(0.002):
                return


def seconds(call: Callable[..., object], *args: object) -> float:
    return timed(call, *args)[1]


def timed(call: Callable[..., T], *args: object) -> tuple[T, float]:
    started = time.perf_counter()
    result = call(*args)
    return result, time.perf_counter() - started


def half_twice(x: EditInput) -> tuple[Callable[[], float], Callable[[], float]]:
    """Copying the kept half twice: into memory that is there, and into new memory."""
    half = x.kv[:, :, : plain_budget(x)]
    there = [torch.zeros(half.shape, dtype=half.dtype) for _ in range(2)]

    def reused() -> None:
        there[0].copy_(half)
        there[1].copy_(there[0])

    def fresh() -> torch.Tensor:
        return half.contiguous().clone()

    return (lambda: seconds(reused)), (lambda: seconds(fresh))


def spent(editor: Editor, x: EditInput, memory: torch.Tensor) -> float:
    """Seconds that an edit takes which may use the memory of its input."""
    memory.copy_(x.kv)
    return seconds(editor.edit, replace(x, kv=memory, spent=True))


@dataclass
class Row:
    """What was measured of one editor; ratios are to times of the same tokens."""

    tokens: int
    taken: list[float]
    memory_share: float
    vs_copy: float
    vs_fresh_copy: float
    spent_seconds: float
    spent_vs_copy: float
    plain_tokens: int | None = None
    plain_seconds: float | None = None
    vs_plain: float | None = None
    spent_vs_plain: float | None = None


def measure(names: list[str], tokens: int, repeats: int, long: float, *, plain_too: bool) -> dict[str, Row]:
    x = prompt(tokens)
    made = {name: editor for name, editor in every_editor().items() if name in names}
    reused, fresh = half_twice(x)
    cases: dict[str, Callable[[], float]] = {"copy": reused, "fresh": fresh}
    shares: dict[str, float] = {}
    once: dict[str, list[float]] = {}
    memory = torch.empty_like(x.kv)
    for name, editor in made.items():
        with Peak() as peak:
            edit, took = timed(editor.edit, x)
        shares[name] = max(peak.bytes - edit.kv.nbytes, 0) / x.kv.nbytes
        cases[name] = functools.partial(seconds, editor.edit, x)
        cases[f"spent {name}"] = functools.partial(spent, editor, x, memory)
        once[name] = [took]
        if took > long:
            once[f"spent {name}"] = [spent(editor, x, memory)]
        if plain_too and name in PLAIN:
            result, took = timed(plain, name, editor, x)
            check_same(edit, *result)
            del result
            cases[f"plain {name}"] = functools.partial(seconds, plain, name, editor, x)
            once[f"plain {name}"] = [took]
        del edit
    once = {name: first for name, first in once.items() if first[0] > long}
    taken = once | interleaved({name: case for name, case in cases.items() if name not in once}, repeats)
    rows: dict[str, Row] = {}
    for name in made:
        took = median(taken[name])
        in_place = median(taken[f"spent {name}"])
        row = Row(
            tokens=tokens,
            taken=taken[name],
            memory_share=shares[name],
            vs_copy=took / median(taken["copy"]),
            vs_fresh_copy=took / median(taken["fresh"]),
            spent_seconds=in_place,
            spent_vs_copy=in_place / median(taken["copy"]),
        )
        if f"plain {name}" in taken:
            row.plain_tokens, row.plain_seconds = tokens, median(taken[f"plain {name}"])
            row.vs_plain, row.spent_vs_plain = row.plain_seconds / took, row.plain_seconds / in_place
        rows[name] = row
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument(
        "--slow-tokens", type=int, default=2048, help="for plain formulations that are quadratic in them"
    )
    parser.add_argument("--full", action="store_true", help="all tokens for everything: takes many minutes")
    parser.add_argument("--long", type=float, default=4.0, metavar="S", help="what takes longer is timed once")
    parser.add_argument("--only", nargs="*", help="these editors only")
    options = parser.parse_args()
    wanted = options.only or list(every_editor())
    also_fewer = [name for name in wanted if name in QUADRATIC_PLAIN and not options.full]
    as_asked = [name for name in wanted if name not in also_fewer]

    found: dict[str, Row] = {}
    for names, tokens, plain_too in (
        (as_asked, options.tokens, True),
        (also_fewer, options.tokens, False),
    ):
        if names:
            found |= measure(names, tokens, options.repeats, options.long, plain_too=plain_too)
    if also_fewer:
        for name, row in measure(
            also_fewer, options.slow_tokens, options.repeats, options.long, plain_too=True
        ).items():
            found[name].plain_tokens, found[name].plain_seconds = row.tokens, row.plain_seconds
            found[name].vs_plain, found[name].spent_vs_plain = row.vs_plain, row.spent_vs_plain
    found = {name: found[name] for name in wanted}
    rows = [
        {
            "editor": name,
            "tokens": row.tokens,
            "s": median(row.taken),
            "rounds": len(row.taken),
            "x copy": row.vs_copy,
            "x fresh copy": row.vs_fresh_copy,
            "spent s": row.spent_seconds,
            "spent x copy": row.spent_vs_copy,
            "plain tokens": row.plain_tokens,
            "plain s": row.plain_seconds,
            "times faster than plain": row.vs_plain,
            "spent": row.spent_vs_plain,
            "memory, % of input": 100 * row.memory_share,
        }
        for name, row in found.items()
    ]
    summary = {
        name: {
            "seconds": median(row.taken),
            "vs_plain": row.vs_plain,
            "spent_vs_plain": row.spent_vs_plain,
            "memory_share": row.memory_share,
            "tokens": row.tokens,
            "vs_copy": row.vs_copy,
            "vs_fresh_copy": row.vs_fresh_copy,
            "spent_seconds": row.spent_seconds,
            "spent_vs_copy": row.spent_vs_copy,
            "plain_tokens": row.plain_tokens,
        }
        for name, row in found.items()
    }
    notes = [
        f"Half of the tokens kept, {torch.get_num_threads()} torch threads. x copy: against copying the kept half "
        "twice into memory that is there, x fresh copy: into new memory. Spent: the edit as "
        "modify_kv asks for it, whose result takes its input's place. Both sides of times faster than plain see "
        "the plain tokens. Memory is beyond input and result."
    ]
    report(options, "Editors at Qwen3-8B's geometry", rows, summary, notes)


if __name__ == "__main__":
    main()
