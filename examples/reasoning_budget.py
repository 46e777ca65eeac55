"""Let a model think for long in a bounded KV: edit while decoding, every so many tokens.

python examples/reasoning_budget.py [--budget TOKENS] [--every TOKENS] [--max-tokens N]
                                    [--base-url URL --kv-url URL --kv-http-url URL]
"""

from __future__ import annotations

import argparse

from servers import arguments, open_servers, run

from lmcache_stream import AsyncLMCacheStream
from lmcache_stream.bench.prompts import Prompt
from lmcache_stream.editors import StreamingLLM

QUESTION = Prompt(
    "A train leaves at 9:40 and needs 2 hours and 35 minutes. On the way it stands still for 25 minutes, twice. "
    "When does it arrive? Think step by step, check every step, and then write down the answer.",
    "When does the train arrive?",
)


async def main(options: argparse.Namespace) -> None:
    async with open_servers(options) as at:
        stream = AsyncLMCacheStream(at.cache, at.engine, QUESTION.token_ids(at.tokenizer))
        # The first tokens hold the question; after them, the most recent thoughts stay.
        editor = StreamingLLM(keep=options.budget, sinks=options.budget // 2)
        sampling = {"max_tokens": options.max_tokens, "temperature": 0}
        receipt = None
        async for event in stream.events(sampling, edit_every=options.every, editor=editor):
            if (latest := stream.last_receipt) is not None and latest is not receipt:
                receipt = latest
                print(f"\n[{receipt.tokens_before} tokens of KV, {receipt.tokens_after} kept]")
            print(event.text, end="", flush=True)
        print(f"\n{stream.decoded_tokens()} tokens decoded, {len(stream.tokens)} in the last prompt and its answer.")


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--budget", type=int, default=96, help="tokens of KV that an edit leaves (default: 96)")
    parser.add_argument("--every", type=int, default=64, help="tokens between two edits (default: 64)")
    parser.add_argument("--max-tokens", type=int, default=320, help="tokens to decode in all (default: 320)")
    run(main(parser.parse_args()))
