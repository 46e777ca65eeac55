"""How one layer's keys are rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmcache_stream.errors import GeometryError
from lmcache_stream.model_config import text_config
from lmcache_stream.rotary.frequencies import inverse_frequencies
from lmcache_stream.rotary.parameters import is_interleaved, is_rotary, rope_parameters, rotated_slice

__all__ = ["Rotary"]


@dataclass(frozen=True, slots=True)
class Rotary:
    """How one layer's keys are rotated.

    Args:
        inv_freq: Inverse frequencies, radians a position, one for each rotated pair.
        head_dim: Values a head of the cached keys; for MLA the width of the latent plane.
        offset: Where in the head the rotated slice starts; it is `2 * len(inv_freq)` wide.
        interleaved: Pairs are neighbours (GPT-J); otherwise value `i` of the slice's first half goes with value `i`
            of its second (GPT-NeoX, Llama).
        limit: The first position that the model rotates in another way; None: there is none.

    Raises:
        GeometryError: The slice does not fit into the head.
    """

    inv_freq: tuple[float, ...]
    head_dim: int
    offset: int = 0
    interleaved: bool = False
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.offset < 0 or self.offset + self.width > self.head_dim:
            raise GeometryError(
                f"a rotated slice of {self.width} values from {self.offset} on does not fit into a head of "
                f"{self.head_dim}"
            )

    @property
    def width(self) -> int:
        """Values of the rotated slice."""
        return 2 * len(self.inv_freq)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], layer_type: str | None = None, *, regime: str | None = None
    ) -> Rotary | None:
        """Read the rotation from a Hugging Face configuration.

        Takes `rope_parameters` (transformers 5, possibly by layer type) and the older `rope_theta`, `rope_scaling`,
        `rotary_dim` and their kin. Known scalings: default, linear, llama3, yarn (Peng et al. 2023,
        arXiv:2309.00071), proportional, dynamic and longrope. Frequencies are computed in float32, as engines do.

        Args:
            config: A `config.json` as a dict; the language part of a multimodal one is found.
            layer_type: Which layers, where they differ ("full_attention", "sliding_attention", ...).
            regime: Which rotation is meant where the configuration alone does not tell:

                - dynamic NTK: "vllm" (one fixed, scaled base) or "transformers" (plain frequencies up to the original
                  length; there they change as the sequence grows, so later positions are refused);
                - longrope: "short" or "long" factors. vLLM uses "long" everywhere when its maximum length exceeds the
                  original one, transformers when the sequence does;
                - multimodal (mrope): "text", true for prompts without images, audio and video only.

        Returns:
            The rotation; None for layers without rotary positions (learned, ALiBi, none).

        Raises:
            GeometryError: The rotation is unknown: keys are missing, the scaling is not known, or `regime` is needed.
        """
        config = text_config(config)
        if not is_rotary(config, layer_type):
            return None
        parameters = rope_parameters(config, layer_type)
        if parameters is None:
            return None
        head_dim, offset, rotated_dim = rotated_slice(config, parameters)
        inv_freq, limit = inverse_frequencies(config, parameters, rotated_dim, head_dim, regime)
        return cls(tuple(inv_freq.tolist()), head_dim, offset, is_interleaved(config), limit)
