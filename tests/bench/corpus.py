"""Made-up prose for tests."""

from __future__ import annotations

import random

from lmcache_stream.bench.texts import Corpus, Document, make_corpus


def made_up_corpus(documents: int = 6, sentences: int = 120) -> Corpus:
    chance = random.Random(3)
    syllables = [first + second for first in "bdfgklmnprstvz" for second in ("a", "e", "i", "o", "u", "en", "ar")]

    def sentence() -> str:
        words = ["".join(chance.choices(syllables, k=chance.randint(1, 3))) for _ in range(9)]
        return " ".join(words).capitalize() + "."

    texts = [" ".join(sentence() for _ in range(sentences)) for _ in range(documents)]
    return make_corpus("made-up", "made-up words", [Document(f"d{i}", text) for i, text in enumerate(texts)])
