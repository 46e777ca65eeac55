"""How long the parts of an examination may take, in seconds."""

from __future__ import annotations

ANSWER = 3.0
"""For a server to answer one small question."""

QUICK = 4.5
"""For a check that sends no prompt of many tokens."""

ARRIVAL = 30.0
"""For the KV of a few chunks to come into the cache."""

CLOSING = 10.0
"""For everything that was held to be let go of."""
