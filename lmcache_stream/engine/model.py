"""A Hugging Face causal language model whose KV goes in and out as `[2, L, T, D]`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lmcache_stream.errors import GeometryError, UsageError
from lmcache_stream.geometry import KVGeometry

__all__ = ["CausalLM", "Queries", "load_model", "load_tokenizer", "require_transformers"]

RECORDING_ATTENTION = "sdpa_recording_queries"

FULL_ATTENTION_ONLY = (
    "the cache of such layers is not the KV of every token, so no part of it can be stored or edited;"
    " use a model with full attention in every layer"
)


def require_transformers() -> Any:
    """Return the `transformers` module, or raise the `UsageError` that says how to get it."""
    try:
        import transformers
    except ImportError as error:
        raise UsageError("the embedded engine needs transformers: pip install 'lmcache-stream[engine]'") from error
    return transformers


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    logging = require_transformers().utils.logging
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def load_model(source: str | Path, dtype: torch.dtype) -> Any:
    """Load a causal language model from a folder or a hub id."""
    transformers = require_transformers()
    from safetensors import SafetensorError

    try:
        with no_progress_bars():
            return transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(f"{source} is no model that transformers can load: {error}") from error


def load_tokenizer(source: str | Path) -> Any:
    """Load a tokenizer from a folder or a hub id."""
    is_path = isinstance(source, Path) or source.startswith(("/", "./", "../", "~"))
    if is_path and not Path(source).is_dir():
        raise UsageError(f"{source} is no folder: a model is a folder with config.json, weights and tokenizer")
    try:
        return require_transformers().AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{source} has no tokenizer that transformers can load: put its files there, or pass tokenizer=: {error}"
        ) from error


class Queries:
    """The post-rotary queries of the tokens of some forward passes, layer by layer."""

    def __init__(self) -> None:
        self._layers: dict[int, list[torch.Tensor]] = {}

    def add(self, layer: int, query: torch.Tensor) -> None:
        """Keep a layer's queries `[1, H, T, head_dim]` of one pass."""
        self._layers.setdefault(layer, []).append(query[0].transpose(0, 1).flatten(1))

    def tensor(self) -> torch.Tensor:
        """Return the queries of all recorded tokens, on the CPU: `[1, L, T, Dq]`."""
        layers = [torch.cat(self._layers[layer]) for layer in sorted(self._layers)]
        return torch.stack(layers).unsqueeze(0).cpu()


recorder: ContextVar[Queries | None] = ContextVar("recorder", default=None)


def attend_and_record(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    queries = recorder.get()
    if queries is not None:
        queries.add(module.layer_idx, query)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def record_queries(model: Any) -> str:
    """Make a model's attention record its queries; return the name of the attention that it had before."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if not getattr(model, "_supports_sdpa", False):
        raise UsageError(f"{type(model).__name__} cannot use sdpa attention, so its queries cannot be recorded")
    AttentionInterface.register(RECORDING_ATTENTION, attend_and_record)
    AttentionMaskInterface.register(RECORDING_ATTENTION, sdpa_mask)
    before = str(model.config._attn_implementation)
    model.set_attn_implementation(RECORDING_ATTENTION)
    return before


class CausalLM:
    """A model with full attention, and the shape of its KV.

    Its KV caches are `transformers.DynamicCache` objects of one sequence. All methods run the model: call them from
    one thread at a time.

    Args:
        model: A `transformers.PreTrainedModel` with a language-model head; put into evaluation mode.
        chunk_size: Tokens a chunk of the cache that its KV goes to.
        queries: Whether to record queries. The model's attention becomes sdpa then; `close` puts the old one back.
        max_model_len: Longest context in tokens; None for the model's own.

    Raises:
        UsageError: Not every layer keeps the keys and values of every token, or the longest context is not known.
    """

    def __init__(self, model: Any, *, chunk_size: int, queries: bool = False, max_model_len: int | None = None) -> None:
        self.model: Any = model.eval()
        self.name: str = type(model).__name__
        config = model.config.get_text_config(decoder=True)
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._last_logits_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.vocab_size: int = int(model.get_input_embeddings().weight.shape[0])
        limit = max_model_len or getattr(config, "max_position_embeddings", None)
        if not limit:
            raise UsageError(f"{self.name} does not say how long its context may be: pass max_model_len=")
        self.max_model_len: int = int(limit)
        self._attention_before = record_queries(model) if queries else None
        try:
            self.geometry: KVGeometry = self._geometry(config, chunk_size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the model its own attention back."""
        if self._attention_before is not None:
            self.model.set_attn_implementation(self._attention_before)
            self._attention_before = None

    def empty_cache(self) -> Any:
        """Make an empty KV cache for one sequence."""
        return require_transformers().DynamicCache(config=self.model.config)

    def cache_from(self, chunks: Sequence[torch.Tensor], tokens: int) -> Any:
        """Make a KV cache of the first `tokens` tokens of `chunks` `[2, L, chunk, D]`, which are copied."""
        cache = self.empty_cache()
        if tokens == 0:
            return cache
        shape = (tokens, self.geometry.num_kv_heads, self.geometry.head_dim)
        with torch.inference_mode():
            for layer in range(self.geometry.num_layers):
                keys, values = (
                    torch.cat([chunk[plane, layer] for chunk in chunks])[:tokens]
                    .to(self.device, self.geometry.dtype)
                    .view(shape)
                    .transpose(0, 1)
                    .unsqueeze(0)
                    for plane in (0, 1)
                )
                cache.update(keys, values, layer)
        return cache

    def forward(self, tokens: Sequence[int], cache: Any, queries: Queries | None = None) -> torch.Tensor:
        """Compute `tokens` after what `cache` holds, add their KV to it, and return the last one's logits `[V]`."""
        with torch.inference_mode(), recording(queries):
            output = self.model(
                input_ids=torch.tensor([list(tokens)], device=self.device),
                use_cache=True,
                **{self._cache_argument: cache},
                **self._last_logits_only,
            )
            logits: torch.Tensor = output.logits[0, -1]
        return logits

    def kv(self, cache: Any, start: int, stop: int) -> torch.Tensor:
        """Copy the KV of tokens `start` to `stop` out of a cache: private, on the CPU, `[2, L, stop - start, D]`."""
        planes = [
            torch.stack([getattr(layer, plane)[0, :, start:stop] for layer in cache.layers])
            for plane in ("keys", "values")
        ]
        return torch.stack(planes).transpose(2, 3).flatten(3).cpu()

    def _geometry(self, config: Any, chunk_size: int) -> KVGeometry:
        transformers = require_transformers()
        cache = self.empty_cache()
        full = transformers.cache_utils.DynamicLayer
        odd = sorted({type(layer).__name__ for layer in cache.layers if type(layer) is not full})
        if odd:
            kinds = sorted({*(getattr(config, "layer_types", None) or ())} - {"full_attention"}) or odd
            raise UsageError(f"{self.name} has {', '.join(kinds)} layers: {FULL_ATTENTION_ONLY}")
        self.forward([0, 1], cache)
        shapes = {tuple(t.shape) for layer in cache.layers for t in (layer.keys, layer.values) if t is not None}
        if len(cache.layers) != config.num_hidden_layers or any(layer.keys is None for layer in cache.layers):
            raise UsageError(f"{self.name} has layers without KV of their own: {FULL_ATTENTION_ONLY}")
        if len(shapes) != 1:
            raise UsageError(f"{self.name} has keys and values of several shapes {sorted(shapes)}: they do not stack")
        _, kv_heads, _, head_dim = shapes.pop()
        measured: dict[str, Any] = {
            "num_layers": len(cache.layers),
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "dtype": cache.layers[0].keys.dtype,
            "chunk_size": chunk_size,
        }
        try:
            known = KVGeometry.from_config(config.to_dict(), regime="transformers")
        except GeometryError:
            return KVGeometry(**measured)
        if known.planes == 1:
            raise UsageError(f"{self.name} has latent attention (MLA), whose cache transformers keeps in another form")
        return replace(known, **measured)


@contextlib.contextmanager
def recording(queries: Queries | None) -> Iterator[None]:
    token = recorder.set(queries)
    try:
        yield
    finally:
        recorder.reset(token)
