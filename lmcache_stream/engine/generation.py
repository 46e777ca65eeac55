"""One completion on its way: cached prefix, prefill in pieces, offload, then one token a step."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lmcache_stream.engine.detokenize import Detokenizer, StopStrings
from lmcache_stream.engine.model import CausalLM, Queries
from lmcache_stream.engine.sampling import SamplingParams, sample
from lmcache_stream.kvcache.memory import EmbeddedCache
from lmcache_stream.types import CacheKind

__all__ = ["Delta", "EngineCore", "Generation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step brought.

    Args:
        token_ids: The tokens generated; none in the delta of an abort.
        text: The text that became readable.
        finish_reason: "stop", "length" or "abort" in the last delta, else None.
        stop_reason: The stop string or stop token that ended it.
        cached_tokens: Prompt tokens taken from the cache.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCore:
    """What all generations of an engine share.

    Args:
        lm: The model.
        tokenizer: Its `transformers` tokenizer.
        cache: Where KV comes from and goes to.
        model_name: The model's name in the cache.
        eos_token_ids: Tokens that end a text.
        prefill_tokens: Tokens of a prompt that one step computes at most.
        queries: Whether the queries of prompts are kept, too.
    """

    lm: CausalLM
    tokenizer: Any
    cache: EmbeddedCache
    model_name: str
    eos_token_ids: frozenset[int]
    prefill_tokens: int
    queries: bool


class Generation:
    """One completion of one sequence. `step` and `end` belong to the engine's thread; `abort` may come from any.

    Args:
        core: The engine's.
        prompt: Token ids, at least one.
        params: How to choose tokens and when to stop.
        cache_salt: Separates what is cached for this request from what is cached for others.
        emit: Called in the engine's thread with every delta, or with the exception that ended the generation. It must
            not raise.
    """

    def __init__(
        self,
        core: EngineCore,
        prompt: Sequence[int],
        params: SamplingParams,
        cache_salt: str,
        emit: Callable[[Delta | Exception], None],
    ) -> None:
        self.prompt: list[int] = list(prompt)
        self.output: list[int] = []
        self.cached_tokens: int = 0
        self.finished: bool = False
        self.aborted: bool = False
        self._core = core
        self._params = params
        self._salt = cache_salt
        self.emit = emit
        self._kv: Any = None
        self._computed = 0
        self._hits: list[torch.Tensor] = []
        self._queries = Queries() if core.queries else None
        self._generator = torch.Generator()
        self._generator.manual_seed(random.getrandbits(63) if params.seed is None else params.seed)
        self._ends = frozenset() if params.ignore_eos else core.eos_token_ids
        self._stops = frozenset(params.stop_token_ids)
        self._detokenizer = Detokenizer(self._decode)
        self._stop_strings = StopStrings(params.stop, include=params.include_stop_str_in_output)

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens are still to be computed."""
        return self._computed < len(self.prompt)

    def step(self) -> Delta | None:
        """Compute a piece of the prompt, or else the next token, and return what it brought."""
        if self._kv is None:
            self._take_cached_prefix()
        if self.prefilling:
            logits = self._prefill_piece()
            if self._computed < len(self.prompt):
                return None
            self._offload()
        else:
            logits = self._core.lm.forward(self.output[-1:], self._kv)
        return self._take(self._choose(logits))

    def abort(self) -> None:
        """Nobody waits for this any more: it is dropped before its next step."""
        self.aborted = True

    def end(self) -> None:
        """Let go of everything held."""
        self.finished = True
        self._kv = self._queries = None
        self._hits = []

    def _take_cached_prefix(self) -> None:
        core = self._core
        self._hits = core.cache.longest_prefix(core.model_name, self.prompt, self._salt)
        # One token at least is computed: its logits choose the next.
        self.cached_tokens = min(len(self._hits) * core.cache.chunk_size, len(self.prompt) - 1)
        self._kv = core.lm.cache_from(self._hits, self.cached_tokens)
        self._computed = self.cached_tokens

    def _prefill_piece(self) -> torch.Tensor:
        # Pieces end at fixed positions, so that their sums do not depend on other requests.
        size = self._core.prefill_tokens
        stop = min((self._computed // size + 1) * size, len(self.prompt))
        logits = self._core.lm.forward(self.prompt[self._computed : stop], self._kv, self._queries)
        self._computed = stop
        return logits

    def _offload(self) -> None:
        core, size, held = self._core, self._core.cache.chunk_size, len(self._hits)
        whole = len(self.prompt) // size
        if whole > held:
            fresh = core.lm.kv(self._kv, held * size, whole * size)
            self._put([*self._hits, *split(fresh, size)], CacheKind.KV)
        if self._queries is not None:
            self._offload_queries(self._queries.tensor(), whole)
        self._hits, self._queries = [], None

    def _offload_queries(self, queries: torch.Tensor, whole: int) -> None:
        core, size = self._core, self._core.cache.chunk_size
        held = core.cache.longest_prefix(core.model_name, self.prompt, self._salt, CacheKind.QUERY)
        missing_from, computed_from = len(held) * size, self.cached_tokens
        # A gap cannot be stored: a chunk is only found behind all chunks before it.
        if len(held) < whole and missing_from >= computed_from:
            fresh = queries[:, :, missing_from - computed_from : whole * size - computed_from]
            self._put([*held, *split(fresh, size)], CacheKind.QUERY)

    def _put(self, chunks: Sequence[torch.Tensor], kind: CacheKind) -> None:
        self._core.cache.put(self._core.model_name, self.prompt, chunks, self._salt, kind)

    def _choose(self, logits: torch.Tensor) -> int:
        too_early = len(self.output) < self._params.min_tokens
        return sample(
            logits,
            self._params,
            prompt=self.prompt,
            output=self.output,
            forbidden=sorted(self._core.eos_token_ids | self._stops) if too_early else (),
            generator=self._generator,
        )

    def _take(self, token: int) -> Delta:
        self.output.append(token)
        text = ""
        finish_reason: str | None = None
        stop_reason: int | str | None = None
        armed = len(self.output) >= self._params.min_tokens
        if token in self._ends or token in self._stops:
            finish_reason = "stop"
            stop_reason = token if token not in self._ends else None
            if self._params.include_stop_str_in_output and stop_reason is not None:
                text = self._stop_strings.feed(self._detokenizer.feed(token), armed=False)
        else:
            text = self._stop_strings.feed(self._detokenizer.feed(token), armed=armed)
            if self._stop_strings.matched is not None:
                finish_reason, stop_reason = "stop", self._stop_strings.matched
        if finish_reason is None and len(self.output) >= self._params.max_tokens:
            finish_reason = "length"
        if finish_reason is not None and self._stop_strings.matched is None:
            text += self._stop_strings.feed(self._detokenizer.flush(), armed=False)
        if finish_reason is not None:
            self.end()
        return Delta(
            token_ids=(token,),
            text=text,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            cached_tokens=self.cached_tokens,
        )

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._core.tokenizer.decode(
            token_ids,
            skip_special_tokens=self._params.skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text


def split(tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [tensor.narrow(2, start, size) for start in range(0, tensor.shape[2], size)]
