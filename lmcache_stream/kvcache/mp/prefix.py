"""What a call is about: whole chunks of tokens, under a salt, of one kind of tensor."""

from __future__ import annotations

from typing import NamedTuple

from lmcache_stream.kvcache.mp.status import QUERY_SUFFIX
from lmcache_stream.types import CacheKind

__all__ = ["Prefix", "name_of_chunks"]


class Prefix(NamedTuple):
    """A prefix of a sequence as the cache knows it.

    Args:
        kind: The kind of tensor.
        cache_salt: The salt.
        ids: The ids of its tokens, whole chunks of them.
    """

    kind: CacheKind
    cache_salt: str
    ids: tuple[int, ...]

    def first(self, tokens: int) -> Prefix:
        """The first `tokens` tokens of it."""
        return self._replace(ids=self.ids[:tokens])


def name_of_chunks(model_name: str, kind: CacheKind) -> str:
    """The name that chunks of a model's `kind` of tensor go by."""
    return f"{model_name}{QUERY_SUFFIX}" if kind is CacheKind.QUERY else model_name
