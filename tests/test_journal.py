from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_stream.errors import UsageError
from lmcache_stream.journal import Journal, read_journal


class Entry(msgspec.Struct):
    number: int
    text: str = ""


def write(path: Path, *entries: object) -> None:
    with Journal.create(path, {"of": "tests"}) as journal:
        for entry in entries:
            journal.append(entry)


def numbers(path: Path) -> list[int]:
    return [entry.number for entry in read_journal(path).entries(Entry)]


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, Entry(1, "line\nbreak"), {"number": 2})
    content = read_journal(path)
    assert content.header == {"of": "tests"}
    assert list(content.entries(Entry)) == [Entry(1, "line\nbreak"), Entry(2)]


def test_an_entry_is_there_before_the_journal_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal.create(path, {})
    journal.append(Entry(1))
    assert numbers(path) == [1]
    journal.close()
    journal.close()


def test_going_on_appends(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, Entry(1))
    journal, content = Journal.reopen(path)
    with journal:
        journal.append(Entry(2))
    assert [entry.number for entry in content.entries(Entry)] == [1]
    assert numbers(path) == [1, 2]


def test_open_begins_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for known in range(3):
        journal, content = Journal.open(path, {"of": "tests"})
        with journal:
            assert content.header == {"of": "tests"}
            assert [entry.number for entry in content.entries(Entry)] == list(range(known))
            journal.append(Entry(known))
    with pytest.raises(UsageError, match="No such file"):
        Journal.open(tmp_path / "none" / "journal.jsonl", {})


@pytest.mark.parametrize("torn", [b"", b"{", b'{"journal":1,"of":"tests"}'])
def test_open_begins_anew_after_a_torn_header(torn: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(torn)
    journal, content = Journal.open(path, {"of": "tests"})
    with journal:
        journal.append(Entry(1))
    assert content.lines == ()
    assert numbers(path) == [1]


def test_open_leaves_another_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "other"
    for content in (b"nonsense", b"nonsense\n", b'{"journal":1,"of":"test'):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="no journal"):
            Journal.open(path, {"of": "other"})
        assert path.read_bytes() == content


def test_going_on_where_this_process_stopped(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, Entry(1))
    size = path.stat().st_size
    with Journal.go_on(path, size) as journal:
        assert journal.size == size
        journal.append(Entry(2))
    assert numbers(path) == [1, 2]
    with pytest.raises(UsageError, match="somebody else has written"):
        Journal.go_on(path, size)
    path.unlink()
    with pytest.raises(UsageError, match="there is no journal"):
        Journal.go_on(path, size)


@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_cut_anywhere_only_torn_entries_are_lost(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    write(path, *(Entry(number, "x" * number) for number in range(5)))
    whole = path.read_bytes()
    cut = data.draw(st.integers(min_value=whole.index(b"\n") + 1, max_value=len(whole)))
    path.write_bytes(whole[:cut])
    left = whole[:cut].count(b"\n") - 1
    assert numbers(path) == list(range(left))
    journal, _ = Journal.reopen(path)
    with journal:
        journal.append(Entry(99))
    assert numbers(path) == [*range(left), 99]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, Entry(1), Entry(2))
    path.write_bytes(path.read_bytes().replace(b'{"number":1', b'{"number":x'))
    with pytest.raises(UsageError, match=r"journal\.jsonl, line 2"):
        numbers(path)


@pytest.mark.parametrize("content", [b"", b"{}\n", b"[1]\n", b"nonsense\n", b'{"journal": 1'])
def test_another_file_is_refused_and_left_alone(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="no journal"):
        Journal.reopen(path)
    assert path.read_bytes() == content


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"journal": 2}\n')
    with pytest.raises(UsageError, match="format 2"):
        read_journal(path)


def test_a_journal_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, Entry(1))
    with pytest.raises(UsageError, match="exists already"):
        Journal.create(path, {})
    assert numbers(path) == [1]


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_journal(tmp_path / "none")
    with pytest.raises(UsageError, match="cannot write"):
        Journal.create(tmp_path / "none" / "journal.jsonl", {})


def test_only_one_writes(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal.create(path, {})
    with pytest.raises(UsageError, match="another process"):
        Journal.reopen(path)
    journal.close()
    Journal.reopen(path)[0].close()


def test_a_closed_journal_says_so(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "journal.jsonl", {})
    journal.close()
    with pytest.raises(UsageError, match="closed"):
        journal.append(Entry(1))


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    program = """
import resource, signal, sys
from lmcache_stream.journal import Journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Journal.create(sys.argv[1], {})
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    for number in range(100):
        journal.append({"number": number, "text": "x" * 90})
except OSError:
    print(number)
"""
    path = tmp_path / "journal.jsonl"
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=60, check=True)
    written = int(done.stdout)
    assert 0 < written < 100
    assert path.read_bytes().endswith(b"\n")
    assert numbers(path) == list(range(written))


def test_it_survives_the_end_of_its_process(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from lmcache_stream.journal import Journal
journal = Journal.create(sys.argv[1], {})
for number in range(3):
    journal.append({"number": number})
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "journal.jsonl"
    done = subprocess.run([sys.executable, "-c", program, os.fspath(path)], timeout=60, check=False)
    assert done.returncode < 0
    assert numbers(path) == [0, 1, 2]
