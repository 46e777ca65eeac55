"""The bytes that real servers sent, and what they mean according to the plain `json` module."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True)
class Recorded:
    name: str
    status: int
    content_type: str
    body: bytes

    @property
    def payloads(self) -> list[Any]:
        texts = [event.removeprefix("data: ") for event in self.body.decode().split("\n\n")]
        return [json.loads(text) for text in texts if text and text != "[DONE]"]

    @property
    def choices(self) -> list[Any]:
        return [choice for payload in self.payloads for choice in payload.get("choices", [])]

    @property
    def tokens(self) -> list[tuple[int | None, str]]:
        tokens: list[tuple[int | None, str]] = []
        for choice in self.choices:
            ids = choice["token_ids"]
            tokens += [(token_id, "") for token_id in ids[:-1]]
            tokens.append((ids[-1] if ids else None, choice["text"]))
        return tokens

    @property
    def usage(self) -> tuple[int, int] | None:
        usages = [payload["usage"] for payload in self.payloads if payload.get("usage")]
        return (usages[-1]["prompt_tokens"], usages[-1]["completion_tokens"]) if usages else None


RECORDED = {
    entry["name"]: Recorded(
        entry["name"], entry["status"], entry["content_type"], (DATA / "sse" / f"{entry['name']}.sse").read_bytes()
    )
    for entry in json.loads((DATA / "sse" / "index.json").read_text())
}
STREAMS = [
    name for name, r in RECORDED.items() if r.status == 200 and name not in ("bad-token", "no-ids", "token-id-strings")
]
REFUSALS = [name for name, r in RECORDED.items() if r.status != 200]
