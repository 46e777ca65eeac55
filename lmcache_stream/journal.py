"""A journal: what was done, one JSON object a line, so that a run that was broken off can go on where it stopped.

The first line is the header, `{"journal": 1, ...}`; each further line is one entry. Entries are only ever appended,
each with one write of a whole line, so that what `append` has returned from survives the end of the process. It
survives the end of the machine only after `sync` (fsync), which `close` calls too; the caller decides where in between
that is worth its milliseconds. A last line without its end was torn: it counts for nothing, and `reopen` cuts it off.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from lmcache_stream.errors import UsageError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["FORMAT", "Journal", "JournalContent", "read_journal"]

FORMAT: Final = 1
"""Version of the format, as the header tells it."""


@dataclass(frozen=True)
class JournalContent:
    """What a journal holds.

    Args:
        name: Where it was read from.
        header: The header, without the version of the format.
        lines: The entries as JSON, in order; `entries` decodes them.
        size: Bytes of the header and the entries; what comes after them was torn.
    """

    name: str
    header: dict[str, Any]
    lines: tuple[bytes, ...]
    size: int

    def entries(self, type: Any = Any) -> Iterator[Any]:
        """The entries, decoded as `type`.

        Raises:
            UsageError: One of them is no such value; the message has its line number.
        """
        decode = msgspec.json.Decoder(type).decode
        for number, line in enumerate(self.lines, start=2):
            try:
                yield decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise UsageError(f"{self.name}, line {number}: {error}") from error


def read_journal(path: str | os.PathLike[str]) -> JournalContent:
    """Read a journal, also one that is still being written.

    Raises:
        UsageError: It cannot be read, or is no journal of this format.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the journal {os.fspath(path)}: {error.strerror}") from error
    return _parse(data, os.fspath(path))


class Journal:
    """Appends entries to a journal; only one process at a time holds it open.

    Make one with `create`, `reopen`, `open` or `go_on`, and close it, or use it in `with`.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        self._appending = threading.Lock()

    @classmethod
    def create(cls, path: str | os.PathLike[str], header: Mapping[str, Any]) -> Self:
        """Begin a journal.

        Args:
            path: A file that does not exist yet.
            header: What the entries belong to, as JSON values.

        Raises:
            UsageError: The file exists or cannot be made.
        """
        journal = cls(Path(path), _open(Path(path), os.O_CREAT | os.O_EXCL))
        try:
            journal.append({"journal": FORMAT, **header})
        except BaseException:
            journal.close()
            raise
        return journal

    @classmethod
    def open(cls, path: str | os.PathLike[str], header: Mapping[str, Any]) -> tuple[Self, JournalContent]:
        """Go on with a journal as `reopen` does; begin it as `create` does where there is none, or a torn header only.

        Raises:
            UsageError: It cannot be made, read or written, is no journal of this format, or another process holds it.
        """
        journal = cls(Path(path), _open(Path(path), os.O_CREAT))
        try:
            first = msgspec.json.encode({"journal": FORMAT, **header}) + b"\n"
            data = Path(path).read_bytes()
            if len(data) < len(first) and first.startswith(data):
                os.ftruncate(journal._open_descriptor(), 0)
                journal.append({"journal": FORMAT, **header})
        except BaseException:
            journal.close()
            raise
        return journal, journal._cut()

    @classmethod
    def go_on(cls, path: str | os.PathLike[str], size: int) -> Self:
        """Append to a journal that this process closed when it had `size` bytes.

        Raises:
            UsageError: It is gone, cannot be written, another process holds it or has written to it since.
        """
        journal = cls(Path(path), _open(Path(path), 0))
        if journal.size != size:
            journal.close()
            raise UsageError(f"somebody else has written to {path} since: run one batch at a time with it")
        return journal

    @classmethod
    def reopen(cls, path: str | os.PathLike[str]) -> tuple[Self, JournalContent]:
        """Go on with a journal: cut a torn last line off, and append after what it holds.

        Raises:
            UsageError: It cannot be read or written, is no journal of this format, or another process holds it.
        """
        journal = cls(Path(path), _open(Path(path), 0))
        return journal, journal._cut()

    def _cut(self) -> JournalContent:
        """Cut a torn last line off; say what is left."""
        try:
            content = read_journal(self.path)
            os.ftruncate(self._open_descriptor(), content.size)
        except BaseException:
            self.close()
            raise
        return content

    @property
    def size(self) -> int:
        """Its bytes."""
        return os.fstat(self._open_descriptor()).st_size

    def append(self, entry: object) -> None:
        """Append an entry: anything that msgspec writes as a JSON object. It may be called from any thread.

        Raises:
            OSError: It cannot be written; the journal is as it was.
        """
        line = msgspec.json.encode(entry) + b"\n"
        with self._appending:
            descriptor = self._open_descriptor()
            written = os.write(descriptor, line)
            if written < len(line):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def sync(self) -> None:
        """Wait until everything is on the disk. It blocks: call it in a thread."""
        os.fsync(self._open_descriptor())

    def close(self) -> None:
        """Sync, and let go of the file. A second close does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise UsageError(f"the journal {self.path} is closed")
        return self._descriptor


def _open(path: Path, flags: int) -> int:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | flags, 0o644)
    except FileExistsError:
        raise UsageError(f"{path} exists already: go on with it, or take another name") from None
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not flags & os.O_CREAT:
            raise UsageError(f"there is no journal {path} to go on with") from None
        raise UsageError(f"cannot write the journal {path}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise UsageError(f"another process is writing {path}: wait for its end") from None
    return descriptor


def _parse(data: bytes, name: str) -> JournalContent:
    size = data.rfind(b"\n") + 1
    first, *lines = data[:size].split(b"\n")[:-1] or [b""]
    try:
        header = msgspec.json.decode(first)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        header = None
    if not isinstance(header, dict) or "journal" not in header:
        raise UsageError(f"{name} is no journal: its first line is not a journal's header")
    if (version := header.pop("journal")) != FORMAT:
        raise UsageError(f"{name} is a journal of format {version}, and this version reads {FORMAT}")
    return JournalContent(name, header, tuple(lines), size)
