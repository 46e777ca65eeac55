"""`lmcache-stream bench serve`: prefill, edit and decode many prompts, measured as `vllm bench serve` measures."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lmcache_stream import __version__
from lmcache_stream.bench import announce
from lmcache_stream.bench.config import EditorSpec, ServeOptions, add_flags, load_options
from lmcache_stream.bench.interrupts import INTERRUPTED, run_until_interrupt
from lmcache_stream.bench.quality_lines import read_quality
from lmcache_stream.console import add_json_flag
from lmcache_stream.errors import UsageError

if TYPE_CHECKING:
    from lmcache_stream.bench.records import Ledger
    from lmcache_stream.bench.result import Run
    from lmcache_stream.editors import Editor
    from lmcache_stream.journal import Journal

__all__ = ["add_arguments", "bench_serve", "run"]

JOURNAL_SUFFIX: Final = ".journal.jsonl"
REPORT_SUFFIX: Final = ".report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `lmcache-stream bench serve` takes."""
    parser.description = (
        "Send many prompts to an engine and measure it in the terms of `vllm bench serve`.\n"
        "With an --editor: prefill all prompts, edit their KV, decode; each phase is measured apart.\n"
        "Without --base-url, model, engine and KV cache run in this process."
    )
    parser.epilog = (
        "Each option may also stand in the environment (LMCACHE_STREAM_NUM_PROMPTS is --num-prompts) or in the file\n"
        "of --config (num-prompts = 100). Flags count more than the environment, and that more than the file."
    )
    add_flags(parser)
    add_json_flag(parser)


def run(options: argparse.Namespace) -> int:
    """Run `lmcache-stream bench serve`; 1 when no request succeeded, 130 when Ctrl-C ended it early."""
    result = bench_serve(vars(options))
    if options.json is not None:
        options.json.write(result)
    if result["lmcache_stream"]["interrupted"]:
        return INTERRUPTED
    return 0 if result["completed"] else 1


def bench_serve(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: str | os.PathLike[str] | None = None,
    say: Callable[[str], object] | None = None,
    **given: Any,
) -> dict[str, Any]:
    """Run a benchmark, print its tables, and write result, report and journal if `save_result` says so.

    Ctrl-C ends it: what was done so far is in the result, which says `interrupted`.

    Args:
        flags, environ, file, given: The options; see `load_options`.
        say: Takes lines about what goes on; None: standard error.

    Returns:
        The result, as it is written.

    Raises:
        UsageError: Options that cannot be right, a server that cannot be reached, a model that is not served, or an
            event loop runs in this thread.
        OSError: A file cannot be written.
    """
    _refuse_a_running_loop()
    options = load_options(flags, environ=environ, file=file, **given)
    bench = _Bench(options, say or announce.say)
    try:
        interrupted = run_until_interrupt(bench.measure, say or announce.say)
        if bench.ran is None:
            raise KeyboardInterrupt
        return bench.finish(interrupted=interrupted)
    finally:
        bench.close()


class _Bench:
    """One call of the benchmark: everything that can be wrong is found before the work begins."""

    def __init__(self, options: ServeOptions, say: Callable[[str], object]) -> None:
        from lmcache_stream.bench.datasets import check_file

        self.options = options
        self.ran: Run | None = None
        self._say = say
        self._editors = _editors(options)
        if options.dataset_path is not None:
            check_file(options.dataset_path)
        self._quality = read_quality(options.quality) if options.quality is not None else None
        self._ledger: Ledger | None = None
        self._journal: Journal | None = None
        self._result_path: Path | None = None
        folder = options.result_dir or Path()
        if options.save_result or options.resume:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"cannot make --result-dir {folder}: {error.strerror}") from error
        self._folder = folder

    async def measure(self) -> None:
        from lmcache_stream.bench.datasets import check_asked_lengths, check_lengths, digest, load_samples
        from lmcache_stream.bench.live import Live
        from lmcache_stream.bench.place import open_place
        from lmcache_stream.bench.records import Ledger
        from lmcache_stream.bench.result import Run
        from lmcache_stream.bench.runner import Runner

        options = self.options
        queries = any("queries" in editor.needs for editor in self._editors.values())
        async with open_place(options, queries=queries) as place:
            check_asked_lengths(options, place.max_model_len)
            samples = await asyncio.to_thread(load_samples, options, place.tokenizer)
            check_lengths(samples, place.max_model_len)
            date = datetime.now().strftime("%Y%m%d-%H%M%S")
            ledger = Ledger()
            live = Live(enabled=not options.disable_tqdm)
            runner = Runner(options, place, samples, self._editors, ledger, live)
            prompts = digest(samples)
            self._open_journal(ledger, _header(options, list(self._editors), place.model, prompts), place.model, date)
            self._ledger = ledger
            ran = Run(
                options=options,
                editors=list(self._editors),
                model=place.model,
                tokenizer=place.tokenizer.name,
                base_url=place.engine.base_url,
                embedded=place.embedded,
                samples=prompts,
                count=len(samples),
                date=date,
                version=__version__,
            )
            self.ran = ran
            self._say(f"prompts to {place.model} at {place.engine.base_url}: {len(samples):,}")
            if place.embedded and "num_prompts" not in options.model_fields_set:
                self._say("the embedded engine takes hours for that: Ctrl-C ends it, --num-prompts 8 is a first look")
            try:
                with live.showing():
                    await runner.run()
            finally:
                self.ran = replace(ran, repeated=runner.repeated)

    def finish(self, *, interrupted: bool) -> dict[str, Any]:
        from lmcache_stream.bench.live import table_width
        from lmcache_stream.bench.report import render_report, tables
        from lmcache_stream.bench.result import build_result
        from lmcache_stream.bench.result_file import write_result

        assert self.ran is not None
        assert self._ledger is not None
        result = build_result(replace(self.ran, interrupted=interrupted), self._ledger)
        if not self._ledger.is_empty:
            for table in tables(result, table_width()):
                table.emit()
        if self._result_path is not None:
            write_result(self._result_path, json.dumps(result) + "\n")
            report = self._result_path.with_name(self._result_path.stem + REPORT_SUFFIX)
            write_result(report, render_report([(self._result_path.name, result)], self._quality))
            self._say(f"wrote {self._result_path} and {report}")
        if interrupted:
            go_on = f": --resume {self._journal.path} goes on" if self._journal is not None else ""
            done = "before any request ended" if self._ledger.is_empty else "with what was done so far in the result"
            self._say(f"interrupted, {done}{go_on}")
        failed = self._ledger.failures()
        if failed:
            self._say(f"{len(failed)} failed, the first: {failed[0]}")
        ours = result["lmcache_stream"]
        for one in (ours, *ours["other_runs"]):
            if one["edit_taken_ratio"] is not None and one["edit_taken_ratio"] < 1:
                self._say(
                    f"{one['run']}: the engine took only {one['edit_taken_ratio']:.1%} of the edited tokens from the "
                    "cache and computed the rest from their ids, so these figures are not those of the edit"
                )
        return result

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _open_journal(self, ledger: Ledger, header: dict[str, Any], model: str, date: str) -> None:
        from lmcache_stream.journal import Journal

        options = self.options
        if not options.save_result and not options.resume:
            return
        if options.resume:
            path = options.resume if isinstance(options.resume, Path) else self._journal_to_resume(header)
            self._journal, content = Journal.reopen(path)
            _check_same(path, content.header, header)
            ledger.restore(content)
            name = path.name.removesuffix(JOURNAL_SUFFIX) + ".json"
            self._result_path = path.with_name(options.result_filename or name)
            self._say(f"going on with {path}: {ledger.resumed} records are there already")
        else:
            self._result_path = self._folder / (options.result_filename or _file_name(options, model, date))
            path = self._journal_path(self._result_path)
            if path.exists():
                raise UsageError(f"{path} is there already: go on with it by --resume, or take another name")
            self._journal = Journal.create(path, header)
        ledger.write_to(self._journal)

    def _journal_path(self, result: Path) -> Path:
        return result.with_name(result.name.removesuffix(".json") + JOURNAL_SUFFIX)

    def _journal_to_resume(self, header: dict[str, Any]) -> Path:
        """The journal of the named result, or the newest in the folder that fits these options."""
        from lmcache_stream.journal import read_journal

        if self.options.result_filename is not None:
            return self._journal_path(self._folder / self.options.result_filename)
        found = sorted(self._folder.glob("*" + JOURNAL_SUFFIX), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in found:
            try:
                if read_journal(path).header == header:
                    return path
            except UsageError:
                continue
        raise UsageError(
            f"--resume: {self._folder.absolute()} has no journal of a run with these options; name one, or run with "
            "--save-result first"
        )


def _refuse_a_running_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UsageError("bench_serve runs an event loop of its own: inside one, await asyncio.to_thread(bench_serve, ...)")


def _editors(options: ServeOptions) -> dict[str, Editor]:
    """Editor by name of its run."""
    from lmcache_stream.bench.dropping import make_editor

    found: dict[str, Editor] = {}
    for spec in options.editors:
        if str(spec) in found:
            raise UsageError(f"--editor {spec} is there twice")
        found[str(spec)] = make_editor(spec)
        if options.edit_every is not None:
            _check_again_and_again(spec, found[str(spec)])
    return found


def _check_again_and_again(spec: EditorSpec, editor: Editor) -> None:
    """What `--edit-every` cannot be done with."""
    from lmcache_stream.bench.dropping import droppers

    for keep in (one.keep for one in droppers(editor)):
        if isinstance(keep, float):
            raise UsageError(
                f"--edit-every with a ratio drops that share again at each edit, until next to nothing is left of the "
                f"prompt: give {spec.name} a count of tokens instead of {keep:g}, such as --keep 512"
            )
    if "queries" in editor.needs:
        raise UsageError(
            f"--edit-every does not go with {spec.name}: it needs the queries of all tokens, and after the first edit "
            "the cache has none; take an editor that looks at the KV alone, such as keydiff, knorm or streaming-llm"
        )


def _header(options: ServeOptions, editors: list[str], model: str, samples: str) -> dict[str, Any]:
    """What must be the same for a run to be taken up again."""
    same = ("seed", "request_rate", "burstiness", "max_concurrency", "max_kv_bytes", "modify_concurrency", "edit_every")
    told = json.loads(options.model_dump_json(include={*same, "compare_baseline"}))
    return {
        "of": "bench serve",
        "model": model,
        "samples": samples,
        "editors": editors,
        "sampling_params": options.sampling_params,
        **told,
    }


def _check_same(path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            raise UsageError(
                f"{path} belongs to another run: {name} is {_short(there.get(name))} there and "
                f"{_short(here.get(name))} here"
            )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _file_name(options: ServeOptions, model: str, date: str) -> str:
    bound = f"-concurrency{options.max_concurrency}" if options.max_concurrency is not None else ""
    return f"vllm-{options.request_rate}qps{bound}-{model.rstrip('/').rsplit('/', 1)[-1]}-{date}.json"
