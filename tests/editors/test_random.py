"""Random tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from lmcache_stream.editors import Random
from tests.editors.inputs import CHUNK, HEADS, LAYERS, given


def kept(editor: Random, seed: int = 0, generator: torch.Generator | None = None) -> list[int]:
    x = replace(given(8 * CHUNK, seed=seed), generator=generator)
    positions = editor.edit(x).kept_positions
    assert positions is not None
    listed = positions.flatten().tolist()
    assert isinstance(listed, list)
    return listed


def test_seeds_and_tokens_decide_what_is_kept() -> None:
    assert kept(Random(seed=3)) == kept(Random(seed=3), seed=1)
    assert kept(Random(seed=3)) != kept(Random(seed=4))
    x = given(8 * CHUNK)
    other = replace(x, tokens=tuple(token + 1 for token in x.tokens))
    first, second = (Random(seed=3).edit(one).kept_positions for one in (x, other))
    assert first is not None
    assert second is not None
    assert first.tolist() != second.tolist()


def test_a_given_generator_takes_the_place_of_the_seed() -> None:
    first = kept(Random(seed=1), generator=torch.Generator().manual_seed(7))
    assert first == kept(Random(seed=2), generator=torch.Generator().manual_seed(7))
    assert first != kept(Random(seed=1))


def test_every_token_has_the_same_chance() -> None:
    counts = torch.zeros(8 * CHUNK)
    for seed in range(400):
        counts[kept(Random(seed=seed, rerotate=False))] += 1
    assert counts.sum() == 400 * 4 * CHUNK
    # Binomial(400, 1/2) has a deviation of 10: six of them miss with a chance below 1e-6 over 128 tokens.
    assert float((counts - 200).abs().max()) < 60


def test_heads_draw_their_own() -> None:
    positions = Random(scope="head").edit(given(8 * CHUNK)).kept_positions
    assert positions is not None
    assert len({tuple(row) for row in positions.view(LAYERS * HEADS, -1).tolist()}) == LAYERS * HEADS
