"""Dropped values live on in kept ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lmcache_stream.editors import KeyDiff, Merge, Random, SnapKV, merge
from lmcache_stream.errors import UsageError
from tests.editors.inputs import CHUNK, HEADS, LAYERS, by_head, given, kept_by_head


@pytest.mark.parametrize(("block", "group"), [(merge.BLOCK, 64), (200, 8)])
@pytest.mark.parametrize("scope", ["shared", "head"])
def test_values_are_weighted_means(monkeypatch: pytest.MonkeyPatch, block: int, group: int, scope: Any) -> None:
    monkeypatch.setattr(merge, "BLOCK", block)
    monkeypatch.setattr(merge, "GROUP", group)
    x = given(4 * CHUNK)
    inner, threshold = KeyDiff(scope=scope), 0.4
    edit, dropped_only = Merge(editor=inner, threshold=threshold).edit(x), inner.edit(x)
    assert torch.equal(edit.kv[0], dropped_only.kv[0])
    assert not torch.equal(edit.kv[1], dropped_only.kv[1])
    keys, values = by_head(x, 0), by_head(x, 1)
    kept = kept_by_head(edit)
    for layer in range(LAYERS):
        for head in range(HEADS):
            unit = keys[layer][head] / keys[layer][head].pow(2).sum(-1, keepdim=True).sqrt()
            stay = kept[layer, head].tolist()
            total = {token: math.e * values[layer][head][token] for token in stay}
            weight = dict.fromkeys(stay, math.e)
            for token in set(range(len(x.tokens))) - set(stay):
                cosines = [float(unit[token] @ unit[other]) for other in stay]
                if max(cosines) >= threshold:
                    nearest = stay[cosines.index(max(cosines))]
                    total[nearest] = total[nearest] + math.exp(max(cosines)) * values[layer][head][token]
                    weight[nearest] += math.exp(max(cosines))
            expected = torch.stack([total[token] / weight[token] for token in stay])
            found = edit.kv[1, layer].view(len(stay), HEADS, -1)[:, head].double()
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_nothing_similar_enough_is_plain_dropping() -> None:
    x = given(4 * CHUNK)
    edit = Merge(editor=Random(), threshold=1.1).edit(x)
    torch.testing.assert_close(edit.kv, Random().edit(x).kv, atol=1e-6, rtol=1e-6)


def test_needs_what_its_editor_needs() -> None:
    assert Merge(editor=SnapKV()).needs == {"heads", "queries"}
    assert Merge().needs == {"heads"}
    with pytest.raises(UsageError, match="drops tokens"):
        Merge(editor=Merge())  # type: ignore[arg-type]  # wrong on purpose
