"""Prompts to ask: those that ship with the package, or a user's own JSON lines."""

from __future__ import annotations

from codecs import BOM_UTF8
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec

from lmcache_stream.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Prompt", "read_prompts", "shipped_prompts"]


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Args:
        text: All of it; the question comes last.
        question: The question alone, to be shown.
        answer: Words that a right answer contains; None if they are not known.
        chat: Whether it is a user's message, to be put into the model's chat template, or the raw text to go on from.
    """

    text: str
    question: str
    answer: str | None = None
    chat: bool = True

    def token_ids(self, tokenizer: Any) -> list[int]:
        """The ids of the prompt, through the chat template of a `transformers` tokenizer if it has one."""
        if self.chat and tokenizer.chat_template:
            message = {"role": "user", "content": self.text}
            text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
            ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = tokenizer.encode(self.text)
        return [int(token) for token in ids]

    def is_answered_by(self, text: str) -> bool | None:
        """Whether `text` contains the words of the answer, in whatever case; None if they are not known."""
        return None if self.answer is None else self.answer.casefold() in text.casefold()


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    context: str | None = None
    question: str | None = None
    prompt: str | None = None
    answer: str | None = None


def shipped_prompts() -> list[Prompt]:
    """Six texts of 600 to 700 tokens of SmolLM2 about invented places, each with a question about one fact in it."""
    shipped = resources.files("lmcache_stream.bench") / "prompts.jsonl"
    return _parse(shipped.read_bytes(), shipped.name)


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts, one JSON object a line; empty lines do not count.

    `{"context": ..., "question": ...}` is a message to a chat model; `{"prompt": ...}` is raw text. Both may have an
    "answer", the words that a right one contains.

    Raises:
        UsageError: The file cannot be read, a line is no such object (its number is in the message), or none is there.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read prompts from {path}: {error.strerror}") from error
    return _parse(content, str(path))


def _parse(content: bytes, name: str) -> list[Prompt]:
    prompts = []
    for number, line in enumerate(content.removeprefix(BOM_UTF8).splitlines(), start=1):
        if line.strip():
            try:
                prompts.append(_prompt(msgspec.json.decode(line, type=_Row)))
            except (msgspec.MsgspecError, UnicodeDecodeError, UsageError) as error:
                raise UsageError(f"{name}, line {number}: {error}") from error
    if not prompts:
        raise UsageError(f"{name} has no prompts: write one JSON object a line")
    return prompts


def _prompt(row: _Row) -> Prompt:
    if row.prompt and not row.context and not row.question:
        return Prompt(row.prompt, row.prompt.strip().rpartition("\n")[2], row.answer, chat=False)
    if row.context and row.question and not row.prompt:
        return Prompt(f"{row.context}\n\n{row.question}", row.question, row.answer)
    raise UsageError('each line needs either "context" and "question", or "prompt"')
