"""One prefill, many edits of its KV, and how well the model goes on from each."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lmcache_stream.editors import Edit, EditInput, Editor
from lmcache_stream.engine.model import CausalLM, Queries

if TYPE_CHECKING:
    from lmcache_stream.geometry import KVGeometry

__all__ = ["Prefilled", "Probe", "Scores", "continue_greedily", "prefill", "score"]


@dataclass(frozen=True, eq=False)
class Prefilled:
    """What one forward pass over a prompt leaves.

    Args:
        tokens: The prompt's `T` token ids.
        kv: `[2, L, T, D]`, in the model's dtype, on the CPU.
        queries: `[1, L, T, Dq]`, rotated; None where they were not recorded.
        logits: `[V]` of the last token.
        geometry: Shape of the KV.
    """

    tokens: tuple[int, ...]
    kv: torch.Tensor
    queries: torch.Tensor | None
    logits: torch.Tensor
    geometry: KVGeometry

    def edit(self, editor: Editor, chunk_size: int) -> Edit:
        """Edit a copy of the KV, as a stream's `modify_kv` does."""
        return editor.edit(
            EditInput(
                kv=self.kv, tokens=self.tokens, geometry=self.geometry, chunk_size=chunk_size, queries=self.queries
            )
        )


@dataclass(frozen=True)
class Probe:
    """Tokens to go on with, and what ought to follow.

    Args:
        fed: Tokens that are fed after the cached ones, at least as many as there are targets.
        targets: What ought to follow each of the last `len(targets)` of them.
    """

    fed: tuple[int, ...]
    targets: tuple[int, ...]

    @classmethod
    def of(cls, prompt: Sequence[int], continuation: Sequence[int]) -> Probe:
        """Feed `prompt` and then `continuation`, which is what ought to follow."""
        return cls((*prompt, *continuation[:-1]), tuple(continuation))


@dataclass(frozen=True, eq=False)
class Scores:
    """How a model takes a probe.

    Args:
        nll: float32 `[n]`, negative log-likelihood of each target, in nats.
        top: int64 `[n]`, the token it thinks likeliest instead.
    """

    nll: torch.Tensor
    top: torch.Tensor


def prefill(lm: CausalLM, tokens: Sequence[int], *, queries: bool) -> Prefilled:
    """Compute a prompt in one pass, with its queries if `queries` (then `lm` must record them)."""
    cache = lm.empty_cache()
    recorded = Queries() if queries else None
    logits = lm.forward(tokens, cache, recorded)
    return Prefilled(
        tokens=tuple(tokens),
        kv=lm.kv(cache, 0, len(tokens)),
        queries=recorded.tensor() if recorded is not None else None,
        logits=logits,
        geometry=lm.geometry,
    )


def score(lm: CausalLM, kv: torch.Tensor, probe: Probe, *, position: int | None = None) -> Scores:
    """Feed a probe in one pass after `kv` `[2, L, T', D]`, which is copied.

    Args:
        lm: The model.
        kv: The KV to go on from.
        probe: What to feed and to expect.
        position: Position of the first token fed; None for `T'`, where an engine puts it.
    """
    count = kv.shape[2]
    inputs: dict[str, Any] = {cache_argument(lm.model): lm.cache_from([kv], count)}
    if position is not None:
        inputs["position_ids"] = torch.arange(position, position + len(probe.fed), device=lm.device).unsqueeze(0)
    if "logits_to_keep" in inspect.signature(lm.model.forward).parameters:
        inputs["logits_to_keep"] = len(probe.targets)
    with torch.inference_mode():
        fed = torch.tensor([probe.fed], device=lm.device)
        logits = lm.model(input_ids=fed, use_cache=True, **inputs).logits[0, -len(probe.targets) :].float()
        targets = torch.tensor(probe.targets, device=lm.device)
        nll = logits.logsumexp(-1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return Scores(nll.cpu(), logits.argmax(-1).cpu())


def continue_greedily(lm: CausalLM, prefilled: Prefilled, count: int) -> tuple[int, ...]:
    """The `count` tokens that the model generates greedily from all of the KV."""
    cache = lm.cache_from([prefilled.kv], len(prefilled.tokens))
    tokens = [int(prefilled.logits.argmax())]
    while len(tokens) < count:
        tokens.append(int(lm.forward(tokens[-1:], cache).argmax()))
    return tuple(tokens)


def cache_argument(model: Any) -> str:
    """What `forward` calls the cache: it has been renamed among the versions of `transformers` that we take."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
