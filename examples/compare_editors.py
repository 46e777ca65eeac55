"""Prefill once, fork, and let several editors loose on the same KV; draw what each kept.

python examples/compare_editors.py [--editor NAME ...] [--keep RATIO] [--scope shared|layer|head] [--plot FILE.png]
                                   [--base-url URL --kv-url URL --kv-http-url URL]

Editors that look at the prompt's queries (snapkv, tova, h2o, rkv), and the plot of attention, need the embedded engine.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from pathlib import Path

import torch
from servers import Servers, arguments, open_servers, run

from lmcache_stream import AsyncLMCacheStream, CacheKind, ModifyReceipt, editors, plots
from lmcache_stream.bench.prompts import Prompt, shipped_prompts

EDITORS = ("streaming-llm", "knorm", "keydiff", "snapkv")
GREEDY = {"max_tokens": 32, "temperature": 0}


@dataclass
class Comparison:
    """What came of it.

    Args:
        receipts: Of each editor, by name.
        mass: How much each token of the prompt is attended to, `[L, H, T]`; None where nobody tells.
    """

    receipts: dict[str, ModifyReceipt]
    mass: torch.Tensor | None = None


async def compare(options: argparse.Namespace, prompt: Prompt) -> Comparison:
    embedded = options.base_url is None
    found = Comparison({})
    async with open_servers(options, queries=embedded) as at:
        stream = AsyncLMCacheStream(at.cache, at.engine, prompt.token_ids(at.tokenizer))
        await stream.generate({"max_tokens": 1, "temperature": 0})  # one prefill for all
        everything = await stream.fork()
        await everything.generate(GREEDY)
        print(f"{prompt.question}\nall KV: {everything.output_text().strip()}")

        for name in options.editor or [name for name in EDITORS if embedded or name != "snapkv"]:
            fork = await stream.fork()
            found.receipts[name] = await fork.modify_kv(editors.get(name, keep=options.keep, scope=options.scope))
            await fork.generate(GREEDY)
            print(f"{name}: {fork.output_text().strip()}")
        if embedded and options.plot:
            found.mass = await attention(at, stream)
    return found


async def attention(at: Servers, stream: AsyncLMCacheStream) -> torch.Tensor:
    kv = await stream.retrieve_kv()
    queries = await at.cache.retrieve(stream.tokens[: kv.shape[2]], stream.cache_salt, kind=CacheKind.QUERY)
    geometry = at.cache.geometry
    assert queries is not None
    assert geometry is not None
    return await asyncio.to_thread(plots.attention_mass, kv, queries, geometry)


def draw(found: Comparison, path: Path) -> None:
    from matplotlib import pyplot

    rows = len(found.receipts) + (found.mass is not None)
    figure, axes = pyplot.subplots(rows, 1, figsize=(9, 2.2 * rows), layout="constrained", squeeze=False)
    for (name, receipt), ax in zip(found.receipts.items(), axes[:, 0], strict=False):
        plots.plot_kept(receipt, title=name, ax=ax)
    if found.mass is not None:
        plots.plot_attention_mass(found.mass, found.receipts, ax=axes[-1, 0])
    figure.savefig(path)
    pyplot.close(figure)
    print(f"drawn: {path}")


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--editor", action="append", choices=editors.names(), help="what drops tokens; repeat")
    parser.add_argument("--keep", type=float, default=0.5, help="share of the KV to keep (default: 0.5)")
    scopes = ("shared", "layer", "head")
    parser.add_argument("--scope", choices=scopes, default="head", help="who keeps tokens of its own (default: head)")
    parser.add_argument("--plot", type=Path, help="draw into this file")
    options = parser.parse_args()
    found = run(compare(options, shipped_prompts()[-1]))
    if options.plot:
        draw(found, options.plot)
