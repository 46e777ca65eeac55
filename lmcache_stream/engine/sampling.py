"""How the next token is chosen: parameters as vLLM names them, and the pure function that applies them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

__all__ = ["SamplingParams", "probabilities", "sample", "score"]

GREEDY_BELOW = 1e-5
MAX_LOGIT_BIAS = 100.0


def as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class SamplingParams(BaseModel):
    """Parameters of one completion. Unknown fields are ignored and null means the default, as in vLLM.

    Args:
        max_tokens: Tokens to generate at most.
        min_tokens: Tokens before which neither an end-of-text token nor a stop ends the completion.
        temperature: Divides the logits, 0 to 2; 0 is greedy.
        top_p: Keep the most likely tokens that together have at least this probability.
        top_k: Keep this many of the most likely tokens; 0 or -1 keeps all.
        min_p: Keep tokens at least this likely relative to the most likely one.
        repetition_penalty: Divides positive and multiplies negative logits of tokens of the prompt and the output.
        presence_penalty: Taken off the logits of tokens of the output, once each.
        frequency_penalty: Taken off the logits of tokens of the output, once per occurrence.
        logit_bias: Added to the logits of single token ids, from -100 to 100.
        seed: Makes random choices repeatable; None: a fresh one.
        stop: Strings that end the completion. The output is cut before them.
        stop_token_ids: Tokens that end the completion. They are among the ids, but not in the text.
        include_stop_str_in_output: Cut the text after the stop string instead of before it.
        ignore_eos: Go on after an end-of-text token.
        skip_special_tokens: Leave special tokens out of the text.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="ignore")

    max_tokens: Annotated[int, Field(ge=1)] = 16
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[int, float] = {}
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(as_list)] = []
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @model_validator(mode="before")
    @classmethod
    def null_is_default(cls, data: Any) -> Any:
        """Take null for the default, as vLLM does."""
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def check_token_counts(self) -> SamplingParams:
        """Refuse more tokens at least than at most."""
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens})")
        return self

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW


def sample(
    logits: torch.Tensor,
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    forbidden: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> int:
    """Choose the next token from `logits` `[V]`.

    Args:
        logits: Of the next token, any floating type, on any device.
        params: How to choose.
        prompt: Token ids of the prompt, for the repetition penalty.
        output: Token ids generated so far, for the penalties.
        forbidden: Token ids that may not be chosen now.
        generator: Source of chance, on the CPU.
    """
    scores = score(logits, params, prompt=prompt, output=output, forbidden=forbidden)
    if params.greedy:
        return int(scores.argmax())
    return int(torch.multinomial(probabilities(scores, params), 1, generator=generator))


def score(
    logits: torch.Tensor,
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    forbidden: Sequence[int] = (),
) -> torch.Tensor:
    """Apply bias, penalties and bans to `logits` `[V]`; what greedy choice looks at, in float32 on the CPU, `[V]`."""
    scores = logits.detach().to("cpu", torch.float32, copy=True)
    if forbidden:
        scores[list(forbidden)] = float("-inf")
    for token, bias in params.logit_bias.items():
        scores[token] += min(max(bias, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS)
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *output}), dtype=torch.long)
        penalty = params.repetition_penalty
        scores[seen] = torch.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    if output and (params.presence_penalty or params.frequency_penalty):
        counts = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=scores.numel())
        scores -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    return scores


def probabilities(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Turn `scores` `[V]` into the distribution that is drawn from, `[V]`: temperature, min-p, top-k, then top-p."""
    scores = scores / params.temperature
    if params.min_p > 0:
        likelihood = scores.softmax(-1)
        scores = scores.masked_fill(likelihood < params.min_p * likelihood.max(), float("-inf"))
    if 0 < params.top_k < scores.numel():
        weakest = scores.topk(params.top_k).values[-1]
        scores = scores.masked_fill(scores < weakest, float("-inf"))
    chances = scores.softmax(-1)
    if params.top_p < 1:
        ordered, index = chances.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        chances = chances.index_fill(0, index[before >= params.top_p], 0.0)
        chances /= chances.sum()
    return chances
