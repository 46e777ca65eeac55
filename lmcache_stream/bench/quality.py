"""How much of a model's answers each editor keeps: `lmcache-stream bench quality`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch

from lmcache_stream.bench.announce import find_smollm2, say
from lmcache_stream.bench.experiment import CONTINUATIONS, Plan, measure
from lmcache_stream.bench.quality_report import show, to_json, write_plot
from lmcache_stream.bench.tasks import DEPTHS, TASKS
from lmcache_stream.bench.texts import load_corpus
from lmcache_stream.bench.variants import LeftOut, default_variants, make_variants
from lmcache_stream.console import add_json_file
from lmcache_stream.editors import registry
from lmcache_stream.editors.base import Scope
from lmcache_stream.engine.model import CausalLM, load_model, load_tokenizer
from lmcache_stream.errors import UsageError
from lmcache_stream.plots.look import require_matplotlib

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `lmcache-stream bench quality` takes."""
    parser.description = (
        "Prefill texts, edit their KV in every way asked for, and see how the model goes on: negative log-likelihood\n"
        "of what follows against all KV, how often the likeliest token is the same, and answers to questions about\n"
        "facts in the prompt. Intervals are of 95 %, differences are paired. With --json FILE, what was measured is\n"
        "kept text by text in FILE.journal: the same command goes on after an interruption."
    )
    parser.usage = "%(prog)s [OPTION ...]"
    what = parser.add_argument_group("what is measured")
    what.add_argument("--model", type=Path, metavar="PATH", help="folder of a Hugging Face model (SmolLM2-135M)")
    what.add_argument(
        "--editor", action="append", metavar="NAME[:k=v,...]", help="an editor with parameters; repeat (all editors)"
    )
    what.add_argument(
        "--scope", action="append", choices=get_args(Scope), help="where tokens are selected; repeat (shared)"
    )
    what.add_argument(
        "--keep", action="append", type=_keep, metavar="RATIO", help="KV to keep; repeat (0.9, 0.7, 0.5, 0.3, 0.1)"
    )
    what.add_argument("--window", type=_natural, default=32, metavar="N", help="last tokens that are always kept (32)")
    what.add_argument(
        "--baseline", default="streaming-llm", metavar="NAME", help="compare editors with (streaming-llm)"
    )
    on = parser.add_argument_group("on what")
    on.add_argument("--corpus", default="speeches", metavar="TEXTS", help="speeches, python, or .txt files (speeches)")
    on.add_argument(
        "--texts", type=_count_or_auto, default=20, metavar="N", help="texts; auto: as many as a pilot says (20)"
    )
    on.add_argument("--max-texts", type=_count, default=600, metavar="N", help="most texts with --texts auto (600)")
    on.add_argument("--pilot", type=_count, default=20, metavar="N", help="texts of the pilot of --texts auto (20)")
    on.add_argument(
        "--half-width", type=_positive, default=0.015, metavar="NATS", help="what --texts auto aims for (0.015)"
    )
    on.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS), help="questions to ask (all)")
    on.add_argument(
        "--task-samples",
        type=_count,
        metavar="N",
        help="questions a task and form, through ten depths (as many as texts, 10 to 100)",
    )
    on.add_argument(
        "--continuation", choices=[*CONTINUATIONS, "both"], default="both", help="what should follow a text (both)"
    )
    on.add_argument("--prompt-tokens", type=_count, default=704, metavar="N", help="tokens that are edited (704)")
    on.add_argument("--new-tokens", type=_count, default=63, metavar="N", help="tokens that are scored after them (63)")
    on.add_argument("--chunk-size", type=_count, default=32, metavar="N", help="tokens a cache chunk (32)")
    on.add_argument("--seed", type=int, default=0, help="seed of texts, tasks and random editors (0)")
    out = parser.add_argument_group("results")
    add_json_file(out)
    out.add_argument(
        "--plot", type=Path, action="append", default=[], metavar="OUT", help="draw quality over the share kept; repeat"
    )


def run(options: argparse.Namespace) -> None:
    """Run `lmcache-stream bench quality`."""
    plan, left_out = _plan(options)
    if options.model is not None and not (options.model / "config.json").is_file():
        raise UsageError(
            f"--model {options.model} is no folder of a model: it takes one with config.json, weights and tokenizer"
        )
    if options.json is not None:
        options.json.check()
    for path in options.plot:
        if not path.absolute().parent.is_dir():
            raise UsageError(f"cannot write {path}: there is no such folder")
    for path in options.plot:
        require_matplotlib()
        if path.suffix not in (".png", ".svg", ".pdf"):
            raise UsageError(f"{path}: a plot ends in .png, .svg or .pdf")
    corpus = load_corpus(options.corpus)
    folder = options.model or find_smollm2()
    lm = CausalLM(load_model(folder, torch.float32), chunk_size=plan.chunk_size, queries=plan.queries)
    file = options.json.path if options.json is not None else None
    journal = file.with_name(file.name + ".journal") if file is not None else None
    try:
        report = measure(
            lm,
            load_tokenizer(folder),
            corpus,
            plan,
            journal=journal,
            left_out=left_out,
            tolerant=not options.editor,
            progress=None,
        )
    except KeyboardInterrupt:
        if journal is not None:
            say(f"The same command goes on where it stopped; what it has is in {journal}.")
        raise
    finally:
        lm.close()
    if options.json is not None:
        options.json.write_text(to_json(report))
    for path in options.plot:
        write_plot(report, path)
    show(report)


def _plan(options: argparse.Namespace) -> tuple[Plan, list[LeftOut]]:
    name, *parameters = options.baseline.split(",")
    registry.find(name)  # raises, with the choices
    crossed: dict[str, Any] = {
        "scopes": options.scope or ["shared"],
        "keeps": options.keep or [0.9, 0.7, 0.5, 0.3, 0.1],
        "window": options.window,
        "seed": options.seed,
    }
    left_out: list[LeftOut] = []
    if options.editor:
        variants = make_variants(options.editor, **crossed)
    else:
        variants, left_out = default_variants(**crossed)
    whole_rounds = math.ceil(min(options.texts or 100, 100) / DEPTHS) * DEPTHS
    plan = Plan(
        variants=variants,
        texts=options.texts,
        pilot=options.pilot,
        half_width=options.half_width,
        max_texts=options.max_texts,
        tasks=options.tasks,
        task_samples=options.task_samples or whole_rounds,
        continuations=CONTINUATIONS if options.continuation == "both" else (options.continuation,),
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        chunk_size=options.chunk_size,
        window=options.window,
        baseline=",".join([registry.canonical(name), *parameters]),
        seed=options.seed,
    )
    return plan, left_out


def _number(text: str, kind: Callable[[str], Any], valid: Callable[[Any], bool], what: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not valid(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def _keep(text: str) -> float | int:
    kind: Callable[[str], float | int] = float if "." in text else int
    keep: float | int = _number(
        text,
        kind,
        lambda value: value > 0 and (isinstance(value, int) or value <= 1),
        "a ratio above 0.0 and up to 1.0, or a count",
    )
    return keep


def _count(text: str) -> int:
    return int(_number(text, int, lambda value: value >= 1, "a count of at least 1"))


def _natural(text: str) -> int:
    return int(_number(text, int, lambda value: value >= 0, "a count"))


def _positive(text: str) -> float:
    return float(_number(text, float, lambda value: value > 0, "a positive number"))


def _count_or_auto(text: str) -> int | None:
    return None if text == "auto" else _natural(text)
