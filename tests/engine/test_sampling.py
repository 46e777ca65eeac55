from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lmcache_stream.engine.sampling import SamplingParams, probabilities, sample, score

logits = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=40)


def reference(scores: list[float], params: SamplingParams) -> list[float]:
    """Temperature, min-p, top-k with its ties, top-p, written out on plain floats."""
    weights = [math.exp((score - max(scores)) / params.temperature) for score in scores]
    weights = [weight if weight >= params.min_p * max(weights) else 0.0 for weight in weights]
    if 0 < params.top_k < len(weights):
        weakest = sorted(weights, reverse=True)[params.top_k - 1]
        weights = [weight if weight >= weakest else 0.0 for weight in weights]
    total = sum(weights)
    chances = [weight / total for weight in weights]
    kept, mass = set(), 0.0
    for token in sorted(range(len(chances)), key=lambda token: -chances[token]):
        if mass >= params.top_p:
            break
        kept.add(token)
        mass += chances[token]
    return [chance / mass if token in kept else 0.0 for token, chance in enumerate(chances)]


@settings(deadline=None, max_examples=200)
@given(
    scores=st.lists(st.integers(-40, 40), min_size=1, max_size=40, unique=True),
    temperature=st.floats(0.25, 2.0),
    top_p=st.sampled_from([1.0, 0.97, 0.8, 0.5, 0.1]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 100]),
    min_p=st.sampled_from([0.0, 0.013, 0.31, 1.0]),
)
def test_the_distribution_is_the_documented_one(
    scores: list[int], temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    values = [score / 7 for score in scores]
    expected = torch.tensor(reference(values, params))
    torch.testing.assert_close(probabilities(torch.tensor(values), params), expected, atol=1e-4, rtol=1e-3)


def test_equally_likely_tokens_at_the_edge_of_top_k_all_stay() -> None:
    chances = probabilities(torch.tensor([1.0, 1.0, 1.0, 0.0]), SamplingParams(top_k=2))
    torch.testing.assert_close(chances, torch.tensor([1 / 3, 1 / 3, 1 / 3, 0.0]))


def test_top_p_keeps_one_token_at_least() -> None:
    chances = probabilities(torch.tensor([0.0, 9.0, 1.0]), SamplingParams(top_p=1e-6))
    assert chances.tolist() == [0.0, 1.0, 0.0]


def test_draws_follow_the_distribution_and_the_seed() -> None:
    params = SamplingParams(temperature=0.7, top_k=3)
    scores = torch.tensor([0.0, 1.0, 2.0, 1.5, -3.0])
    expected = probabilities(scores, params)

    def draw(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return [sample(scores, params, generator=generator) for _ in range(4000)]

    drawn = draw(1)
    shares = torch.bincount(torch.tensor(drawn), minlength=5) / len(drawn)
    torch.testing.assert_close(shares, expected, atol=0.03, rtol=0)
    assert shares[expected == 0].sum() == 0
    assert drawn == draw(1)
    assert drawn != draw(2)


@settings(deadline=None, max_examples=50)
@given(logits)
def test_temperature_zero_takes_the_most_likely(values: list[float]) -> None:
    scores = torch.tensor(values)
    assert scores[sample(scores, SamplingParams(temperature=0, top_p=0.5, top_k=3))] == scores.max()


def test_penalties_and_bias() -> None:
    scores = torch.tensor([2.0, -2.0, 1.0, 4.0])
    repeated = score(scores, SamplingParams(repetition_penalty=2.0), prompt=[0], output=[1, 1])
    assert repeated.tolist() == [1.0, -4.0, 1.0, 4.0]
    counted = score(scores, SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), prompt=[0], output=[1, 1, 3])
    assert counted.tolist() == [2.0, -3.0, 1.0, 3.25]
    biased = score(scores, SamplingParams(logit_bias={2: 5, 3: -1000}))
    assert biased.tolist() == [2.0, -2.0, 6.0, -96.0]
    assert score(scores, SamplingParams(), forbidden=[3, 0]).tolist() == [-math.inf, -2.0, 1.0, -math.inf]
    assert scores.tolist() == [2.0, -2.0, 1.0, 4.0]  # the model's own output is not written to


def test_half_precision_is_scored_in_single() -> None:
    assert score(torch.tensor([1.0, 2.0], dtype=torch.bfloat16), SamplingParams()).dtype == torch.float32


def test_null_and_unknown_fields_are_as_if_left_out() -> None:
    params = SamplingParams.model_validate({"temperature": None, "stop": None, "colour": "blue", "seed": None})
    assert params == SamplingParams()
    assert (params.max_tokens, params.temperature) == (16, 1.0)


def test_one_stop_string_may_stand_alone() -> None:
    assert SamplingParams.model_validate({"stop": "x"}).stop == ["x"]


@pytest.mark.parametrize(
    "wrong", [{"temperature": math.nan}, {"temperature": 2.1}, {"top_p": 1.1}, {"min_p": -0.1}, {"max_tokens": 0}]
)
def test_out_of_range(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SamplingParams.model_validate(wrong)
