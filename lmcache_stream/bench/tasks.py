"""Questions with one right answer, hidden in long prompts and made from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from lmcache_stream.bench.texts import encoded, special_prefix
from lmcache_stream.errors import UsageError

__all__ = ["DEPTHS", "FORMS", "TASKS", "Form", "TaskMaker", "TaskSample"]

Form = Literal["after", "inside"]
FORMS: Final = get_args(Form)
"""Where the question is: sent after the drop, or the end of the prompt before it."""

DEPTHS: Final = 10

CITIES = (
    *("Aberdeen", "Bologna", "Cardiff", "Dakar", "Esbjerg", "Fresno", "Granada", "Hobart", "Izmir", "Jakarta"),
    *("Kyoto", "Lisbon", "Montreal", "Nairobi", "Odense", "Porto", "Quito", "Rotterdam", "Santiago", "Tallinn"),
)
COLOURS = ("amber", "black", "blue", "brown", "green", "grey", "orange", "pink", "purple", "red", "silver", "white")
THINGS = (
    *("anchor", "basket", "bell", "bottle", "candle", "chair", "clock", "coat", "engine", "flag", "garden", "hammer"),
    *(
        "island",
        "jacket",
        "kettle",
        "lamp",
        "mirror",
        "needle",
        "pencil",
        "ring",
        "saddle",
        "ticket",
        "umbrella",
        "wagon",
    ),
)


@dataclass(frozen=True)
class TaskSample:
    """One question.

    Args:
        task: Name of the task.
        form: "after": the question follows the KV that is edited; "inside": it ends it.
        index: Number of the sample; samples of both forms with one number ask about the same fact.
        depth: Where the fact lies, between 0 (start of the prompt) and 1.
        cached: Tokens whose KV is edited.
        fed: Tokens that follow: the question, or its last token where the question is inside.
        answer: Tokens of the right answer.
        question_tokens: Tokens of the question that lie in `cached`.
    """

    task: str
    form: Form
    index: int
    depth: float
    cached: tuple[int, ...]
    fed: tuple[int, ...]
    answer: tuple[int, ...]
    question_tokens: int

    @property
    def id(self) -> str:
        """The sample's number, as text."""
        return str(self.index)

    @property
    def group(self) -> str:
        """Task and form."""
        return f"{self.task}/{self.form}"


@dataclass(frozen=True)
class Riddle:
    """Facts to hide at depths, in ascending order, what to ask, and which fact holds the answer."""

    facts: tuple[str, ...]
    depths: tuple[float, ...]
    question: str
    answer: str
    asked: int = 0


class TaskMaker:
    """Makes prompts of an exact number of tokens.

    Args:
        tokenizer: A `transformers` tokenizer.
        sentences: Prose that the facts are hidden between.
        length: Tokens whose KV is edited.
        window: Tokens at the end that no editor drops: a question inside must fit.
        seed: Equal seeds make equal samples.
    """

    def __init__(self, tokenizer: Any, sentences: Sequence[str], *, length: int, window: int, seed: int) -> None:
        self._tokenizer = tokenizer
        self._sentences = sentences
        self._length = length
        self._window = window
        self._seed = seed
        self._first = special_prefix(tokenizer)

    def make(self, task: str, form: Form, index: int) -> TaskSample:
        """Make sample `index` of a task; indices run through ten depths.

        Raises:
            UsageError: The facts or the question do not fit.
        """
        chance = random.Random(f"{self._seed}/{task}/{index}")
        riddle = TASKS[task](chance, (index % DEPTHS + 0.5) / DEPTHS)
        question = self._ids(riddle.question)
        inside = question[:-1] if form == "inside" else []
        if len(inside) > self._window:
            raise UsageError(
                f"the question of {task} takes {len(inside)} tokens, and the last {self._window} are kept in any"
                f" case: give --window {len(inside)}, or leave the task out"
            )
        context = self._context(riddle, self._length - len(inside) - len(self._first), chance)
        return TaskSample(
            task=task,
            form=form,
            index=index,
            depth=riddle.depths[riddle.asked],
            cached=(*self._first, *context, *inside),
            fed=tuple(question[len(inside) :]),
            answer=tuple(self._ids(riddle.answer)),
            question_tokens=len(inside),
        )

    def _context(self, riddle: Riddle, length: int, chance: random.Random) -> list[int]:
        """Prose of exactly `length` tokens with the facts between its sentences."""
        facts = [self._ids(fact) for fact in riddle.facts]
        room = length - sum(map(len, facts))
        if room < 0:
            raise UsageError(f"the facts take {length - room} tokens of {length}: give more --prompt-tokens")
        prose = self._prose(room, riddle.answer, chance)
        context: list[int] = []
        used = 0
        waiting = list(zip(facts, riddle.depths, strict=True))
        for sentence in prose:
            while waiting and used + len(sentence) / 2 >= waiting[0][1] * room:
                context += waiting.pop(0)[0]
            context += sentence
            used += len(sentence)
        for fact, _ in waiting:
            context += fact
        return context

    def _prose(self, room: int, answer: str, chance: random.Random) -> list[list[int]]:
        prose: list[list[int]] = []
        at = chance.randrange(len(self._sentences))
        while room > 0:
            text = self._sentences[at % len(self._sentences)]
            at += 1
            if answer.strip() in text:
                text = "It is so."
            ids = self._ids(" " + text)[:room]
            prose.append(ids)
            room -= len(ids)
        return prose

    def _ids(self, text: str) -> list[int]:
        return encoded(self._tokenizer, text)


def haystack(chance: random.Random, depth: float) -> Riddle:
    """One fact in prose (Kamradt 2023, "Needle in a haystack")."""
    city, code = chance.choice(CITIES), chance.randrange(10_000, 100_000)
    return Riddle(
        facts=(f" The secret code for {city} is {code}.",),
        depths=(depth,),
        question=f"\n\nWhat is the secret code for {city}? The secret code for {city} is",
        answer=f" {code}",
    )


def key_value(chance: random.Random, depth: float) -> Riddle:
    """Five keys with values at even distances; one is asked for (Liu et al. 2023, arXiv:2307.03172)."""
    count = DEPTHS // 2
    keys = chance.sample(CITIES, count)
    values = chance.sample(THINGS, count)
    asked = int(depth * count)
    return Riddle(
        facts=tuple(f" The secret word for {key} is {value}." for key, value in zip(keys, values, strict=True)),
        depths=tuple((index + 0.5) / count for index in range(count)),
        question=f"\n\nWhat is the secret word for {keys[asked]}? The secret word for {keys[asked]} is",
        answer=f" {values[asked]}",
        asked=asked,
    )


def variables(chance: random.Random, depth: float) -> Riddle:
    """Two variables are set early, and set again later to other values; one is asked for, as it is in the end."""
    names = chance.sample(CITIES, 2)
    early, other_early, late, other_late = chance.sample(THINGS, 4)
    lines = [(names[0], early, 0.0), (names[1], other_early, 0.05), (names[0], late, 0.1 + 0.85 * depth)]
    lines = sorted([*lines, (names[1], other_late, 0.525)], key=lambda line: line[2])
    return Riddle(
        facts=tuple(f"\n{name} = {value}\n" for name, value, _ in lines),
        depths=tuple(at for _, _, at in lines),
        question=f"\nIn the end,\n{names[0]} =",
        answer=f" {late}",
        asked=[value for _, value, _ in lines].index(late),
    )


TASKS: Final[dict[str, Callable[[random.Random, float], Riddle]]] = {
    "haystack": haystack,
    "key-value": key_value,
    "variables": variables,
}
