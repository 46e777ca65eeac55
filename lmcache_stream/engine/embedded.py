"""The embedded engine: a Hugging Face model in this process, served like vLLM serves one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from aiohttp import web

from lmcache_stream import portal
from lmcache_stream.engine.generation import EngineCore
from lmcache_stream.engine.model import CausalLM, load_model, load_tokenizer, require_transformers
from lmcache_stream.engine.scheduler import Scheduler
from lmcache_stream.engine.server import make_application
from lmcache_stream.errors import UsageError
from lmcache_stream.finishing import thread_to_the_end, to_the_end
from lmcache_stream.kvcache.memory import EmbeddedCache

if TYPE_CHECKING:
    from types import TracebackType

    from transformers import PreTrainedModel

    from lmcache_stream.geometry import KVGeometry

__all__ = ["EmbeddedEngine"]

HANDLERS_END_WITHIN = 2.0


class EmbeddedEngine:
    """Serves a causal language model over HTTP on this machine, with its KV in an embedded cache.

    `async with` runs it on the current event loop, a plain `with` on the package's background loop. It answers
    `/v1/completions`, `/v1/models`, `/tokenize`, `/detokenize`, `/health` and `/version` in vLLM's shapes. Each request
    takes the longest cached prefix of its prompt in whole chunks under its `cache_salt`, computes only the rest, and
    stores the KV of the prompt's whole chunks before its first token is sent.

    Args:
        model: A folder or hub id, loaded when the engine starts, or a `transformers` model with a language-model head.
            Every layer must have full attention.
        cache: URL of the embedded cache, `memory://NAME?chunk_size=32&max_bytes=2GiB`.
        served_model_name: The name in requests and in the cache; None for the last part of the model's path or id.
        tokenizer: A `transformers` tokenizer; None for the one beside the model.
        dtype: Type of weights and KV of a model that is loaded; a model object keeps its own.
        host: Address to listen on.
        port: Port to listen on; 0 for a free one.
        queries: Whether the post-rotary queries of prompt tokens are cached as well (`CacheKind.QUERY`,
            `[1, L, T, num_heads * head_dim]`); the model uses sdpa attention then.
        max_model_len: Longest context in tokens; None for the model's own.
        prefill_tokens: Tokens of a prompt that are computed at once; others get a turn in between.
        max_running: Requests that are computed in turn; more wait.

    Raises:
        UsageError: `transformers` is missing, the model cannot be loaded or has other than full attention, or
            the cache is open with other parameters.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        cache: str = "memory://default",
        served_model_name: str | None = None,
        tokenizer: Any = None,
        dtype: torch.dtype = torch.float32,
        host: str = "127.0.0.1",
        port: int = 0,
        queries: bool = False,
        max_model_len: int | None = None,
        prefill_tokens: int = 256,
        max_running: int = 64,
    ) -> None:
        require_transformers()
        for name, value in (("prefill_tokens", prefill_tokens), ("max_running", max_running)):
            if value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}")
        self._source = model
        self._cache_url = cache
        self._served_model_name = served_model_name or default_name(model)
        self._given_tokenizer = tokenizer
        self._dtype = dtype
        self._host = host
        self._port = port
        self._queries = queries
        self._max_model_len = max_model_len
        self._prefill_tokens = prefill_tokens
        self._max_running = max_running
        self._starting = False
        self._core: EngineCore | None = None
        self._cache: EmbeddedCache | None = None
        self._registered = False
        self._scheduler: Scheduler | None = None
        self._runner: web.AppRunner | None = None
        self._base_url = ""

    @property
    def base_url(self) -> str:
        """`http://HOST:PORT`, without `/v1`."""
        self._running()
        return self._base_url

    @property
    def model_name(self) -> str:
        """The served model's name, in requests and in the cache."""
        return self._served_model_name

    @property
    def tokenizer(self) -> Any:
        """The `transformers` tokenizer."""
        return self._running().tokenizer

    @property
    def model(self) -> Any:
        """The `transformers` model. Do not run it while requests are under way."""
        return self._running().lm.model

    @property
    def geometry(self) -> KVGeometry:
        """Shape of the model's KV."""
        return self._running().lm.geometry

    @property
    def max_model_len(self) -> int:
        """Longest context, prompt and output together, in tokens."""
        return self._running().lm.max_model_len

    @property
    def unfinished_requests(self) -> int:
        """Requests that wait or are computed."""
        return self._scheduler.unfinished if self._scheduler is not None else 0

    async def start(self) -> None:
        """Load the model if need be, and serve it.

        Raises:
            UsageError: As the class says, or the engine has started already.
            OSError: The address is not to be had.
        """
        if self._starting:
            raise UsageError("this engine has started already")
        self._starting = True
        try:
            await self._start()
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Stop serving and let go of everything: port, thread, registration, cache. A second time it does nothing.

        Requests under way end with the finish reason "abort".
        """
        await to_the_end(self._close())

    async def _close(self) -> None:
        scheduler, self._scheduler = self._scheduler, None
        runner, self._runner = self._runner, None
        if scheduler is not None:
            scheduler.stop()
        if runner is not None:
            await runner.cleanup()
        if scheduler is not None:
            await thread_to_the_end(scheduler.join)
        if self._core is not None:
            await thread_to_the_end(self._core.lm.close)
        self._let_go()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        portal.run(self.start)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        portal.run(self.aclose)

    async def _start(self) -> None:
        self._cache = cache = EmbeddedCache.open(self._cache_url)
        core = await thread_to_the_end(lambda: self._load(cache))
        cache.register_model(self._served_model_name, core.lm.geometry)
        self._registered = True
        self._scheduler = Scheduler(max_running=self._max_running)
        self._scheduler.start()
        application = make_application(core, self._scheduler, model_path(self._source))
        self._runner = web.AppRunner(
            application, access_log=None, handler_cancellation=True, shutdown_timeout=HANDLERS_END_WITHIN
        )
        await self._runner.setup()
        await to_the_end(web.TCPSite(self._runner, self._host, self._port).start())
        host, port = self._runner.addresses[0][:2]
        self._base_url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _load(self, cache: EmbeddedCache) -> EngineCore:
        tokenizer = self._given_tokenizer or load_tokenizer(model_path(self._source))
        model = load_model(self._source, self._dtype) if isinstance(self._source, str | Path) else self._source
        lm = CausalLM(model, chunk_size=cache.chunk_size, queries=self._queries, max_model_len=self._max_model_len)
        tokenizer.encode("a")  # settles padding and truncation before several threads use it
        self._core = EngineCore(
            lm=lm,
            tokenizer=tokenizer,
            cache=cache,
            model_name=self._served_model_name,
            eos_token_ids=frozenset(token for token in end_tokens(model, tokenizer) if token < lm.vocab_size),
            prefill_tokens=self._prefill_tokens,
            queries=self._queries,
        )
        return self._core

    def _let_go(self) -> None:
        self._core = None
        cache, self._cache = self._cache, None
        registered, self._registered = self._registered, False
        self._starting = False
        self._base_url = ""
        if cache is not None:
            if registered:
                cache.unregister_model(self._served_model_name)
            cache.close()

    def _running(self) -> EngineCore:
        if self._core is None or not self._base_url:
            raise UsageError("the engine is not running: use it inside `with` or `async with`")
        return self._core


def model_path(source: Any) -> str:
    return str(source) if isinstance(source, str | Path) else str(source.config._name_or_path)


def default_name(source: Any) -> str:
    path = model_path(source)
    if Path(path).is_dir():
        return Path(path).resolve().name
    return path or str(source.config.model_type)


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    generation = getattr(model, "generation_config", None)
    ends = getattr(generation, "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [ends]
    return {int(token) for token in [*ends, tokenizer.eos_token_id] if token is not None}
