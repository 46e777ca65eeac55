"""The main job on real input: prefill, drop half of the KV, decode; and what that does to the answers."""

from __future__ import annotations

import argparse
import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from lmcache_stream.bench.announce import find_smollm2, say
from lmcache_stream.bench.config import EditorSpec, ServeOptions, load_options
from lmcache_stream.bench.interrupts import run_until_interrupt
from lmcache_stream.bench.live import table_width
from lmcache_stream.bench.prompts import Prompt, read_prompts, shipped_prompts
from lmcache_stream.console import add_json_file, open_console
from lmcache_stream.errors import UsageError

if TYPE_CHECKING:
    from lmcache_stream.batch import AsyncBatchedStream
    from lmcache_stream.bench.datasets import Tokenizer
    from lmcache_stream.bench.place import Place
    from lmcache_stream.editors import Editor
    from lmcache_stream.metrics import Metrics

__all__ = ["Answer", "Report", "add_arguments", "run", "run_demo"]


@dataclass(frozen=True)
class Answer:
    """One question, answered twice from one prefill.

    Args:
        question: What was asked.
        full: The answer with all of the prompt's KV.
        edited: The answer with the edited KV.
        tokens_before: Tokens of KV before the edit.
        tokens_after: Tokens of KV after it.
    """

    question: str
    full: str
    edited: str
    tokens_before: int
    tokens_after: int


@dataclass(frozen=True)
class Report:
    """What the demo found: a report for each phase of the edited streams, and the answers, one a prompt."""

    prefill: Metrics
    modify: Metrics
    decode: Metrics
    answers: list[Answer]

    def to_dict(self) -> dict[str, object]:
        """`{"prefill": ..., "modify": ..., "decode": ..., "answers": [...]}`, ready for JSON."""
        return {
            "prefill": self.prefill.to_dict(),
            "modify": self.modify.to_dict(),
            "decode": self.decode.to_dict(),
            "answers": [asdict(answer) for answer in self.answers],
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `lmcache-stream demo` takes."""
    parser.description = (
        "Ask a small language model questions about long texts: prefill all prompts, drop half of their KV, decode.\n"
        "Print a table for each phase, and each answer with all of the KV beside the one with what was kept.\n"
        "The model, its engine and the KV cache run in this process, unless the addresses of a vLLM and an LMCache\n"
        "server are given."
    )
    parser.epilog = (
        'A line of FILE is {"context": TEXT, "question": TEXT}, put into the model\'s chat template, or\n'
        '{"prompt": TEXT}, taken as it is. Both may have an "answer": words that a right answer contains.'
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="prompts as JSON lines, instead of the shipped six"
    )
    parser.add_argument(
        "--keep", type=_keep, default=0.5, metavar="N", help="KV to keep: a ratio such as 0.5, or a count such as 256"
    )
    parser.add_argument(
        "--editor",
        default="streaming-llm",
        metavar="NAME[:k=v,...]",
        help="what edits the KV, with parameters; `lmcache-stream editors` lists them (streaming-llm)",
    )
    parser.add_argument("--max-tokens", type=_count, default=48, metavar="N", help="tokens to decode a prompt (48)")
    add_json_file(parser)
    parser.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="folder of another Hugging Face model (SmolLM2-135M); with servers, where its tokenizer lies",
    )
    servers = parser.add_argument_group("servers")
    servers.add_argument("--base-url", metavar="URL", help="a running vLLM, such as http://localhost:8000")
    servers.add_argument("--kv-url", metavar="URL", help="its LMCache server's requests, such as tcp://localhost:5555")
    servers.add_argument("--kv-http-url", metavar="URL", help="the same server's HTTP, such as http://localhost:8080")
    servers.add_argument(
        "--kv-model", metavar="NAME", help="the model's name there, which is vLLM's --model, if it knows several"
    )


def run(options: argparse.Namespace) -> None:
    """Run `lmcache-stream demo`: everything that can be wrong with the options is found before the work begins."""
    prompts = read_prompts(options.prompts) if options.prompts else shipped_prompts()
    if options.json is not None:
        options.json.check()
    if options.model is not None and not options.model.is_dir():
        raise UsageError(f"{options.model} is no folder: --model takes a folder with config.json and the weights")
    spec, editor = _editor(options.editor, options.keep)
    place = _place(options, spec, editor)
    reports: list[Report] = []

    async def work() -> None:
        reports.append(await run_demo(place, prompts, editor, options.max_tokens))

    if run_until_interrupt(work, say):
        raise KeyboardInterrupt
    (report,) = reports
    if options.json is not None:
        options.json.write(report.to_dict())
    show(report, prompts, str(spec))


async def run_demo(
    place: AbstractAsyncContextManager[Place], prompts: list[Prompt], editor: Editor, max_tokens: int
) -> Report:
    """Prefill `prompts` at `place`, edit their KV, and decode with and without the edit.

    Both answers of a prompt go on from one prefill, at temperature 0. Its first token, which the engine samples at the
    end of the prefill, is part of both.
    """
    from lmcache_stream.batch import AsyncBatchedStream
    from lmcache_stream.stream import AsyncLMCacheStream

    greedy: dict[str, Any] = {"temperature": 0}
    async with place as at:
        assert at.cache is not None
        if not at.tokenizer.exact and any(prompt.chat for prompt in prompts):
            raise UsageError(f"the chat template of {at.model} is not here: --model takes the model's folder")
        say(f"Prompts to {at.model} at {at.engine.base_url}: {len(prompts)}.")
        full, edited = AsyncBatchedStream(), AsyncBatchedStream()
        for number, prompt in enumerate(prompts, 1):
            token_ids = await asyncio.to_thread(_token_ids, prompt, at.tokenizer)
            if len(token_ids) < at.cache.chunk_size:
                raise UsageError(
                    f"prompt {number} has {len(token_ids)} tokens, and KV is cached in chunks of "
                    f"{at.cache.chunk_size}: take longer prompts"
                )
            edited.add(AsyncLMCacheStream(at.cache, at.engine, token_ids))
        prefill = await edited.prefill(greedy, width=table_width())
        full.extend([await stream.fork() for stream in edited])
        modify = await edited.modify(editor, width=table_width())
        decode = await edited.decode({**greedy, "max_tokens": max_tokens}, width=table_width())
        await full.run_streams({**greedy, "max_tokens": max_tokens})
        return Report(prefill, modify, decode, _answers(prompts, full, edited))


def show(report: Report, prompts: list[Prompt], edit: str) -> None:
    """Print the tables of the phases, then every answer with all of its KV beside the one with the edited KV."""
    for metrics in (report.prefill, report.modify, report.decode):
        metrics.emit()
    console = open_console(width=table_width())
    table = Table(title=Text("Answers", style="bold"), title_justify="left", box=box.ROUNDED, show_lines=True)
    for column, ratio in (("Question", 4), ("With all of its KV", 5), (f"With {edit}", 5)):
        table.add_column(column, ratio=ratio, overflow="fold")
    for answer in report.answers:
        tokens = f"\n({answer.tokens_after} of {answer.tokens_before} tokens)"
        table.add_row(Text(answer.question), Text(answer.full), Text(answer.edited).append(tokens, style="dim"))
    console.print(table)
    console.print(Text("The first token of each answer comes from the prefill, before the edit."))
    if score := _score(prompts, report.answers):
        console.print(Text(score))


def _token_ids(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    text = tokenizer.chat(prompt.text) if prompt.chat else prompt.text
    return tokenizer.encode(text, special_tokens=text == prompt.text)  # a template writes its own


def _answers(prompts: list[Prompt], full: AsyncBatchedStream, edited: AsyncBatchedStream) -> list[Answer]:
    answers = []
    for prompt, with_all, with_edit in zip(prompts, full, edited, strict=True):
        receipt = edited.receipts[with_edit.stream_id()]
        answers.append(
            Answer(
                question=prompt.question,
                full=with_all.output_text().strip(),
                edited=with_edit.output_text().strip(),
                tokens_before=receipt.tokens_before,
                tokens_after=receipt.tokens_after,
            )
        )
    return answers


def _score(prompts: list[Prompt], answers: list[Answer]) -> str | None:
    known = [(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True) if prompt.answer is not None]
    if not known:
        return None
    full = sum(bool(prompt.is_answered_by(answer.full)) for prompt, answer in known)
    edited = sum(bool(prompt.is_answered_by(answer.edited)) for prompt, answer in known)
    return (
        f"Answers that contain the expected words: {full} of {len(known)} with all of the KV, {edited} with the edit."
    )


def _editor(asked: str, keep: float | int) -> tuple[EditorSpec, Editor]:
    from lmcache_stream.bench.dropping import droppers, make_editor

    spec = EditorSpec.parse(asked)
    if len(droppers(make_editor(spec))) == 1:
        spec = spec.with_keep(keep)
    return spec, make_editor(spec)


def _place(options: argparse.Namespace, spec: EditorSpec, editor: Editor) -> AbstractAsyncContextManager[Place]:
    from lmcache_stream.bench.place import open_place

    urls = {"base_url": options.base_url, "kv_url": options.kv_url, "kv_http_url": options.kv_http_url}
    if all(urls.values()):
        if "queries" in editor.needs:
            raise UsageError(f"{spec.name} needs the prompts' queries, which vLLM does not offload: take another")
        tokenizer = str(options.model) if options.model is not None else None
        flags = {**urls, "kv_model": options.kv_model, "tokenizer": tokenizer, "editor": [spec]}
        return open_place(load_options(flags, environ={}))
    if any((*urls.values(), options.kv_model)):
        raise UsageError("--base-url, --kv-url and --kv-http-url go together: give all three, or none")
    model = str(options.model or find_smollm2())
    return open_place(ServeOptions(model=model, editor=[spec]), queries="queries" in editor.needs)


def _keep(text: str) -> float | int:
    try:
        keep: float | int = float(text) if "." in text else int(text)
    except ValueError:
        keep = 0
    if keep <= 0 or (isinstance(keep, float) and not keep <= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a ratio above 0.0 and up to 1.0 nor a count")
    return keep


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count of at least 1")
    return int(text)
