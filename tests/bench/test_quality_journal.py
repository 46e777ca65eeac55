from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_stream.bench.journal import Edited, Journal, Outcome, Record
from lmcache_stream.errors import UsageError

SETTINGS = {"model": "tiny", "seed": "0"}


def record(id: str, nll: float = 1.0) -> Record:
    outcome = Outcome(nll=nll, agreement=1.0, exact=True)
    return Record(
        group="text",
        id=id,
        cluster="d",
        depth=None,
        prefill_s=0.1,
        full={"true": outcome},
        edited={"v": Edited(kept=3, edit_s=0.0, score_s=0.0, probes={"true": outcome})},
    )


def test_what_was_added_is_there_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path, SETTINGS) as journal:
        journal.add(record("a"))
        journal.add(record("b"))
        journal.add(record("a", nll=2.0))
    with Journal(path, SETTINGS) as journal:
        assert journal.get("text", "a") == record("a", nll=2.0)
        assert journal.get("text", "b") == record("b")
        assert journal.get("other", "b") is None


def test_a_broken_last_line_is_dropped_and_written_over(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path, SETTINGS) as journal:
        journal.add(record("a"))
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[-1][:20])
    with Journal(path, SETTINGS) as journal:
        journal.add(record("b"))
    with Journal(path, SETTINGS) as journal:
        assert journal.get("text", "a") == record("a")
        assert journal.get("text", "b") == record("b")


def test_other_conditions_are_refused_by_name(tmp_path: Path) -> None:
    Journal(tmp_path / "journal", SETTINGS).close()
    with pytest.raises(UsageError, match="seed 0, not 1"):
        Journal(tmp_path / "journal", {**SETTINGS, "seed": "1"})


def test_a_label_means_one_thing(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path, SETTINGS) as journal:
        journal.define("v", "snapkv(window=32)")
    size = path.stat().st_size
    with Journal(path, SETTINGS) as journal:
        journal.define("v", "snapkv(window=32)")
        assert path.stat().st_size == size
        with pytest.raises(UsageError, match="window=8"):
            journal.define("v", "snapkv(window=8)")


def test_another_file_is_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("Hello.\n")
    with pytest.raises(UsageError, match="no journal"):
        Journal(path, SETTINGS)
    assert path.read_text() == "Hello.\n"


def test_without_a_file_it_is_in_memory() -> None:
    with Journal(None, SETTINGS) as journal:
        journal.add(record("a"))
        assert journal.get("text", "a") == record("a")
