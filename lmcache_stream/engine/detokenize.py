"""Token ids to text, one at a time: what is readable already, and what waits for a character or a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["Detokenizer", "StopStrings"]

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Gives the text that becomes readable with each token id. All of it together is the decoded sequence.

    A token may bring no text: its bytes can be the beginning of a character. Text is decoded in a window that starts
    at the last readable boundary, because a token's text can depend on the one before it.

    Args:
        decode: Token ids to text, as a tokenizer does it; undecodable bytes become U+FFFD.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._known = 0
        self._known_text = ""

    def feed(self, token_id: int) -> str:
        """Add a token and return the text that became readable, "" for none."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if len(text) <= len(self._known_text) or text.endswith(UNFINISHED):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """Return what is left: bytes that will not become a character any more."""
        text = self._decode(self._window)
        return self._advance(text) if len(text) > len(self._known_text) else ""

    def _advance(self, text: str) -> str:
        fresh = text[len(self._known_text) :]
        self._window = self._window[self._known :]
        self._known = len(self._window)
        self._known_text = self._decode(self._window)
        return fresh


class StopStrings:
    """Cuts a text at the first stop string, and holds back what may become one.

    Args:
        stops: The stop strings, none empty.
        include: Whether the stop string itself stays in the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Add text and return what is certain to be output. While not `armed`, nothing stops and all is output."""
        text = self._held + text
        self._held = ""
        if not armed:
            return text
        found = [(at, order) for order, stop in enumerate(self._stops) if (at := text.find(stop)) >= 0]
        if found:
            at, order = min(found)
            self.matched = self._stops[order]
            return text[: at + len(self.matched)] if self._include else text[:at]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the text that was held back for a stop string that did not come."""
        text, self._held = self._held, ""
        return text


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`, without being all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
