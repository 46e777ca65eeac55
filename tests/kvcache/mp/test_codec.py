from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from lmcache_stream.errors import GeometryError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.mp.codec import (
    CODECS,
    Codec,
    CPUPacked,
    Fused,
    Latent,
    Split,
    codec_candidates,
    codec_for,
    format_kind,
)
from lmcache_stream.kvcache.mp.status import ModelLayout, ServerConfig, ServerFacts, ServerState

if TYPE_CHECKING:
    from torch import Tensor

RECORDED = Path(__file__).parents[2] / "data" / "kv" / "vllm-cpu-packed.safetensors"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random bit patterns, NaNs and subnormals among them."""
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    info = torch.iinfo(bits)
    return torch.randint(info.min, info.max, shape, dtype=bits).view(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    bits = {2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


@pytest.mark.parametrize("codec_type", CODECS.values(), ids=list(CODECS))
@given(
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 48, 64, 80, 96, 128]),
    block_size=st.sampled_from([2, 16, 32, 64]),
    blocks=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    leading=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_round_trip_keeps_every_bit(
    codec_type: type[Codec],
    layers: int,
    heads: int,
    head_dim: int,
    block_size: int,
    blocks: int,
    dtype: torch.dtype,
    leading: bool,
) -> None:
    codec = codec_type(layers, heads, head_dim, block_size)
    tokens = blocks * block_size
    shape = codec.stored_shape(tokens)
    stored = random_bits((1, *shape) if leading else shape, dtype)
    # A strided destination: the middle of a longer sequence.
    whole = torch.zeros(codec.planes, layers, tokens + 7, heads * head_dim, dtype=dtype)
    kv = whole[:, :, 3 : 3 + tokens]

    codec.decode(stored, kv)
    back = torch.zeros_like(stored)
    codec.encode(kv, back)

    assert same_bits(back, stored)
    assert not whole[:, :, :3].any()
    assert not whole[:, :, 3 + tokens :].any()


def reference_packing(kv: Tensor, heads: int, block: int) -> Tensor:
    """The CPU packing, value by value as it is described."""
    _, layers, tokens, width = kv.shape
    head_dim = width // heads
    stored = torch.empty(layers, tokens, heads, 2 * head_dim, dtype=kv.dtype)
    for layer in range(layers):
        for start in range(0, tokens, block):
            for head in range(heads):
                of_head = kv[:, layer, start : start + block, head * head_dim : (head + 1) * head_dim]
                values = torch.cat([of_head[0].T.reshape(-1), of_head[1].reshape(-1)])
                stored[layer, start : start + block, head] = values.view(block, 2 * head_dim)
    return stored.flatten(2)


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("heads", [1, 3])
def test_cpu_packing_transposes_keys_within_a_block(block_size: int, head_dim: int, heads: int) -> None:
    kv = torch.randn(2, 2, 2 * block_size, heads * head_dim)
    stored = reference_packing(kv, heads, block_size)
    out = torch.empty_like(kv)
    CPUPacked(2, heads, head_dim, block_size).decode(stored, out)
    assert torch.equal(out, kv)


def test_fused_interleaves_keys_and_values_by_head() -> None:
    kv = torch.randn(2, 3, 8, 2 * 64)
    stored = torch.empty(3, 8, 2 * 2 * 64)
    Fused(3, 2, 64).encode(kv, stored)
    keys_and_values = stored.view(3, 8, 2, 128)
    assert torch.equal(keys_and_values[..., :64], kv[0].view(3, 8, 2, 64))
    assert torch.equal(keys_and_values[..., 64:], kv[1].view(3, 8, 2, 64))


def test_split_and_latent_are_as_stored() -> None:
    split, latent = torch.randn(2, 3, 8, 128), torch.randn(3, 8, 576)
    out = torch.empty(2, 3, 8, 128)
    Split(3, 2, 64).decode(split, out)
    assert torch.equal(out, split)
    plane = torch.empty(1, 3, 8, 576)
    Latent(3, 1, 576).decode(latent, plane)
    assert torch.equal(plane[0], latent)


def test_recorded_chunks_hold_the_reference_keys_and_values() -> None:
    recorded = load_file(RECORDED)
    codec = CPUPacked(num_layers=4, heads=2, head_dim=64, block_size=32)
    kv = torch.empty(2, 4, 64, 128)
    for i, chunk in enumerate(recorded["chunks"]):
        codec.decode(chunk, kv[:, :, 32 * i : 32 * (i + 1)])
    reference = torch.stack([recorded["keys"], recorded["values"]]).transpose(2, 3).flatten(3)
    assert (kv - reference).abs().max() < 4e-6


def test_writes_and_reads_each_value_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = 0
    copy = torch.Tensor.copy_

    def counting(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        nonlocal copied
        copied += self.numel()
        return copy(self, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", counting)
    for codec_type in CODECS.values():
        codec, copied = codec_type(2, 2, 80, 64), 0
        stored = torch.empty(codec.stored_shape(128))
        codec.decode(stored, torch.empty(codec.planes, 2, 128, 160))
        assert copied == stored.numel()


def test_refuses_what_does_not_fit() -> None:
    codec = Fused(2, 1, 8)
    stored = torch.zeros(2, 4, 16)
    with pytest.raises(GeometryError, match=r"\[2, 2, tokens, 8\].*not \[2, 2, 4, 16\]"):
        codec.decode(stored, torch.zeros(2, 2, 4, 16))
    with pytest.raises(GeometryError, match=r"must be \[2, 3, 16\].*is \[2, 4, 16\]"):
        codec.decode(stored, torch.zeros(2, 2, 3, 8))
    with pytest.raises(GeometryError, match=r"float32.*bfloat16"):
        codec.encode(torch.zeros(2, 2, 4, 8, dtype=torch.bfloat16), stored)
    with pytest.raises(GeometryError, match="chunk of 24 tokens is not whole blocks of 16"):
        CPUPacked(2, 1, 8, 16).stored_shape(24)
    with pytest.raises(GeometryError, match="block_size"):
        CPUPacked(2, 1, 8)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NL_X_NB_TWO_BS_NH_HS", "split"),
        ("NL_X_TWO_NB_BS_NH_HS", "split"),
        ("NL_X_NB_TWO_NH_BS_HS", "split"),
        ("NL_X_TWO_NB_NH_BS_HS", "split"),
        ("NL_X_TWO_X_NB_BS_NH_HS", "split"),
        ("NB_NL_TWO_BS_NH_HS", "split"),
        ("TWO_X_NL_X_NBBS_NH_HS", "split"),
        ("NL_X_NB_BS_NH_TWO_HS", "fused"),
        ("NL_X_NB_NH_BS_TWO_HS", "fused"),
        ("NL_X_NB_NH_BS_CS", "fused"),
        ("NL_X_NB_BS_NH_CS", "fused"),
        ("NL_X_NB_BS_HS", "mla"),
        ("NL_X_NBBS_ONE_HS", "mla"),
        ("NL_X_NP_X_NB_BS_ONE_HS", "mla"),
        ("NL_X_NB_BSV_BSS", None),
        ("NL_X_NB_TWO_BS_NH_HS_S", None),
        ("NL_X_NB_BS_HS_S", None),
        ("NL_X_NB_BS_NH_HS", None),
        ("something else", None),
    ],
)
def test_format_names_tell_how_keys_and_values_lie(name: str, kind: str | None) -> None:
    assert format_kind(name) == kind


def facts(
    *formats: str, one_plane: bool | None = None, block_size: int | None = 32, world_size: int = 1
) -> ServerFacts:
    model = ModelLayout(
        model_name="m", formats=formats, one_plane=one_plane, block_size=block_size, world_size=world_size
    )
    state = ServerState(healthy=True, model=model, model_names=("m",))
    return ServerFacts(http_url="http://h", config=ServerConfig(chunk_size=64), state=state)


KV = KVGeometry(num_layers=4, num_kv_heads=2, head_dim=64)
MLA = KVGeometry(num_layers=4, num_kv_heads=1, head_dim=576, planes=1)


def test_a_format_that_leaves_one_reading_is_read_so() -> None:
    assert codec_for(facts("NL_X_TWO_NB_BS_NH_HS", one_plane=False), KV).name == "split"
    assert codec_for(facts("NL_X_NB_BS_NH_CS", one_plane=True), KV).name == "fused"
    assert codec_for(facts("NL_X_NB_BS_HS", one_plane=True), MLA) == Latent(4, 1, 576, 32)
    assert codec_for(facts(one_plane=False), KV).name == "split"
    assert codec_for(facts(one_plane=True), MLA).name == "mla"


@pytest.mark.parametrize("formats", [(), ("NL_X_NB_NH_BS_CS",)])
def test_an_ambiguous_format_asks_for_a_probe(formats: tuple[str, ...]) -> None:
    open_ = facts(*formats, one_plane=True)
    assert [codec.name for codec in codec_candidates(open_, KV)] == ["fused", "cpu-packed"]
    with pytest.raises(GeometryError, match=r"fused or as cpu-packed.*probe=engine"):
        codec_for(open_, KV)


def test_each_rank_has_its_share_of_the_heads() -> None:
    two = KVGeometry(num_layers=4, num_kv_heads=2, head_dim=64, world_size=2)
    assert codec_for(facts("NL_X_TWO_NB_BS_NH_HS", world_size=2), two).heads == 1
    three = KVGeometry(num_layers=4, num_kv_heads=3, head_dim=64, world_size=2)
    with pytest.raises(GeometryError, match="3 KV heads do not divide over 2 ranks"):
        codec_for(facts("NL_X_TWO_NB_BS_NH_HS", world_size=2), three)


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(GeometryError, match="NL_X_NB_BSV_BSS"):
        codec_for(facts("NL_X_NB_BSV_BSS"), KV)
    with pytest.raises(GeometryError, match="NL_X_NB_BS_HS and NL_X_NB_NH_BS_CS"):
        codec_for(facts("NL_X_NB_BS_HS", "NL_X_NB_NH_BS_CS"), KV)


def test_cpu_packing_needs_whole_blocks() -> None:
    with pytest.raises(GeometryError, match="even block size, not 31"):
        CPUPacked(4, 2, 64, 31)
    with pytest.raises(GeometryError, match=r"without the engine's block size: KVGeometry\(block_size"):
        CPUPacked(4, 2, 64, None)
    with pytest.raises(GeometryError, match="64 tokens is not whole blocks of 48"):
        CPUPacked(4, 2, 64, 48).stored_shape(64)


def test_heads_before_slots_need_a_block_size() -> None:
    with pytest.raises(GeometryError, match=r"block size is needed, give KVGeometry\(block_size"):
        codec_candidates(facts("NL_X_NB_NH_BS_CS", block_size=None), KV)
    assert [codec.name for codec in codec_candidates(facts("NL_X_NB_NH_BS_CS", block_size=48), KV)] == ["fused"]
