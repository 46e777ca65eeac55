"""Expected attention: what queries to come will look at."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch

from lmcache_stream import rotary as rope
from lmcache_stream.editors.base import EditInput, Layer, LayerScoring
from lmcache_stream.editors.base.dropping import aggregate
from lmcache_stream.errors import UsageError
from lmcache_stream.geometry import KVGeometry

__all__ = ["ExpectedAttention", "QueryStatistics"]

BLOCK = 1024
"""Tokens whose queries are measured at once."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class QueryStatistics:
    """How a model's queries are distributed before their rotation, for each layer and query head.

    Args:
        mean: `[L, Hq, head_dim]`, float32.
        covariance: `[L, Hq, head_dim, head_dim]`, float32; None: not measured.

    Raises:
        UsageError: Shapes contradict each other.
    """

    mean: torch.Tensor
    covariance: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.mean.dim() != 3:
            raise UsageError(f"mean must be [L, Hq, head_dim], not {list(self.mean.shape)}")
        if self.covariance is not None and self.covariance.shape != (*self.mean.shape, self.mean.shape[-1]):
            raise UsageError(
                f"covariance must be {[*self.mean.shape, self.mean.shape[-1]]}, not {list(self.covariance.shape)}"
            )

    @classmethod
    def measure(
        cls, queries: torch.Tensor | Iterable[torch.Tensor], geometry: KVGeometry, *, skip: int = 4
    ) -> QueryStatistics:
        """Measure the queries of one or several prompts; all their tokens count alike.

        Args:
            queries: `[1, L, T, Dq]` of a prompt from its first token on, rotated as the engine's attention sees them:
                what `retrieve(tokens, kind=CacheKind.QUERY)` gives. Several prompts may differ in `T`.
            geometry: Shape and rotary positions of the model.
            skip: First tokens of each prompt that do not count: attention sinks are unlike all others.

        Raises:
            UsageError: Shapes do not fit the geometry, its rotary positions are not known, or no token is left.
        """
        if geometry.rotary is None:
            why = f" ({geometry.rotary_unknown})" if geometry.rotary_unknown else ""
            raise UsageError(f"queries cannot be taken back to position 0 as the rotary positions are not known{why}")
        if geometry.planes == 1:
            raise UsageError("queries of MLA are no vectors over the cached latent: they cannot be measured")
        layers, head_dim = geometry.num_layers, geometry.head_dim
        count = 0
        total = second = torch.zeros(())
        for one in (queries,) if isinstance(queries, torch.Tensor) else queries:
            if one.dim() != 4 or one.shape[:2] != (1, layers) or one.shape[3] % head_dim:
                raise UsageError(f"queries must be [1, {layers}, T, Hq * {head_dim}], not {list(one.shape)}")
            for start in range(skip, one.shape[2], BLOCK):
                block = one[0, :, start : start + BLOCK].float()
                positions = torch.arange(start, start + block.shape[1], device=block.device)
                plain = rope.rerotate(block, positions, torch.zeros_like(positions), geometry.rotary)
                by_head = plain.view(layers, block.shape[1], -1, head_dim).transpose(1, 2).double()
                count += block.shape[1]
                total = total.to(block.device) + by_head.sum(dim=2)
                second = second.to(block.device) + by_head.transpose(-1, -2) @ by_head
        if count == 0:
            raise UsageError(f"no queries are left after the first {skip} tokens of each prompt: give longer prompts")
        mean = total / count
        covariance = second / count - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return cls(mean=mean.float().cpu(), covariance=covariance.float().cpu())

    def save(self, path: str | Path) -> None:
        """Write them to a file that `load` reads (`torch.save`)."""
        torch.save({"mean": self.mean, "covariance": self.covariance}, path)

    @classmethod
    def load(cls, path: str | Path) -> QueryStatistics:
        """Read what `save` wrote; nothing in the file is executed.

        Raises:
            UsageError: The file does not exist or holds something else.
        """
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
            return cls(mean=found["mean"], covariance=found["covariance"])
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"{path} holds no query statistics that QueryStatistics.save wrote: {error}") from error

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for part in (self.mean, self.covariance):
            if part is not None:
                digest.update(part.float().cpu().numpy().tobytes())
        return digest.hexdigest()

    def __repr__(self) -> str:
        layers, heads, head_dim = self.mean.shape
        only = "" if self.covariance is not None else ", without covariance"
        return f"QueryStatistics({layers} layers, {heads} heads of {head_dim}{only}, {self._digest})"


@dataclass(frozen=True, eq=False, kw_only=True)
class _Expected(Layer):
    """A layer, and what its query heads will ask.

    Args:
        mean: `[H, G, head_dim]` of queries to come, rotation and softmax scale included, float32.
        covariance: `[H, G, head_dim, head_dim]`, alike; None: they are taken as certain.
    """

    mean: torch.Tensor
    covariance: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(LayerScoring):
    """Keeps the tokens that queries to come are expected to attend to, by the length of what they contribute.

    Devoto et al. 2025, "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
    Distribution", arXiv:2510.00636. Queries before their rotation are taken as normal, with a mean and a covariance
    that were measured once for a model. With `R` the mean rotation of the next `n_future` positions and `s` the
    softmax scale, a key `k` expects the weight `exp(s k'R mean + s^2 k'R covariance R'k / 2)`, normalised over the
    tokens after the sinks. The paper multiplies by the length of a value after the output projection, which no cache
    knows; here it is the length of the value itself.

    Args:
        statistics: Of this model's queries, or a file that `QueryStatistics.save` wrote; there is no default.
        sinks: First tokens, always kept and left out of the normalisation.
        n_future: Positions after the input over which the rotation is averaged, at least one.
        use_covariance: Whether the covariance counts; otherwise the mean query alone does.
        use_value_norm: Whether weights are multiplied by the length of the value.
        epsilon: Added to each weight before that, so that long values count even without attention.
        scale: Factor of the attention logits; None: `1 / sqrt(head_dim)`, as most models have it.
    """

    name: ClassVar[str] = "expected-attention"
    needs: ClassVar[frozenset[str]] = frozenset({"heads", "rotary"})

    statistics: QueryStatistics | str | Path | None = None
    sinks: int = 4
    n_future: int = 512
    use_covariance: bool = True
    use_value_norm: bool = True
    epsilon: float = 0.0
    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.statistics
        if given is None:
            raise UsageError(
                "expected-attention needs statistics of the model's queries: pass statistics=, made once by "
                "QueryStatistics.measure(queries, geometry) from queries of EmbeddedEngine(queries=True), or the path "
                "of a file that QueryStatistics.save wrote (on a command line, expected-attention:statistics=FILE)"
            )
        if not isinstance(given, QueryStatistics):
            given = QueryStatistics.load(given)
            object.__setattr__(self, "statistics", given)
        if self.use_covariance and given.covariance is None:
            raise UsageError("these statistics hold no covariance: use_covariance=False, or measure it")
        if self.n_future < 1:
            raise UsageError(f"n_future={self.n_future}: average the rotation over at least one position")
        if self.epsilon < 0:
            raise UsageError(f"epsilon={self.epsilon} must not be negative")

    def score_layer(self, layer: Layer, budget: int) -> torch.Tensor:
        """Expected attention, aggregated over the query heads of each group, by value length; 0 for sinks."""
        assert isinstance(layer, _Expected)
        keys = layer.keys[:, self.sinks :].to(torch.float32, memory_format=torch.contiguous_format)
        logits = torch.empty(*layer.mean.shape[:2], keys.shape[1], device=keys.device)
        for group in range(layer.mean.shape[1]):
            mean = layer.mean[:, group].unsqueeze(1)
            if layer.covariance is None:
                logits[:, group] = (keys @ mean.transpose(-1, -2)).squeeze(-1)
            else:
                asked = torch.baddbmm(mean, keys, layer.covariance[:, group], alpha=0.5)
                logits[:, group] = asked.mul_(keys).sum(dim=-1)
        weights = aggregate(logits.softmax(dim=-1), (1,), self.aggregate)
        if self.use_value_norm:
            values = layer.values[:, self.sinks :]
            weights = (weights + self.epsilon) * torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32)
        return torch.nn.functional.pad(weights, (self.sinks, 0))

    def _layer(self, x: EditInput, index: int, some: slice, heads: int) -> _Expected:
        layer = super()._layer(x, index, some, heads)
        mean, covariance = self._to_come(x, index)
        by_head = mean.view(heads, -1, *mean.shape[1:])[some].float()
        if covariance is not None:
            covariance = covariance.view(heads, -1, *covariance.shape[1:])[some].float()
        return _Expected(index, some, layer.keys, layer.values, mean=by_head, covariance=covariance)

    def _to_come(self, x: EditInput, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scaled mean `[Hq, head_dim]` and covariance of the queries of one layer after the input, float64."""
        statistics, geometry = self.statistics, self._require_heads(x)
        assert isinstance(statistics, QueryStatistics)
        layers, query_heads, head_dim = statistics.mean.shape
        if (layers, head_dim) != (geometry.num_layers, geometry.head_dim) or query_heads % geometry.num_kv_heads:
            raise UsageError(
                f"statistics of {layers} layers and {query_heads} query heads of {head_dim} do not fit a model of "
                f"{geometry.num_layers} layers and {geometry.num_kv_heads} KV heads of {geometry.head_dim}"
            )
        scale = self.scale or head_dim**-0.5
        mean = statistics.mean[index].to(x.kv.device).double() * scale
        rotary = self._rotary(x)[index]
        turn = None if rotary is None else rope.mean_rotation(rotary, len(x.tokens), self.n_future, x.kv.device)
        if turn is not None:
            mean = mean @ turn.T
        if not self.use_covariance:
            return mean, None
        assert statistics.covariance is not None
        covariance = statistics.covariance[index].to(x.kv.device).double() * scale**2
        return mean, covariance if turn is None else turn @ covariance @ turn.T
