"""Many prompts at once, of which some may fail: prefill, edit, decode, and one JSON line for each.

python examples/batch_many_prompts.py [--prompts FILE] [--out FILE] [--concurrency N] [--plot FILE.png]
                                      [--base-url URL --kv-url URL --kv-http-url URL]

A line of --prompts is {"context": TEXT, "question": TEXT} or {"prompt": TEXT}; without it, six ship with the package.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from servers import arguments, open_servers, run

from lmcache_stream import AsyncBatchedStream, AsyncLMCacheStream, StreamPerfMetrics, plots
from lmcache_stream.bench.prompts import Prompt, read_prompts, shipped_prompts
from lmcache_stream.editors import StreamingLLM

Result: TypeAlias = dict[str, Any]


async def answer(options: argparse.Namespace, prompts: Sequence[Prompt]) -> tuple[AsyncBatchedStream, list[Result]]:
    """The batch and one result for each prompt, in their order."""
    editor = StreamingLLM(keep=options.keep, sinks=4)
    async with open_servers(options) as at:
        # A prompt that fails, such as one that is shorter than a cache chunk, does not stop the others.
        batch = AsyncBatchedStream(max_concurrency=options.concurrency, on_error="collect")
        by_id: dict[str, Prompt] = {}
        for prompt in prompts:
            stream = AsyncLMCacheStream(at.cache, at.engine, prompt.token_ids(at.tokenizer))
            batch.add(stream)
            by_id[stream.stream_id()] = prompt

        failed: dict[str, BaseException] = {}

        def still_well() -> list[str]:
            failed.update(batch.failures)
            return [stream_id for stream_id in by_id if stream_id not in failed]

        (await batch.prefill({"temperature": 0})).emit()
        (await batch.modify(editor, stream_ids=still_well(), max_concurrency=4)).emit()
        (await batch.decode({"temperature": 0, "max_tokens": options.max_tokens}, stream_ids=still_well())).emit()
        still_well()
    return batch, list(results(batch, by_id, failed))


def results(
    batch: AsyncBatchedStream, by_id: Mapping[str, Prompt], failed: Mapping[str, BaseException]
) -> Iterator[Result]:
    for stream_id, prompt in by_id.items():
        if stream_id in failed:
            yield {"question": prompt.question, "error": str(failed[stream_id])}
        else:
            receipt = batch.receipts[stream_id]
            yield {
                "question": prompt.question,
                "answer": batch.get_stream(stream_id).output_text().strip(),
                "tokens_before": receipt.tokens_before,
                "tokens_after": receipt.tokens_after,
                "ttft": batch.perf_metrics[stream_id].ttft,
            }


def draw(metrics: Mapping[str, StreamPerfMetrics], path: Path) -> None:
    from matplotlib import pyplot

    streams = list(metrics.values())
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(14, 3.6), layout="constrained")
    plots.plot_latencies({"decode": [one.ttft for one in streams]}, title="Time to first token", ax=left)
    gaps = [gap for one in streams for gap in one.tpot]
    plots.plot_latencies({"decode": gaps}, title="Inter-token latency", ax=middle)
    plots.plot_throughput({"decode": plots.output_throughput(streams)}, ax=right)
    figure.savefig(path)
    pyplot.close(figure)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=Path, help="prompts as JSON lines")
    parser.add_argument("--out", type=Path, default=Path("answers.jsonl"), help="where to write (answers.jsonl)")
    parser.add_argument("--concurrency", type=int, default=64, help="streams at once (default: 64)")
    parser.add_argument("--keep", type=float, default=0.5, help="share of the KV to keep (default: 0.5)")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens to decode a prompt (default: 48)")
    parser.add_argument("--plot", type=Path, help="draw latencies and throughput into this file")
    options = parser.parse_args()
    prompts = read_prompts(options.prompts) if options.prompts else shipped_prompts()
    batch, found = run(answer(options, prompts))
    options.out.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in found), encoding="utf-8")
    if options.plot:
        draw(batch.perf_metrics, options.plot)
    answered = sum("error" not in each for each in found)
    print(f"{answered} of {len(found)} prompts answered, see {options.out}.")
