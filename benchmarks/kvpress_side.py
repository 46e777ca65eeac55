"""Lets kvpress select and prune during a forward pass, for many of its presses and budgets at once.

A press prunes the cache of a layer when that layer's attention is done, so later layers never see what it dropped, and
the model's output is that of the full prefill. So one pass serves every press: a hook hands each of them the layer's
whole KV. `pruned_cache` goes kvpress's own way, one press a pass; the benchmark checks the first text with it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Pressed", "eager_attention", "import_kvpress", "pressing", "pruned_cache", "ratio_that_keeps"]


def import_kvpress() -> Any:
    """The `kvpress` module, or an exit that says how to get it."""
    try:
        return importlib.import_module("kvpress")
    except ImportError as error:
        raise SystemExit(f"kvpress is not installed here ({error}): run `make kvpress`") from error


def ratio_that_keeps(budget: int, total: int) -> float:
    """The compression ratio at which kvpress keeps `budget` of `total` tokens: it cuts `total * (1 - ratio)` off.

    A ratio of 0.9 keeps 63 of 640 tokens, as 1 - 0.9 is a little less than 0.1; half a token more is never cut.
    """
    return 1 - (budget + 0.5) / total


@dataclass(eq=False)
class Pressed:
    """What a press kept, layer by layer.

    Attributes:
        scores: `[H, T]` a layer; the higher, the sooner kept.
        kept: `[H, n]` a layer: positions in the order in which the press keeps them.
        keys: `[H, n, head_dim]` a layer, with their original positions.
        rerotated: The same in ascending order, as `KeyRerotationPress` rotates them to positions `0 .. n-1`.
        values: `[H, n, head_dim]` a layer, in the order of `keys`.
        ascending_values: `[H, n, head_dim]` a layer, in the order of `rerotated`.
    """

    scores: list[torch.Tensor] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    rerotated: list[torch.Tensor] = field(default_factory=list)
    ascending_values: list[torch.Tensor] = field(default_factory=list)

    def kv(self, *, rerotated: bool) -> torch.Tensor:
        """`[2, L, n, D]`."""
        planes = (self.rerotated, self.ascending_values) if rerotated else (self.keys, self.values)
        return torch.stack([torch.stack(plane) for plane in planes]).transpose(2, 3).flatten(3)


@contextlib.contextmanager
def pressing(model: Any, presses: Mapping[Any, Any]) -> Iterator[dict[Any, Pressed]]:
    """Let every press prune a copy of each layer's KV in the forward passes inside; the model's own cache stays whole.

    Presses get the attention weights that the model's attention returns: None with sdpa, weights with eager.
    """
    rerotate_keys = import_kvpress().KeyRerotationPress.rerotate_keys
    pressed = {label: Pressed() for label in presses}

    def hook(module: Any, _: Any, kwargs: dict[str, Any], output: Any) -> None:
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        for label, press in presses.items():
            with recording_scores(press) as scores:
                keys, values = press.compress(
                    module, kwargs["hidden_states"], layer.keys, layer.values, output[1], kwargs
                )
            kept = scores[-1].topk(keys.shape[2], dim=-1).indices
            index = kept.unsqueeze(-1).expand(-1, -1, -1, keys.shape[3])
            if not torch.equal(keys, layer.keys.gather(2, index)):
                raise AssertionError(f"{label} did not keep the tokens that its scores rate highest")
            ascending = kept.sort(dim=-1).values
            into = pressed[label]
            into.scores.append(scores[-1][0])
            into.kept.append(kept[0])
            into.keys.append(keys[0])
            into.values.append(values[0])
            into.rerotated.append(rerotate_keys(module, ascending, layer.keys)[0])
            into.ascending_values.append(layer.values.gather(2, ascending.unsqueeze(-1).expand_as(index))[0])

    hooks = []
    try:
        for press in presses.values():
            press.post_init_from_model(model)
        for layer in model.model.layers:
            layer.self_attn.rotary_emb = model.model.rotary_emb
            hooks.append(layer.self_attn.register_forward_hook(hook, with_kwargs=True))
        yield pressed
    finally:
        for handle in hooks:
            handle.remove()


@contextlib.contextmanager
def recording_scores(press: Any) -> Iterator[list[torch.Tensor]]:
    found: list[torch.Tensor] = []
    score = press.score

    def record(*args: Any, **kwargs: Any) -> torch.Tensor:
        found.append(score(*args, **kwargs))
        return found[-1]

    press.score = record
    try:
        yield found
    finally:
        del press.score


@contextlib.contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """Attention that returns its weights."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def pruned_cache(model: Any, tokens: Sequence[int], press: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values `[H, n, head_dim]` a layer that kvpress leaves of a prompt when it is used as its users do."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.inference_mode(), press(model):
        model.model(input_ids=torch.tensor([list(tokens)], device=model.device), past_key_values=cache)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]
