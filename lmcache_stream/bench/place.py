"""Where a benchmark runs: an engine, its cache, the tokenizer of its model."""

from __future__ import annotations

import asyncio
import re
import string
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_stream.addresses import shown
from lmcache_stream.bench.datasets import Tokenizer
from lmcache_stream.completions import CompletionsClient
from lmcache_stream.errors import CacheError, EngineError, EngineResponseError, LMCacheError, UsageError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache import AsyncKVCacheContext, aconnect

if TYPE_CHECKING:
    from lmcache_stream.bench.config import ServeOptions
    from lmcache_stream.completions.client import ModelCard

__all__ = ["LocalTokenizer", "Place", "RemoteTokenizer", "open_place"]

EMBEDDED_CACHE = "memory://bench"

_FLAGS = {"base_url": "--base-url", "http_url": "--kv-http-url", "model_name": "--kv-model"}
_PARAMETER = re.compile(rf"\b({'|'.join(_FLAGS)})\b=?")


@dataclass(frozen=True)
class Place:
    """Where requests go.

    Args:
        engine: The engine's client.
        model: Name of the served model.
        cache: The KV cache; None where no KV is edited.
        tokenizer: Its tokenizer.
        max_model_len: Tokens of prompt and output together, at most; None if not known.
        geometry: Shape of the KV; None if not known.
        embedded: Whether the engine runs in this process.
        room: Bytes of KV that the embedded cache holds at most; None for a server's.
    """

    engine: CompletionsClient
    model: str
    cache: AsyncKVCacheContext | None
    tokenizer: Tokenizer
    max_model_len: int | None
    geometry: KVGeometry | None
    embedded: bool
    room: int | None = None


@asynccontextmanager
async def open_place(options: ServeOptions, *, queries: bool = False) -> AsyncIterator[Place]:
    """Connect to the servers of `options`, or serve a model in this process when there are none.

    Args:
        options: Addresses, model and tokenizer.
        queries: Whether editors need the prompts' queries; the embedded engine caches them then.

    Raises:
        UsageError: A server cannot be reached, or does not serve the model.
    """
    async with AsyncExitStack() as held:
        if options.base_url is None:
            yield await _embedded(options, queries, held)
        else:
            yield await _served(options, options.base_url, held)


async def _embedded(options: ServeOptions, queries: bool, held: AsyncExitStack) -> Place:
    from lmcache_stream.engine import EmbeddedEngine, ensure_smollm2
    from lmcache_stream.kvcache.memory import EmbeddedCache

    if options.model is not None and await asyncio.to_thread(_folder, options.model) is None:
        raise UsageError(
            f"--model {options.model} is no model's folder: without --base-url it names the one to serve, with "
            "config.json, weights and tokenizer"
        )
    folder = Path(options.model) if options.model is not None else await asyncio.to_thread(ensure_smollm2)
    url = options.kv_url or EMBEDDED_CACHE
    kept = EmbeddedCache.open(url)
    held.callback(kept.close)
    engine = await held.enter_async_context(EmbeddedEngine(folder, cache=url, queries=queries))
    client = await held.enter_async_context(CompletionsClient(engine.base_url, model=engine.model_name))
    cache = await held.enter_async_context(aconnect(url, model_name=engine.model_name)) if options.editor else None
    return Place(
        engine=client,
        model=engine.model_name,
        cache=cache,
        tokenizer=LocalTokenizer(engine.tokenizer, str(folder)),
        max_model_len=engine.max_model_len,
        geometry=engine.geometry,
        embedded=True,
        room=kept.max_bytes,
    )


async def _served(options: ServeOptions, base_url: str, held: AsyncExitStack) -> Place:
    try:
        finder = await held.enter_async_context(CompletionsClient(base_url))
    except UsageError as error:
        raise UsageError(_with_flags(error)) from error
    card = await asyncio.to_thread(_choose, await _cards(finder), options.model, base_url)
    client = await held.enter_async_context(CompletionsClient(base_url, model=card.id))
    folder = await asyncio.to_thread(_folder, options.model, card.root, card.id)
    cache = None
    if options.kv_url is not None:
        cache = await _connected(options, card, client, held)
    return Place(
        engine=client,
        model=card.id,
        cache=cache,
        tokenizer=await _tokenizer(options.tokenizer, folder, client, card.id),
        max_model_len=card.max_model_len,
        geometry=await asyncio.to_thread(_geometry, cache, folder),
        embedded=False,
    )


def _folder(*candidates: str | None) -> Path | None:
    """The first that is the folder of a model."""
    return next((Path(one) for one in candidates if one and (Path(one) / "config.json").is_file()), None)


async def _cards(client: CompletionsClient) -> list[ModelCard]:
    try:
        cards = await client.models()
    except EngineError as error:
        if isinstance(error, EngineResponseError) and error.status in (401, 403):
            raise UsageError(
                f"{client.base_url} wants its key: HTTP {error.status}: {error.message}; set OPENAI_API_KEY to it"
            ) from error
        scheme = ", or its scheme, to http://" if client.base_url.startswith("https:") else ""
        raise UsageError(
            f"--base-url leads to no engine: {error}; start one, as `lmcache-stream up` does, or correct the address"
            f"{scheme}"
        ) from error
    if not cards:
        raise UsageError(f"--base-url {client.base_url} serves no model")
    return cards


def _choose(cards: Sequence[ModelCard], model: str | None, base_url: str) -> ModelCard:
    for card in cards:
        if model in (None, card.id, card.root):
            return card
    for card in cards:
        if model and card.root and Path(model).is_dir() and Path(model).resolve() == Path(card.root).resolve():
            return card
    raise UsageError(f"{base_url} does not serve --model {model}: give one of {', '.join(card.id for card in cards)}")


async def _connected(
    options: ServeOptions, card: ModelCard, client: CompletionsClient, held: AsyncExitStack
) -> AsyncKVCacheContext:
    assert options.kv_url is not None
    shared = options.kv_url.startswith("memory://")
    connecting = aconnect(
        options.kv_url,
        options.kv_http_url,
        model_name=options.kv_model or (card.id if shared else None),
        probe=None if shared else client,
    )
    try:
        return await held.enter_async_context(connecting)
    except (CacheError, UsageError) as error:
        raise UsageError(f"--kv-url {shown(options.kv_url)} cannot be used: {_with_flags(error)}") from error


def _with_flags(error: LMCacheError) -> str:
    """What an error says, in the names of the command line."""
    return _PARAMETER.sub(lambda found: _FLAGS[found[1]], str(error))


def _geometry(cache: AsyncKVCacheContext | None, folder: Path | None) -> KVGeometry | None:
    if cache is not None:
        return cache.geometry
    try:
        return KVGeometry.from_config(folder) if folder is not None else None
    except LMCacheError:
        return None


async def _tokenizer(
    named: str | None, folder: Path | None, client: CompletionsClient, model: str
) -> LocalTokenizer | RemoteTokenizer:
    if named is None and folder is None:
        return await RemoteTokenizer.of(client, model)
    source = named or str(folder)
    return LocalTokenizer(await asyncio.to_thread(_load_tokenizer, source), source)


def _load_tokenizer(source: str) -> Any:
    from lmcache_stream.engine.model import load_tokenizer

    try:
        return load_tokenizer(source)
    except UsageError as error:
        reason = error.__cause__ if isinstance(error.__cause__, OSError | ValueError) else error
        raise UsageError(f"--tokenizer {source} cannot be loaded: {' '.join(str(reason).split())}") from error


class LocalTokenizer:
    """A tokenizer of `transformers`; its text is what an engine reads."""

    exact = True

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.name = name
        self.vocab_size: int = int(tokenizer.vocab_size)
        self.num_special: int = int(tokenizer.num_special_tokens_to_add())
        self._tokenizer = tokenizer

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The ids of a text."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=special_tokens)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        return str(self._tokenizer.decode(list(ids)))

    def plain_ids(self) -> list[int]:
        """All ids of the vocabulary but special ones."""
        special = set(self._tokenizer.all_special_ids)
        return [token for token in range(self.vocab_size) if token not in special]

    def chat(self, text: str) -> str:
        """A user's message in the chat template; a model without one gets the text as it is."""
        if not self._tokenizer.chat_template:
            return text
        message = {"role": "user", "content": text}
        return str(self._tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True))


class RemoteTokenizer:
    """An engine's own `/tokenize`, where the model's folder is not here. Used in a thread, never on the loop."""

    exact = False
    num_special = 0

    def __init__(self, client: CompletionsClient, name: str, alphabet: list[int]) -> None:
        self.name = name
        self.vocab_size: int = len(alphabet)
        self._client = client
        self._alphabet = alphabet
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def of(cls, client: CompletionsClient, name: str) -> RemoteTokenizer:
        """Ask the engine for the ids of plain text; random prompts are made of those.

        Raises:
            UsageError: It does not tell.
        """
        try:
            ids = await client.tokenize(string.ascii_letters + string.digits + string.punctuation, False)
        except EngineError as error:
            raise UsageError(f"the engine does not tokenize ({error}): name the --tokenizer") from error
        return cls(client, name, sorted(set(ids)))

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The ids of a text."""
        asked = asyncio.run_coroutine_threadsafe(self._client.tokenize(text, special_tokens), self._loop)
        return asked.result()

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        return asyncio.run_coroutine_threadsafe(self._client.detokenize(ids), self._loop).result()

    def plain_ids(self) -> list[int]:
        """The ids of letters, digits and punctuation."""
        return self._alphabet

    def chat(self, text: str) -> str:
        """Not to be had from an engine.

        Raises:
            UsageError: Always.
        """
        raise UsageError("the chat template is with the tokenizer: name the --tokenizer, or take --skip-chat-template")
