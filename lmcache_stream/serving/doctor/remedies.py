"""What several checks ask a user to change."""

from __future__ import annotations

START_ENGINE = "start vLLM, or correct --base-url"
START_CACHE = "start the LMCache server, or correct --kv-http-url (its --http-port)"
CONNECTOR = (
    "start vLLM with --kv-transfer-config for LMCacheMPConnector, kv_role kv_both, and lmcache.mp.host and "
    "lmcache.mp.port of this cache server"
)
TELL_CACHED = "start vLLM with --enable-prompt-tokens-details: nothing else tells that an edit was decoded from"
HONOUR_SALTS = "serve with a vLLM and an LMCache connector that honour cache_salt: edits rest on it"
