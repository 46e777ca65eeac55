"""How long editors take on 8,000 tokens at Qwen3-8B's geometry, beside plain copies and plain formulations.

Keys are a shared direction and noise, so that a good share of them is similar, as in real models. Everything is
bfloat16 on the CPU, with the threads that torch takes by itself.

- `copy`: the kept half copied twice into memory that is there already; `fresh`: the same into new memory, which an
  editor's result is, too.
- `plain`: the same edit written as notebooks write it: layer by layer, all in float32, whole matrices. Its result is
  checked against the editor's.

Editors that take time quadratic in the tokens see fewer of them, unless `--full` is given.
"""

from __future__ import annotations

import functools
import gc
import math
import threading
import time
from collections.abc import Callable

import torch
from common import arguments, interleaved, median, report, rss_bytes

from lmcache_stream import editors
from lmcache_stream.editors import Compose, Edit, EditInput, Editor, Quantize, StreamingLLM, TokenDropping
from lmcache_stream.geometry import KVGeometry

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
QUADRATIC = ("h2o", "merge", "rkv")


def every_editor() -> dict[str, Editor]:
    made: dict[str, Editor] = {}
    for name in editors.names():
        made[name] = Compose(editors=(StreamingLLM(), Quantize())) if name == "compose" else editors.get(name)
    made["random, scope layer"] = editors.get("random", scope="layer")
    made["snapkv, scope head"] = editors.get("snapkv", scope="head")
    return made


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


def plain_positions(editor: TokenDropping, x: EditInput) -> torch.Tensor:
    """The positions that `streaming-llm` and `random` keep are cheap to find: take them as given."""
    budget = editor.budget(len(x.tokens), x.chunk_size, editor.sinks + editor.window)
    scores = editor.score(x, budget)[0, 0].clone()
    scores[: editor.sinks] = math.inf
    return scores.topk(budget).indices.sort().values


def plain_attention(x: EditInput, layer: int, window: int) -> torch.Tensor:
    """Attention of the last `window` queries, float32 `[H, G, window, T]`."""
    assert x.queries is not None
    total, heads, head_dim = len(x.tokens), GEOMETRY.num_kv_heads, GEOMETRY.head_dim
    keys = x.kv[0, layer].to(torch.float32).reshape(total, heads, head_dim).permute(1, 0, 2)
    queries = x.queries[0, layer].to(torch.float32).reshape(total, heads, -1, head_dim)
    logits = torch.einsum("whgd,htd->hgwt", queries[-window:], keys) / math.sqrt(head_dim)
    mask = torch.full((window, window), torch.finfo(torch.float32).min).triu(1)
    logits[..., -window:] += mask
    return torch.softmax(logits, dim=-1)


def plain_snapkv(x: EditInput, window: int = 32, kernel_size: int = 5) -> torch.Tensor:
    total, budget = len(x.tokens), plain_budget(x)
    past = total - window
    scores = torch.zeros(past)
    for layer in range(GEOMETRY.num_layers):
        attention = plain_attention(x, layer, window)[..., :past].mean(dim=-2)
        pooled = torch.nn.functional.avg_pool1d(
            attention.reshape(1, -1, past), kernel_size, stride=1, padding=kernel_size // 2
        )
        scores += pooled[0].mean(dim=0)
    best = scores.topk(budget - window).indices.sort().values
    return torch.cat([best, torch.arange(past, total)])


def plain_rkv(
    x: EditInput, window: int = 8, kernel_size: int = 7, mix: float = 0.1, threshold: float = 0.5
) -> torch.Tensor:
    total, budget = len(x.tokens), plain_budget(x)
    past = total - window
    scores = torch.zeros(past)
    columns = torch.arange(total)
    for layer in range(GEOMETRY.num_layers):
        attention = plain_attention(x, layer, window)[..., :past].mean(dim=-2)
        pooled = torch.nn.functional.max_pool1d(
            attention.reshape(1, -1, past), kernel_size, stride=1, padding=kernel_size // 2
        )
        importance = pooled.reshape(GEOMETRY.num_kv_heads, -1, past).mean(dim=1)
        keys = x.kv[0, layer].to(torch.float32).reshape(total, GEOMETRY.num_kv_heads, -1).permute(1, 0, 2)
        keys = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
        similar = torch.matmul(keys, keys.transpose(-1, -2))
        similar.masked_fill_(torch.eye(total, dtype=torch.bool), 0.0)
        above = similar > threshold
        last = torch.where(above, columns, torch.zeros_like(above, dtype=torch.long)).max(dim=-1).values
        found = above.any(dim=-1)
        last = torch.where(found, last, columns)
        similar.scatter_(-1, last.unsqueeze(-1), 0.0)
        redundancy = similar.mean(dim=-2).softmax(dim=-1)
        scores += (mix * importance - (1 - mix) * redundancy[:, :past]).mean(dim=0)
    best = scores.topk(budget - window).indices.sort().values
    return torch.cat([best, torch.arange(past, total)])


def plain_budget(x: EditInput) -> int:
    return StreamingLLM().budget(len(x.tokens), x.chunk_size, 0)


def plain_drop(x: EditInput, kept: torch.Tensor) -> torch.Tensor:
    """Gather, then turn the keys of one layer after the other."""
    kv = x.kv[:, :, kept, :].clone()
    assert GEOMETRY.rotary is not None
    rotary = GEOMETRY.rotary[0]
    assert rotary is not None
    moved = torch.arange(len(kept), dtype=torch.float32) - kept.to(torch.float32)
    angles = torch.outer(moved, torch.tensor(rotary.inv_freq))
    angles = torch.cat([angles, angles], dim=-1)
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    for layer in range(kv.shape[1]):
        keys = kv[0, layer].reshape(len(kept), GEOMETRY.num_kv_heads, -1).to(torch.float32)
        first, second = keys.chunk(2, dim=-1)
        turned = keys * cos + torch.cat([-second, first], dim=-1) * sin
        kv[0, layer] = turned.reshape(len(kept), -1).to(kv.dtype)
    return kv


PLAIN: dict[str, Callable[[Editor, EditInput], torch.Tensor]] = {
    "random": lambda editor, x: plain_positions(dropping(editor), x),
    "streaming-llm": lambda editor, x: plain_positions(dropping(editor), x),
    "snapkv": lambda _, x: plain_snapkv(x),
    "rkv": lambda _, x: plain_rkv(x),
}


def dropping(editor: Editor) -> TokenDropping:
    assert isinstance(editor, TokenDropping)
    return editor


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
        self._before = self._most = rss_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.mib = (self._most - self._before) / 2**20

    def _watch(self) -> None:
        while True:
            self._most = max(self._most, rss_bytes())
            if self._stop.wait(0.005):
                return


def plain(positions: Callable[[Editor, EditInput], torch.Tensor], editor: Editor, x: EditInput) -> torch.Tensor:
    return plain_drop(x, positions(editor, x))


def seconds(call: Callable[..., object], *args: object) -> float:
    started = time.perf_counter()
    result = call(*args)
    took = time.perf_counter() - started
    del result
    return took


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


def measure(names: list[str], tokens: int, repeats: int, results: dict[str, dict[str, float | None]]) -> None:
    x = prompt(tokens)
    made = {name: editor for name, editor in every_editor().items() if name in names}
    reused, fresh = half_twice(x)
    runs: dict[str, Callable[[], float]] = {"copy": reused, "fresh": fresh}
    peaks = {}
    for name, editor in made.items():
        with Peak() as peak:
            edit = editor.edit(x)
        peaks[name] = peak.mib
        runs[name] = functools.partial(seconds, editor.edit, x)
        if name in PLAIN:
            kept = PLAIN[name](editor, x)
            check_same(edit, plain_drop(x, kept), kept)
            runs[f"plain {name}"] = functools.partial(seconds, plain, PLAIN[name], editor, x)
        del edit
    taken = interleaved(runs, repeats)
    copy, new = median(taken["copy"]), median(taken["fresh"])
    for name in made:
        took = median(taken[name])
        plainly = median(taken[f"plain {name}"]) if name in PLAIN else None
        results[name] = {
            "tokens": tokens,
            "seconds": took,
            "vs_copy": took / copy,
            "vs_fresh_copy": took / new,
            "plain_seconds": plainly,
            "vs_plain": None if plainly is None else plainly / took,
            "peak_mib": peaks[name],
        }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--slow-tokens", type=int, default=1024, help="for editors quadratic in the tokens")
    parser.add_argument("--full", action="store_true", help="all tokens for every editor: takes many minutes")
    parser.add_argument("--only", nargs="*", help="these editors only")
    options = parser.parse_args()
    if options.full:
        options.slow_tokens = options.tokens

    wanted = options.only or list(every_editor())
    results: dict[str, dict[str, float | None]] = {}
    fast, slow = [n for n in wanted if n not in QUADRATIC], [n for n in wanted if n in QUADRATIC]
    if fast:
        measure(fast, options.tokens, options.repeats, results)
    if slow:
        measure(slow, options.slow_tokens, options.repeats, results)
    rows = [
        {
            "editor": name,
            "tokens": row["tokens"],
            "s": row["seconds"],
            "x copy": row["vs_copy"],
            "x fresh copy": row["vs_fresh_copy"],
            "plain s": row["plain_seconds"],
            "times faster than plain": row["vs_plain"],
            "peak MiB": row["peak_mib"],
        }
        for name, row in results.items()
    ]
    notes = [
        f"Half of the tokens kept, {torch.get_num_threads()} torch threads. x copy: against copying the kept half "
        "twice into memory that is there, x fresh copy: into new memory."
    ]
    report(options, "Editors at Qwen3-8B's geometry", rows, results, notes)


if __name__ == "__main__":
    main()
