from __future__ import annotations

from typing import Any

import pytest

from lmcache_stream.bench.tasks import DEPTHS, FORMS, TASKS, Form, TaskMaker
from lmcache_stream.bench.texts import sentences
from lmcache_stream.errors import UsageError
from tests.bench.corpus import made_up_corpus

LENGTH, WINDOW = 512, 128


def maker(tiny_model: tuple[Any, Any], seed: int = 0, length: int = LENGTH, window: int = WINDOW) -> TaskMaker:
    return TaskMaker(tiny_model[1], sentences(made_up_corpus(), 0), length=length, window=window, seed=seed)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("form", FORMS)
def test_the_answer_is_in_the_prompt_once_and_the_length_is_exact(
    tiny_model: tuple[Any, Any], task: str, form: Form
) -> None:
    tokenizer = tiny_model[1]
    for index in range(DEPTHS):
        sample = maker(tiny_model).make(task, form, index)
        assert len(sample.cached) == LENGTH
        answer = tokenizer.decode(sample.answer)
        assert tokenizer.decode(sample.cached).count(answer) == 1
        assert answer not in tokenizer.decode(sample.fed)


@pytest.mark.parametrize("task", TASKS)
def test_both_forms_ask_the_same(tiny_model: tuple[Any, Any], task: str) -> None:
    after, inside = (maker(tiny_model).make(task, form, 3) for form in FORMS)
    assert after.answer == inside.answer
    assert after.question_tokens == 0
    assert 0 < inside.question_tokens <= WINDOW
    assert after.fed == (*inside.cached[LENGTH - inside.question_tokens :], *inside.fed)
    assert len(inside.fed) == 1


@pytest.mark.parametrize("task", TASKS)
def test_samples_are_the_seeds(tiny_model: tuple[Any, Any], task: str) -> None:
    assert maker(tiny_model, 0).make(task, "after", 1) == maker(tiny_model, 0).make(task, "after", 1)
    assert maker(tiny_model, 0).make(task, "after", 1) != maker(tiny_model, 1).make(task, "after", 1)


def test_the_fact_is_hidden_at_ten_depths(tiny_model: tuple[Any, Any]) -> None:
    tokenizer = tiny_model[1]
    found = []
    for index in range(DEPTHS):
        sample = maker(tiny_model).make("haystack", "after", index)
        text = tokenizer.decode(sample.cached)
        found.append(text.index(tokenizer.decode(sample.answer)) / len(text))
        assert sample.depth == pytest.approx((index + 0.5) / DEPTHS)
    assert found == sorted(found)
    assert found[0] < 0.2
    assert found[-1] > 0.8


def test_a_question_longer_than_the_window_is_refused(tiny_model: tuple[Any, Any]) -> None:
    with pytest.raises(UsageError, match="--window"):
        maker(tiny_model, window=2).make("haystack", "inside", 0)


def test_facts_that_do_not_fit_are_refused(tiny_model: tuple[Any, Any]) -> None:
    with pytest.raises(UsageError, match="--prompt-tokens"):
        maker(tiny_model, length=8).make("key-value", "after", 0)
