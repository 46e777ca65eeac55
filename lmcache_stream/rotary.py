"""Rotary positions: a model's frequencies, and moving keys from one position to another.

Rotary position embedding (RoPE, Su et al. 2021, arXiv:2104.09864) turns pairs of a key's values by an angle that grows
with the token's position. A key that moves from one position to another is turned by the difference of both angles;
scaling factors that a model applied to its keys (YaRN's attention factor) stay in them and are not applied again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from lmcache_stream.errors import GeometryError, UsageError

__all__ = ["Rotary", "has_alibi", "latent_width", "mean_rotation", "rerotate", "rerotate_", "text_config"]

ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "hidden_size": ("n_embd", "d_model"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
    "rope_theta": ("rotary_emb_base",),
    "partial_rotary_factor": ("rotary_pct",),
}
"""Older names of keys in a Hugging Face configuration."""

NO_ROTARY: Final = frozenset(
    [
        "biogpt",
        "bloom",
        "codeshell",
        "ctrl",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gpt-sw3",
        "jamba",
        "mpt",
        "openai-gpt",
        "opt",
        "xglm",
    ]
)
"""Model types whose keys carry no rotation: learned, sinusoidal, ALiBi or no positions."""

INTERLEAVED: Final = frozenset(
    [
        "blt",
        "codegen",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "ernie4_5",
        "ernie4_5_moe",
        "glm",
        "glm4",
        "gptj",
        "helium",
        "llama4_text",
    ]
)
"""Model types that rotate neighbours (0, 1), (2, 3), ... in place; the others rotate the halves of the slice."""

DEFAULT_THETA: Final[Mapping[str, float]] = {
    **dict.fromkeys(
        [
            "codegen",
            "cohere2",
            "deepseek_v2",
            "deepseek_v3",
            "falcon",
            "gemma",
            "gemma2",
            "glm",
            "glm4",
            "glm4_moe",
            "gpt_neox",
            "gptj",
            "granite",
            "llama",
            "mistral",
            "nemotron",
            "olmo",
            "olmo2",
            "olmoe",
            "persimmon",
            "phi",
            "phi3",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
            "seed_oss",
            "stablelm",
            "starcoder2",
        ],
        10_000.0,
    ),
    **dict.fromkeys(["bitnet", "cohere", "ernie4_5", "ernie4_5_moe", "exaone", "llama4_text", "olmo3"], 500_000.0),
    **dict.fromkeys(["mixtral", "phimoe", "solar_open"], 1_000_000.0),
    "gpt_oss": 150_000.0,
    "helium": 100_000.0,
    "smollm3": 2_000_000.0,
}
"""The rotary base of model types whose configuration may leave it out."""

DEFAULT_PARTIAL: Final[Mapping[str, float]] = {
    **dict.fromkeys(["bamba", "glm", "glm4", "glm4_moe", "nemotron", "persimmon", "phi"], 0.5),
    **dict.fromkeys(["gpt_neox", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "stablelm"], 0.25),
}
"""The rotated share of a head of model types whose configuration may leave it out."""

DEFAULT_HEAD_DIM: Final[Mapping[str, int]] = {
    **dict.fromkeys(["gpt_oss"], 64),
    **dict.fromkeys(["ernie4_5", "glm", "glm4", "helium", "llama4_text", "qwen3", "seed_oss", "solar_open"], 128),
    **dict.fromkeys(["gemma", "gemma2", "gemma3_text", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"], 256),
}
"""The head size of model types whose configuration may leave it out, where it is not hidden size by heads."""

ROTARY_KEYS: Final = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_dim", "rotary_emb_base", "rotary_pct")


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
        if not _is_rotary(config, layer_type):
            return None
        parameters = _rope_parameters(config, layer_type)
        if parameters is None:
            return None
        head_dim, offset, rotated_dim = _slice(config, parameters)
        inv_freq, limit = _frequencies(config, parameters, rotated_dim, head_dim, regime)
        model_type = str(config.get("model_type", ""))
        mla = latent_width(config) is not None
        interleaved = bool(config.get("rope_interleave", True)) if mla else model_type in INTERLEAVED
        return cls(tuple(inv_freq.tolist()), head_dim, offset, interleaved, limit)


def rerotate(
    keys: torch.Tensor,
    old_positions: torch.Tensor,
    new_positions: torch.Tensor,
    rotary: Rotary | Sequence[Rotary | None] | None,
) -> torch.Tensor:
    """Move keys to other positions.

    An engine's angle is the float32 product of position and frequency. The difference of two such angles is taken in
    float64 and the rotation done in float32, so the result is as good as a fresh rotation by the engine, at any
    position up to 2^24.

    Args:
        keys: `[L, T, H * head_dim]` or `[..., T, H, head_dim]` with at least four dimensions; floating point.
        old_positions: Positions that the keys carry, int64: `[T]`; for keys with one leading dimension also `[L, T]`
            or `[L, H, T]`.
        new_positions: Positions to carry, in one of the same shapes.
        rotary: The rotation of all layers, or one for each layer; None: that layer has no rotary positions.

    Returns:
        A contiguous tensor of the shape and dtype of `keys`. Memory beyond it: tiles of a few megabytes.

    Raises:
        UsageError: Shapes do not fit each other, or a position lies beyond what the rotation covers.
    """
    out = keys.clone(memory_format=torch.contiguous_format)
    if out.dim() > 4:
        shape = out.shape
        return rerotate_(out.view(-1, *shape[-3:]), old_positions, new_positions, rotary).view(shape)
    return rerotate_(out, old_positions, new_positions, rotary)


def rerotate_(
    keys: torch.Tensor,
    old_positions: torch.Tensor,
    new_positions: torch.Tensor,
    rotary: Rotary | Sequence[Rotary | None] | None,
) -> torch.Tensor:
    """Like `rerotate`, in place; `keys` is `[L, T, H * head_dim]` or `[L, T, H, head_dim]`. Returns `keys`."""
    if keys.dim() not in (3, 4) or not keys.is_floating_point():
        raise UsageError(
            f"keys must be floating point, [L, T, H * head_dim] or [L, T, H, head_dim], not {keys.dtype} "
            f"{list(keys.shape)}"
        )
    layers = [rotary] * keys.shape[0] if rotary is None or isinstance(rotary, Rotary) else list(rotary)
    if len(layers) != keys.shape[0]:
        raise UsageError(f"rotary names {len(layers)} layers, keys have {keys.shape[0]}: give one for each layer")
    if keys.numel():
        Rerotation(old_positions, new_positions, layers).turn_(keys)
    return keys


class Rerotation:
    """The move of `rerotate_`, for the keys of some layers at a time: their angles are computed once.

    Args:
        old_positions: Positions that the keys carry, int64 `[T]`, `[L, T]` or `[L, H, T]`.
        new_positions: Positions to carry, in one of the same shapes.
        layers: The rotation of each of the `L` layers; None: it has no rotary positions.
    """

    def __init__(
        self, old_positions: torch.Tensor, new_positions: torch.Tensor, layers: Sequence[Rotary | None]
    ) -> None:
        self._old, self._new = old_positions, new_positions
        self._layers = list(layers)
        self._shared: dict[Rotary, tuple[int, torch.Tensor, torch.Tensor]] = {}
        self._tables: dict[Rotary, tuple[int, torch.Tensor, torch.Tensor] | None] = {}
        self._scratch = torch.empty(2, 0)

    def turn_(self, keys: torch.Tensor, first: int = 0) -> None:
        """Move keys `[L', T, H * head_dim]` or `[L', T, H, head_dim]` of the layers from `first` on, in place.

        Raises:
            UsageError: Shapes do not fit each other, or a position lies beyond what the rotation covers.
        """
        for begin, end, rotary in _runs(self._layers[first : first + keys.shape[0]]):
            if rotary is None:
                continue
            part = _by_head(keys[begin:end], rotary)
            old, new = (
                self._of_layers(name, positions, part, first + begin, first + end)
                for name, positions in (("old_positions", self._old), ("new_positions", self._new))
            )
            _check_limit(rotary, old, new)
            if old.dim() == new.dim() == 1:
                self._turn_shared(part, old, new, rotary)
            else:
                self._turn_each(part, _per_token_head(old), _per_token_head(new), rotary)

    def _of_layers(self, name: str, positions: torch.Tensor, part: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        layers, tokens, heads = len(self._layers), part.shape[1], part.shape[2]
        if tuple(positions.shape) not in ((tokens,), (layers, tokens), (layers, heads, tokens)):
            raise UsageError(
                f"{name} must be [{tokens}], [{layers}, {tokens}] or [{layers}, {heads}, {tokens}], not "
                f"{list(positions.shape)}"
            )
        positions = positions.to(part.device)
        return positions if positions.dim() == 1 else positions[begin:end]

    def _turn_shared(self, keys: torch.Tensor, old: torch.Tensor, new: torch.Tensor, rotary: Rotary) -> None:
        if rotary not in self._shared:
            inv_freq = _inv_freq(rotary, keys.device)
            turn = _angles(new, inv_freq) - _angles(old, inv_freq)
            cos, sin = (part.to(_work_dtype(keys))[None, :, None, :] for part in (turn.cos(), turn.sin()))
            self._shared[rotary] = _first_moved(old, new), cos, sin
        first, cos, sin = self._shared[rotary]
        layer_step, token_step = _tiles(keys)
        for layer in range(0, keys.shape[0], layer_step):
            for t in range(first, keys.shape[1], token_step):
                some = slice(t, t + token_step)
                self._turn(keys[layer : layer + layer_step, some], cos[:, some], sin[:, some], rotary)

    def _turn_each(self, keys: torch.Tensor, old: torch.Tensor, new: torch.Tensor, rotary: Rotary) -> None:
        if rotary not in self._tables:
            low = int(min(self._old.min(), self._new.min()))
            span = int(max(self._old.max(), self._new.max())) + 1 - low
            pays = span * rotary.width <= keys.numel() // keys.shape[0] * len(self._layers) // 16
            self._tables[rotary] = (low, *_table(rotary, low, span, keys)) if pays else None
        table, dtype, inv_freq = self._tables[rotary], _work_dtype(keys), _inv_freq(rotary, keys.device)
        layer_step, token_step = _tiles(keys)
        for layer in range(0, keys.shape[0], layer_step):
            for t in range(0, keys.shape[1], token_step):
                before, after = (_tile(p, layer, layer_step, t, token_step) for p in (old, new))
                if table is None:
                    turn = _angles(after, inv_freq) - _angles(before, inv_freq)
                    cos, sin = turn.cos().to(dtype), turn.sin().to(dtype)
                else:
                    low, *angles = table
                    cos, sin = _turn_by_table(angles, before - low, after - low)
                self._turn(keys[layer : layer + layer_step, t : t + token_step], cos, sin, rotary)

    def _turn(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: Rotary) -> None:
        """Rotate `[L, T, H, head_dim]`, in memory that is used again: faulting it in anew would take longer."""
        count = keys[..., : rotary.width].numel()
        if self._scratch.shape[1] < count or self._scratch.dtype != cos.dtype or self._scratch.device != cos.device:
            self._scratch = torch.empty(2, count, dtype=cos.dtype, device=cos.device)
        _turn(keys, cos, sin, rotary, self._scratch[:, :count])


def mean_rotation(rotary: Rotary, start: int, count: int, device: torch.device) -> torch.Tensor:
    """Average the rotations of the positions `start .. start + count - 1`.

    Returns:
        float64 `[head_dim, head_dim]`: `mean_rotation @ v` is the mean of a vector `v` at position 0 rotated to each.

    Raises:
        UsageError: A position lies beyond what the rotation covers.
    """
    positions = torch.arange(start, start + count, device=device)
    _check_limit(rotary, positions, positions)
    angles = _angles(positions, _inv_freq(rotary, device))
    columns = torch.eye(rotary.head_dim, dtype=torch.float64, device=device)
    scratch = torch.empty(2, columns.shape[0] * rotary.width, dtype=columns.dtype, device=device)
    _turn(columns[None, None], angles.cos().mean(0), angles.sin().mean(0), rotary, scratch)
    return columns.T


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find the language model's part of a possibly multimodal Hugging Face configuration."""
    for key in ("text_config", "llm_config", "language_config", "thinker_config"):
        nested = config.get(key)
        if isinstance(nested, Mapping) and nested:
            return text_config(nested)
    return config


def latent_width(config: Mapping[str, Any]) -> int | None:
    """Width of the latent plane of multi-head latent attention (MLA: latent, then rotated slice); None without MLA."""
    if config.get("kv_lora_rank") is None or config.get("qk_rope_head_dim") is None:
        return None
    if config.get("model_type") == "minicpm3":
        raise GeometryError("minicpm3 caches expanded heads, not the latent of its MLA: give a KVGeometry by hand")
    return int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])


def has_alibi(config: Mapping[str, Any]) -> bool:
    """Whether attention is biased by the distance of slots (ALiBi), so that a cache's order matters."""
    attention = config.get("attn_config")
    nested = bool(attention.get("alibi", True)) if isinstance(attention, Mapping) else config.get("model_type") == "mpt"
    return (
        nested
        or config.get("model_type") == "bloom"
        or bool(config.get("alibi"))
        or config.get("position_embedding_type") == "alibi"
    )


def head_size(config: Mapping[str, Any]) -> int:
    """Values a head, without MLA."""
    given = config.get("head_dim", DEFAULT_HEAD_DIM.get(str(config.get("model_type", ""))))
    if given is not None:
        return int(given)
    return int(require(config, "hidden_size")) // int(require(config, "num_attention_heads"))


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """Value of `key` or of one of its older names; None if there is none."""
    return next((config[name] for name in (key, *ALIASES.get(key, ())) if config.get(name) is not None), None)


def require(config: Mapping[str, Any], key: str) -> Any:
    """Like `lookup`, but raises `GeometryError` naming the key."""
    value = lookup(config, key)
    if value is None:
        model_type = config.get("model_type", "unnamed")
        raise GeometryError(
            f"{key} is missing in the configuration of model type {model_type!r}; if transformers knows its default, "
            "pass AutoConfig.from_pretrained(...).to_dict()"
        )
    return value


def _is_rotary(config: Mapping[str, Any], layer_type: str | None) -> bool:
    model_type = config.get("model_type")
    if model_type in NO_ROTARY or has_alibi(config):
        return False
    if config.get("position_embedding_type") in ("absolute", "learned", "learned_absolute", "nope", "sinusoidal"):
        return False
    if model_type in ("cohere2", "cohere2_moe"):
        return layer_type != "full_attention"
    if model_type in ("exaone4", "exaone_moe") and config.get("sliding_window"):
        return layer_type != "full_attention"
    if any(config.get(key) for key in ROTARY_KEYS) or model_type in DEFAULT_THETA or model_type == "gemma3_text":
        return True
    raise GeometryError(
        f"nothing in the configuration of model type {model_type!r} tells its positions: no rope_parameters, "
        "rope_theta or rope_scaling"
    )


def _rope_parameters(config: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any] | None:
    """The parameters of one layer type as one flat mapping, older keys included; None: no rotary positions."""
    model_type = str(config.get("model_type", ""))
    given = config.get("rope_parameters") or {}
    by_type = {key: value for key, value in given.items() if value is None or isinstance(value, Mapping)}
    by_type = {key: value for key, value in by_type.items() if key.endswith("attention") or value is not None}
    if by_type:
        if layer_type is None and len({repr(value) for value in by_type.values()}) == 1:
            layer_type = next(iter(by_type))
        if layer_type not in by_type:
            raise GeometryError(f"rope_parameters differ by layer type: say which of {sorted(by_type)}")
        given = by_type[layer_type]
        if given is None:
            return None
        parameters = dict(given)
    else:
        local = layer_type == "sliding_attention"
        parameters = dict(given or config.get("rope_scaling") or {})
        if not given and local and model_type in ("gemma3_text", "olmo3"):
            parameters = {}
        if not given and model_type == "gemma3_text":
            default = 10_000.0 if local else 1_000_000.0
            theta = config.get("rope_local_base_freq" if local else "rope_theta")
            parameters["rope_theta"] = default if theta is None else theta
    if parameters.get("rope_theta") is None:
        theta = lookup(config, "rope_theta")
        parameters["rope_theta"] = DEFAULT_THETA.get(model_type) if theta is None else theta
    if parameters["rope_theta"] is None:
        require(config, "rope_theta")
    parameters["rope_type"] = parameters.get("rope_type") or parameters.get("type") or "default"
    if parameters.get("partial_rotary_factor") is None:
        parameters["partial_rotary_factor"] = lookup(config, "partial_rotary_factor")
    return parameters


def _slice(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> tuple[int, int, int]:
    """Head size, where its rotated slice starts, and how wide that slice is."""
    latent = latent_width(config)
    if latent is not None:
        return latent, int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
    head_dim = head_size(config)
    rotary_dim = config.get("rotary_dim")
    if rotary_dim is not None:
        return head_dim, 0, int(rotary_dim)
    if parameters["rope_type"] == "proportional":
        return head_dim, 0, head_dim
    partial = parameters["partial_rotary_factor"]
    if partial is None:
        partial = DEFAULT_PARTIAL.get(str(config.get("model_type", "")), 1.0)
    return head_dim, 0, int(head_dim * float(partial))


def _frequencies(
    config: Mapping[str, Any], parameters: Mapping[str, Any], dim: int, head_dim: int, regime: str | None
) -> tuple[torch.Tensor, int | None]:
    """Inverse frequencies, float32 `[dim / 2]`, and the first position at which they no longer hold."""
    rope_type = str(parameters["rope_type"])
    theta = float(parameters["rope_theta"])
    if ("mrope_section" in parameters or rope_type == "mrope") and regime != "text":
        raise GeometryError(
            'multimodal rotary positions (mrope) are plain only for text: pass regime="text" if no prompt holds images'
        )
    match rope_type:
        case "default" | "mrope":
            return _plain(theta, dim), None
        case "linear":
            return _plain(theta, dim) / float(_need(parameters, "factor")), None
        case "llama3":
            return _llama3(config, parameters, _plain(theta, dim)), None
        case "yarn" | "deepseek_yarn":
            return _yarn(config, parameters, theta, dim), None
        case "dynamic":
            return _dynamic(config, parameters, theta, dim, regime)
        case "longrope" | "su":
            return _longrope(config, parameters, theta, dim, regime)
        case "proportional":
            return _proportional(parameters, theta, head_dim), None
    raise GeometryError(f"rope_type {rope_type!r} is not known")


def _plain(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _need(parameters: Mapping[str, Any], key: str) -> Any:
    if parameters.get(key) is None:
        raise GeometryError(f"rope_type {parameters['rope_type']!r} needs {key}, which is missing")
    return parameters[key]


def _original_length(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> int:
    original = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    return int(original or require(config, "max_position_embeddings"))


def _llama3(config: Mapping[str, Any], parameters: Mapping[str, Any], inv_freq: torch.Tensor) -> torch.Tensor:
    factor = float(_need(parameters, "factor"))
    low, high = float(_need(parameters, "low_freq_factor")), float(_need(parameters, "high_freq_factor"))
    length = _original_length(config, parameters)
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > length / low, inv_freq / factor, inv_freq)
    smooth = (length / wavelength - low) / (high - low)
    between = (wavelength >= length / high) & (wavelength <= length / low)
    return torch.where(between, (1 - smooth) * scaled / factor + smooth * scaled, scaled)


def _yarn(config: Mapping[str, Any], parameters: Mapping[str, Any], theta: float, dim: int) -> torch.Tensor:
    length = _original_length(config, parameters)
    factor = float(parameters.get("factor") or require(config, "max_position_embeddings") / length)

    def pair_that_turns(times: float) -> float:
        return dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = pair_that_turns(float(parameters.get("beta_fast") or 32))
    last = pair_that_turns(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    wavelength = theta ** (torch.arange(0, dim, 2).float() / dim)
    kept = 1 - interpolated
    return 1.0 / (factor * wavelength) * (1 - kept) + 1.0 / wavelength * kept


def _dynamic(
    config: Mapping[str, Any], parameters: Mapping[str, Any], theta: float, dim: int, regime: str | None
) -> tuple[torch.Tensor, int | None]:
    if parameters.get("alpha") is not None:
        return _plain(theta * float(parameters["alpha"]) ** (dim / (dim - 2)), dim), None
    if regime == "transformers":
        return _plain(theta, dim), int(require(config, "max_position_embeddings"))
    if regime == "vllm":
        factor = float(_need(parameters, "factor"))
        return _plain(theta * (factor * factor - (factor - 1)) ** (dim / (dim - 2)), dim), None
    raise GeometryError(
        'dynamic NTK rotates differently by engine: pass regime="vllm" or regime="transformers" (up to the original '
        "length only)"
    )


def _longrope(
    config: Mapping[str, Any], parameters: Mapping[str, Any], theta: float, dim: int, regime: str | None
) -> tuple[torch.Tensor, int | None]:
    if regime not in ("short", "long"):
        raise GeometryError('longrope has two sets of factors: pass regime="short" or regime="long"')
    factors = torch.tensor(_need(parameters, f"{regime}_factor"), dtype=torch.float32)
    if factors.numel() != dim // 2:
        raise GeometryError(f"longrope needs {dim // 2} {regime} factors, not {factors.numel()}")
    limit = _original_length(config, parameters) if regime == "short" else None
    return 1.0 / (factors * theta ** (torch.arange(0, dim, 2).float() / dim)), limit


def _proportional(parameters: Mapping[str, Any], theta: float, head_dim: int) -> torch.Tensor:
    pairs = int(float(parameters["partial_rotary_factor"] or 1.0) * head_dim // 2)
    inv_freq = torch.zeros(head_dim // 2)
    inv_freq[:pairs] = 1.0 / (theta ** (torch.arange(0, 2 * pairs, 2, dtype=torch.float32) / head_dim))
    return inv_freq / float(parameters.get("factor") or 1.0)


def _runs(layers: Sequence[Rotary | None]) -> list[tuple[int, int, Rotary | None]]:
    """Runs of neighbouring layers with equal rotations: begin, end, rotation."""
    runs: list[tuple[int, int, Rotary | None]] = []
    for index, rotary in enumerate(layers):
        if runs and runs[-1][2] == rotary:
            runs[-1] = (runs[-1][0], index + 1, rotary)
        else:
            runs.append((index, index + 1, rotary))
    return runs


def _by_head(keys: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """View `[L, T, H, head_dim]`."""
    if keys.dim() == 3 and keys.shape[-1] % rotary.head_dim == 0:
        keys = keys.view(*keys.shape[:2], -1, rotary.head_dim)
    if keys.dim() != 4 or keys.shape[-1] != rotary.head_dim:
        raise UsageError(f"keys {list(keys.shape)} do not divide into heads of {rotary.head_dim} values")
    return keys


def _check_limit(rotary: Rotary, old: torch.Tensor, new: torch.Tensor) -> None:
    if rotary.limit is not None and max(int(old.max()), int(new.max())) >= rotary.limit:
        raise UsageError(f"the rotation is known up to position {rotary.limit - 1} only; these keys lie beyond")


def _per_token_head(positions: torch.Tensor) -> torch.Tensor:
    """Bring positions of any of the three shapes to `[L | 1, T, H | 1]`."""
    if positions.dim() == 1:
        return positions[None, :, None]
    return positions[:, :, None] if positions.dim() == 2 else positions.transpose(1, 2)


def _angles(positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """`[...]` -> `[..., pairs]`, the engines' float32 product as float64."""
    return (positions.float().unsqueeze(-1) * inv_freq).double()


def _inv_freq(rotary: Rotary, device: torch.device) -> torch.Tensor:
    return torch.tensor(rotary.inv_freq, dtype=torch.float32, device=device)


def _work_dtype(keys: torch.Tensor) -> torch.dtype:
    return torch.promote_types(keys.dtype, torch.float32)


def _tiles(keys: torch.Tensor) -> tuple[int, int]:
    """Layers and tokens that are rotated at once: launch-sized on a GPU, cache-sized on a CPU."""
    target = min(1 << 19 if keys.device.type == "cpu" else 1 << 23, max(keys.numel() // 64, 1))
    width = keys.shape[2] * keys.shape[3]
    tokens = min(keys.shape[1], max(target // width, 1))
    return max(target // (width * tokens), 1), tokens


def _first_moved(old: torch.Tensor, new: torch.Tensor) -> int:
    """The first token whose position changes; 0 on a GPU, where asking takes longer than turning."""
    if old.device.type != "cpu":
        return 0
    moved = (old != new).nonzero()
    return int(moved[0]) if len(moved) else len(old)


def _tile(positions: torch.Tensor, layer: int, layer_step: int, t: int, token_step: int) -> torch.Tensor:
    if positions.shape[0] > 1:
        positions = positions[layer : layer + layer_step]
    return positions[:, t : t + token_step]


def _table(rotary: Rotary, low: int, span: int, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the angles of the positions `low .. low + span - 1`."""
    angles = _angles(torch.arange(low, low + span, device=keys.device), _inv_freq(rotary, keys.device))
    return angles.cos().to(_work_dtype(keys)), angles.sin().to(_work_dtype(keys))


def _turn_by_table(
    table: Sequence[torch.Tensor], before: torch.Tensor, after: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the difference of two angles, from tables of both."""
    cos_before, sin_before, cos_after, sin_after = (
        part.index_select(0, at.flatten()).view(*at.shape, -1) for at in (before, after) for part in table
    )
    return cos_after * cos_before + sin_after * sin_before, sin_after * cos_before - cos_after * sin_before


def _turn(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: Rotary, scratch: torch.Tensor) -> None:
    """Rotate `[L, T, H, head_dim]` in place by angles `[L | 1, T, H | 1, pairs]`; `scratch` takes them twice."""
    rotated = keys[..., rotary.offset : rotary.offset + rotary.width]
    before, after = (part.view(rotated.shape) for part in scratch)
    before.copy_(rotated)
    first, second = _pairs(before, rotary)
    turned_first, turned_second = _pairs(after, rotary)
    torch.mul(first, cos, out=turned_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=turned_second).addcmul_(first, sin)
    rotated.copy_(after)


def _pairs(rotated: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
    if rotary.interleaved:
        return rotated[..., 0::2], rotated[..., 1::2]
    pairs = len(rotary.inv_freq)
    return rotated[..., :pairs], rotated[..., pairs:]
