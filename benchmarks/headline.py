"""What dropping half of the tokens gains where KV memory is the bottleneck, on a real vLLM and a real LMCache server.

vLLM gets so little room for KV that the prompts do not all fit: requests queue, and those that run are preempted. Each
repeat prefills the same prompts under a salt of its own and waits until the cache server holds them. Then two arms go
on from there, and the next repeat runs them in the other order: the baseline decodes from the prompts' KV, the edited
arm drops tokens, stores the rest and decodes from that. Both take their KV from the cache server, and both keep
`--max-concurrency` requests at the engine. `with edit` counts the time of the edits, from the first to the last, as the
edited arm's own.

It is a headline only if the engine took every edited token from the cache: otherwise it says so and exits with 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
from common import cpu_seconds, machine, rounded
from rich.console import Console
from rich.table import Table

from lmcache_stream import AsyncBatchedStream, AsyncLMCacheStream, CompletionsClient, KVGeometry, editors
from lmcache_stream.bench.texts import draw_texts, load_corpus
from lmcache_stream.editors import Editor
from lmcache_stream.errors import LMCacheError, UsageError
from lmcache_stream.kvcache import AsyncKVCacheContext, aconnect
from lmcache_stream.serving.guard import descendants
from lmcache_stream.serving.options import StackOptions
from lmcache_stream.serving.up import ServingStack

BASELINE, EDITED = "baseline", "edited"
BLOCK = 32
STEPS = ("wait", "retrieve", "edit", "store")
NUMBERS = (
    *("prefill s", "edit s", "decode s", "tok/s", "with edit", "TTFT s", "at once", "preempted", "KV full %"),
    *("others", "KV MB/request", "from cache %"),
)
QUICK = {"prompts": 8, "output_tokens": 64, "kv_tokens": 3000, "repeats": 1}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
SAMPLE_INTERVAL = 0.5
LONGEST_QUEUE = 3600.0
PREEMPTED = re.compile("<preempted> by preempted requests: (.*)")
RESUMED = re.compile(r"<resume-load> req=(\S+) apc=(\d+) lmcache=(\d+)")
QUOTED = re.compile("'([^']+)'")
PREEMPTIONS, RUNNING, USED = "vllm:num_preemptions_total", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"


@dataclass(frozen=True)
class Arm:
    """One arm of one repeat; times in seconds.

    Args:
        name: `baseline` or `edited`.
        edit: Wall time of the edits; 0 for the baseline.
        steps: Time in each step of the edits, all streams together, several of which run at once.
        decode: Wall time of the decode.
        output_tokens: Tokens that were decoded.
        kv_tokens: Tokens of KV that the requests began with, all together.
        cached: Whole chunks of those, in tokens, that the cache held.
        taken: Tokens that the engine took from it.
        preemptions: How often the engine took a running request's KV away.
        recomputed: How many of those requests did not get it back from the cache afterwards, by the log of LMCache's
            connector; None where the log does not say.
        running: Requests that ran at once, on average over the first half of the decode; later the rest fits.
        used: Highest share of the engine's KV space in use.
        ttft: Time to the first token of a request, on average.
        others: Cores that other programs on the machine kept busy meanwhile, on average.
    """

    name: str
    edit: float
    steps: dict[str, float]
    decode: float
    output_tokens: int
    kv_tokens: int
    cached: int
    taken: int
    preemptions: int
    recomputed: int | None
    running: float
    used: float
    ttft: float
    others: float

    @property
    def tput(self) -> float:
        """Output tokens a second of the decode."""
        return self.output_tokens / self.decode

    @property
    def tput_with_edit(self) -> float:
        """Output tokens a second of the edits and the decode."""
        return self.output_tokens / (self.edit + self.decode)


@dataclass(frozen=True)
class Repeat:
    """Both arms after one prefill.

    Args:
        prefill: Wall time of the prefill, in seconds.
        arms: In the order in which they ran.
    """

    prefill: float
    arms: tuple[Arm, ...]

    def arm(self, name: str) -> Arm:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def gain(self) -> float:
        """Decode throughput over the baseline's."""
        return self.arm(EDITED).tput / self.arm(BASELINE).tput

    @property
    def gain_with_edit(self) -> float:
        """The same, with the time of the edits."""
        return self.arm(EDITED).tput_with_edit / self.arm(BASELINE).tput


@dataclass
class Watch:
    """What the engine's `/metrics` say while an arm decodes.

    Args:
        preemptions: How many there were.
        running: Requests that ran, at each look.
        used: Share of the KV space in use, at each look.
    """

    preemptions: int = 0
    running: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)


@asynccontextmanager
async def watching(base_url: str) -> AsyncIterator[Watch]:
    """Look at the engine's `/metrics` every half second, in `async with`."""
    watch = Watch()
    async with aiohttp.ClientSession(raise_for_status=True) as session:

        async def look() -> dict[str, float]:
            async with session.get(f"{base_url}/metrics") as response:
                return gauges(await response.text())

        async def looking() -> None:
            while True:
                seen = await look()
                watch.running.append(seen[RUNNING])
                watch.used.append(seen[USED])
                await asyncio.sleep(SAMPLE_INTERVAL)

        before = (await look())[PREEMPTIONS]
        task = asyncio.create_task(looking())
        try:
            yield watch
        finally:
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.result()
        watch.preemptions = int((await look())[PREEMPTIONS] - before)


def gauges(text: str) -> dict[str, float]:
    """The values of a Prometheus page by name, summed over labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


def draw_prompts(tokenizer: Any, count: int, shortest: int, longest: int, seed: int) -> list[list[int]]:
    """Prose of `shortest` to `longest` tokens, the lengths evenly spread, in an order that only the seed decides."""
    texts = draw_texts(load_corpus("python"), tokenizer, longest, seed)
    lengths = [round(shortest + (longest - shortest) * index / max(1, count - 1)) for index in range(count)]
    random.Random(seed).shuffle(lengths)
    prompts = [list(text.tokens[:length]) for text, length in zip(texts, lengths, strict=False)]
    if len(prompts) < count:
        raise UsageError(
            f"there are {len(prompts)} texts of {longest} tokens: take fewer --prompts or a lower --longest"
        )
    return prompts


async def run_repeat(
    ctx: AsyncKVCacheContext,
    engine: CompletionsClient,
    prompts: Sequence[Sequence[int]],
    editor: Editor,
    output_tokens: int,
    max_concurrency: int,
    *,
    salt: str,
    order: Sequence[str],
    log: Path,
) -> Repeat:
    """Prefill `prompts` once, and decode from there with and without the edit.

    Args:
        ctx: The cache.
        engine: The engine over it, with `/metrics`.
        prompts: Token ids.
        editor: What drops tokens.
        output_tokens: Tokens to decode for each prompt.
        max_concurrency: Requests of a decode that are at the engine at once, running or waiting.
        salt: The `cache_salt`, one that no repeat before used.
        order: The arms, in the order in which to run them.
        log: The engine's.
    """
    first = AsyncBatchedStream(progress=False)
    first.extend(AsyncLMCacheStream(ctx, engine, prompt, salt, on_shortfall="report") for prompt in prompts)
    prefill = await first.run_streams({**GREEDY, "max_tokens": 1})
    for prompt in prompts:
        await ctx.wait_for(prompt, timeout=60, cache_salt=salt)
    arms = []
    for name in order:
        batch = AsyncBatchedStream(progress=False)
        batch.extend([await stream.fork() for stream in first])
        others, start = others_seconds(), time.perf_counter()
        arm = await run_arm(name, batch, engine.base_url, editor, output_tokens, max_concurrency, log)
        arms.append(replace(arm, others=(others_seconds() - others) / (time.perf_counter() - start)))
    return Repeat(prefill, tuple(arms))


async def run_arm(
    name: str,
    batch: AsyncBatchedStream,
    base_url: str,
    editor: Editor,
    output_tokens: int,
    max_concurrency: int,
    log: Path,
) -> Arm:
    edit = await batch.modify_stream(editor) if name == EDITED else 0.0
    receipts = batch.receipts
    logged = len(read(log))
    async with watching(base_url) as watch:
        decode = await batch.run_streams({**GREEDY, "max_tokens": output_tokens}, max_concurrency=max_concurrency)
    done = batch.perf_metrics
    chunk_size = next(iter(batch)).ctx.chunk_size
    cached = {of: (metrics.input_tokens - 1) // chunk_size * chunk_size for of, metrics in done.items()}
    for of, receipt in receipts.items():  # an engine computes the last token of a prompt that a cache has whole
        cached[of] = min(receipt.tokens_after - receipt.recomputed, done[of].input_tokens - 1)
    busy = watch.running[: max(1, len(watch.running) // 2)]
    return Arm(
        name=name,
        edit=edit,
        steps={step: sum(receipt.seconds.get(step, 0.0) for receipt in receipts.values()) for step in STEPS},
        decode=decode,
        output_tokens=sum(metrics.output_tokens for metrics in done.values()),
        kv_tokens=sum(metrics.input_tokens for metrics in done.values()),
        cached=sum(cached.values()),
        taken=sum(min(tokens, done[of].cached_tokens or 0) for of, tokens in cached.items()),
        preemptions=watch.preemptions,
        recomputed=recomputed(read(log)[logged:], min(cached.values()), watch.preemptions),
        running=statistics.fmean(busy),
        used=max(watch.used),
        ttft=statistics.fmean(metrics.ttft for metrics in done.values()),
        others=0.0,
    )


def read(log: Path) -> str:
    return log.read_text(errors="replace")


def recomputed(log: str, least: int, preemptions: int) -> int | None:
    """Preempted requests that came back with less than `least` tokens from the cache; None if the log misses some.

    An engine computes their prompts from the ids then, and what an edit did is lost without a word.
    """
    out: set[str] = set()
    seen = 0
    for line in log.splitlines():
        if found := PREEMPTED.search(line):
            requests = QUOTED.findall(found[1])
            seen += len(requests)
            out.update(requests)
        elif (found := RESUMED.search(line)) and int(found[3]) >= least:
            out.discard(found[1])
    return len(out) if seen == preemptions else None


def others_seconds() -> float:
    """CPU time so far of all programs on the machine but this one and the servers that it started."""
    fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    everybody = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    ours = time.process_time()
    for pid in descendants(os.getpid()):
        with suppress(OSError):
            ours += cpu_seconds(pid)
    return everybody - ours


def verdict(repeats: Sequence[Repeat]) -> str | None:
    """Why this is no headline; None if it is one."""
    for name in (EDITED, BASELINE):
        arms = [repeat.arm(name) for repeat in repeats]
        cached, taken = sum(arm.cached for arm in arms), sum(arm.taken for arm in arms)
        if taken < cached:
            return f"no headline: the engine took {taken:,} of {cached:,} tokens of the {name} arm from the cache"
        if lost := sum(arm.recomputed or 0 for arm in arms):
            return f"no headline: {lost} preempted requests of the {name} arm did not get their KV back from the cache"
    if len({arm.output_tokens for repeat in repeats for arm in repeat.arms}) > 1:
        return "no headline: the arms did not decode equally many tokens"
    return None


def summary(repeats: Sequence[Repeat], workload: dict[str, Any], bytes_per_token: int) -> dict[str, Any]:
    """The JSON object: medians over the repeats, what they are of, and why it is no headline, if it is none."""
    edited, baseline = ([repeat.arm(name) for repeat in repeats] for name in (EDITED, BASELINE))

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    def arm(arms: Sequence[Arm]) -> dict[str, Any]:
        return {
            "output_tput": median([each.tput for each in arms]),
            "output_tput_with_edit": median([each.tput_with_edit for each in arms]),
            "decode_s": median([each.decode for each in arms]),
            "ttft_s": median([each.ttft for each in arms]),
            "preemptions": median([each.preemptions for each in arms]),
            "recomputed_after_preemption": sum(each.recomputed for each in arms)
            if all(each.recomputed is not None for each in arms)
            else None,
            "requests_at_once": median([each.running for each in arms]),
            "cores_of_others": median([each.others for each in arms]),
            "peak_kv_share": median([each.used for each in arms]),
            "taken_from_cache": sum(each.taken for each in arms) / sum(each.cached for each in arms),
            "kv_bytes_per_request": median([each.kv_tokens for each in arms]) * bytes_per_token / workload["prompts"],
        }

    return {
        "gain": median([repeat.gain for repeat in repeats]),
        "gain_with_edit": median([repeat.gain_with_edit for repeat in repeats]),
        "gains": [repeat.gain for repeat in repeats],
        "gains_with_edit": [repeat.gain_with_edit for repeat in repeats],
        "no_headline": verdict(repeats),
        "prefill_s": median([repeat.prefill for repeat in repeats]),
        "edit_s": median([each.edit for each in edited]),
        "edit_steps_s": {step: median([each.steps[step] for each in edited]) for step in STEPS},
        BASELINE: arm(baseline),
        EDITED: arm(edited),
        "workload": workload,
    }


def show(repeats: Sequence[Repeat], title: str, bytes_per_token: int, prompts: int) -> None:
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in ("repeat", "arm"):
        table.add_column(name)
    for name in (*NUMBERS, "gain", "gain with edit"):
        table.add_column(name, justify="right")
    for number, repeat in enumerate(repeats, start=1):
        for arm in repeat.arms:
            edited = arm.name == EDITED
            table.add_row(
                str(number),
                arm.name,
                f"{repeat.prefill:.1f}",
                f"{arm.edit:.1f}" if edited else "",
                f"{arm.decode:.1f}",
                f"{arm.tput:.1f}",
                f"{arm.tput_with_edit:.1f}" if edited else "",
                f"{arm.ttft:.1f}",
                f"{arm.running:.1f}",
                str(arm.preemptions),
                f"{100 * arm.used:.0f}",
                f"{arm.others:.2f}",
                f"{arm.kv_tokens * bytes_per_token / prompts / 1e6:.1f}",
                f"{100 * arm.taken / arm.cached:.1f}",
                f"{repeat.gain:.2f}" if edited else "",
                f"{repeat.gain_with_edit:.2f}" if edited else "",
            )
    Console(width=None if sys.stdout.isatty() else 180, highlight=False).print(table)


async def clear(stack: ServingStack) -> None:
    """Let the cache server forget everything, so that each repeat finds it as the first one did."""
    async with (
        aiohttp.ClientSession(raise_for_status=True) as session,
        session.post(f"{stack.kv_http_url}/cache/clear"),
    ):
        pass


async def measure(options: argparse.Namespace, stack: ServingStack, prompts: Sequence[Sequence[int]]) -> list[Repeat]:
    editor = editors.get(options.editor, keep=options.keep)
    log = stack.process.log
    repeats: list[Repeat] = []
    async with (
        stack,
        CompletionsClient(stack.base_url, idle_timeout=LONGEST_QUEUE) as engine,
        aconnect(stack.kv_url, stack.kv_http_url, stack.model_name, probe=engine) as ctx,
    ):
        await run_repeat(ctx, engine, prompts[:2], editor, 8, 2, salt="warm-up", order=(BASELINE, EDITED), log=log)
        for number in range(options.repeats):
            await clear(stack)
            order = (BASELINE, EDITED) if number % 2 == 0 else (EDITED, BASELINE)
            salt = f"repeat-{number}-{os.getpid()}"
            repeat = await run_repeat(
                ctx,
                engine,
                prompts,
                editor,
                options.output_tokens,
                options.max_concurrency,
                salt=salt,
                order=order,
                log=log,
            )
            repeats.append(repeat)
            say(f"repeat {number + 1}: {repeat.gain:.2f} times, {repeat.gain_with_edit:.2f} with the edits")
    return repeats


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", type=Path, help="folder of the model (default: SmolLM2-135M-Instruct)")
    add("--editor", default="streaming-llm", choices=editors.names(), help="what drops tokens (%(default)s)")
    add("--keep", type=float, default=0.5, metavar="RATIO", help="share of the tokens that it keeps (%(default)s)")
    add("--prompts", type=int, default=16, metavar="N", help="how many (%(default)s)")
    add("--max-concurrency", type=int, default=8, metavar="N", help="requests at the engine at once (%(default)s)")
    add("--shortest", type=int, default=500, metavar="TOKENS", help="shortest prompt (%(default)s)")
    add("--longest", type=int, default=2000, metavar="TOKENS", help="longest prompt (%(default)s)")
    add("--output-tokens", type=int, default=192, metavar="TOKENS", help="tokens of each answer (%(default)s)")
    add(
        "--kv-tokens",
        type=int,
        default=4000,
        metavar="TOKENS",
        help="tokens of KV that vLLM has room for (%(default)s)",
    )
    add("--repeats", type=int, default=3, metavar="N", help="every other one with the arms reversed (%(default)s)")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help=f"defaults for a short look: {QUICK}")
    add("--log-dir", type=Path, metavar="DIR", help="keep the servers' logs there")
    add("--json", type=Path, metavar="PATH", help="write the last line there, too, with the machine and each repeat")
    options = parser.parse_args()
    if options.quick:
        parser.set_defaults(**QUICK)
        options = parser.parse_args()
    return options


def main() -> int:
    options = arguments()
    try:
        return run(options)
    except LMCacheError as error:
        say(str(error))
        return 2 if isinstance(error, UsageError) else 1


def run(options: argparse.Namespace) -> int:
    from transformers import AutoTokenizer

    from lmcache_stream.engine import ensure_smollm2

    model = options.model or ensure_smollm2()
    geometry = KVGeometry.from_config(model)
    bytes_per_token = geometry.planes * geometry.num_layers * geometry.hidden_dim * 4
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = draw_prompts(tokenizer, options.prompts, options.shortest, options.longest, options.seed)
    total = sum(map(len, prompts))
    longest = options.longest + options.output_tokens + 1
    at_once = min(options.max_concurrency, len(prompts))
    needed = at_once * (total // len(prompts) + options.output_tokens)
    if not longest <= options.kv_tokens < needed:
        raise UsageError(
            f"--kv-tokens must have room for the longest request ({longest}) and not for {at_once} of them ({needed}), "
            "or memory is no bottleneck"
        )
    blocks = options.kv_tokens // BLOCK + 1  # vLLM keeps one to itself
    with tempfile.TemporaryDirectory(prefix="headline-") as logs:
        stack = ServingStack(
            StackOptions(
                model=model,
                dtype="float32",
                device="cpu",
                block_size=BLOCK,
                max_model_len=longest,
                l1_gib=math.ceil(3 * total * bytes_per_token / 2**30),
                log_dir=options.log_dir or Path(logs),
                vllm_args=("--num-gpu-blocks-override", str(blocks)),
            )
        )
        repeats = asyncio.run(measure(options, stack, prompts))
    workload = {
        "model": model.name,
        "dtype": "float32",
        "editor": options.editor,
        "keep": options.keep,
        "prompts": len(prompts),
        "prompt_tokens": [options.shortest, options.longest],
        "prompt_tokens_total": total,
        "output_tokens": options.output_tokens,
        "max_concurrency": options.max_concurrency,
        "kv_tokens": options.kv_tokens,
        "kv_bytes": options.kv_tokens * bytes_per_token,
        "repeats": options.repeats,
        "seed": options.seed,
    }
    found = summary(repeats, workload, bytes_per_token)
    title = (
        f"{len(prompts)} prompts of {options.shortest} to {options.longest} tokens, {options.output_tokens} out, "
        f"{options.editor} keep {options.keep:g}, room for {options.kv_tokens} tokens of KV"
    )
    show(repeats, title, bytes_per_token, len(prompts))
    facts = machine()
    print(f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, Python {facts['python']}")
    if found["no_headline"]:
        print(found["no_headline"])
    else:
        print(f"gain {found['gain']:.2f}, with the edits {found['gain_with_edit']:.2f} (medians of {len(repeats)})")
    if options.json is not None:
        command = shlex.join(["python", "benchmarks/headline.py", *sys.argv[1:]])
        detail = {"arms": [asdict(repeat) for repeat in repeats], "command": command, "machine": facts}
        options.json.write_text(json.dumps({**found, **detail}, indent=1) + "\n")
    print(json.dumps(rounded(found)), flush=True)
    return 1 if found["no_headline"] else 0


if __name__ == "__main__":
    sys.exit(main())
