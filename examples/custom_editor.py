"""Write an editor: score tokens, and let the package select, gather and re-rotate; or do all of it in a function.

python examples/custom_editor.py [--keep RATIO] [--base-url URL --kv-url URL --kv-http-url URL]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import ClassVar

import torch
from servers import arguments, open_servers, run

from lmcache_stream import AsyncLMCacheStream
from lmcache_stream.bench.prompts import Prompt, shipped_prompts
from lmcache_stream.editors import LayerScoring, get, register
from lmcache_stream.editors.base import Layer


@register  # known by its name from now on, as in `editors.get("value-norm", keep=0.5)`
@dataclass(frozen=True, kw_only=True)
class ValueNorm(LayerScoring):
    """Keeps the tokens whose values are largest, since attention adds up values.

    `keep`, `sinks`, `window`, `protect`, `scope`, `aggregate` and `rerotate` come with the base class.
    """

    name: ClassVar[str] = "value-norm"
    comparable: ClassVar[bool] = False  # layers have scales of their own

    def score_layer(self, layer: Layer, budget: int) -> torch.Tensor:
        """Norms of `layer.values` `[H, T, head_dim]`: float32 `[H, T]`; the higher, the sooner kept."""
        norms: torch.Tensor = torch.linalg.vector_norm(layer.values, dim=-1, dtype=torch.float32)
        return norms


def forget_the_end(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    """A plain function: `kv` `[2, L, T, D]` and its `T` ids in, an edited pair out.

    What stays keeps its place, so its keys keep their rotary positions.
    """
    half = len(tokens) // 2
    return kv[:, :, :half], tokens[:half]


async def main(options: argparse.Namespace, prompt: Prompt) -> None:
    async with open_servers(options) as at:
        stream = AsyncLMCacheStream(at.cache, at.engine, prompt.token_ids(at.tokenizer))
        await stream.generate({"max_tokens": 1, "temperature": 0})
        print(prompt.question)
        for edit in (get("value-norm", keep=options.keep, sinks=4, window=64), forget_the_end):
            edited = await stream.fork()
            receipt = await edited.modify_kv(edit)
            await edited.generate({"max_tokens": 32, "temperature": 0})
            name = getattr(edit, "name", forget_the_end.__name__)
            print(f"{name}, {receipt.tokens_after} of {receipt.tokens_before} tokens: {edited.output_text().strip()}")


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--keep", type=float, default=0.5, help="share of the KV to keep (default: 0.5)")
    run(main(parser.parse_args(), shipped_prompts()[-1]))
