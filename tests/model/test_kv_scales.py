"""Scales of keys and values from checkpoints: under the names that tools give them, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from radixkv.attention import KVStore, LayerShape
from radixkv.errors import ModelLoadError
from radixkv.model.kv_scales import read_kv_scales, take_scales

E4M3 = torch.float8_e4m3fn


def store() -> KVStore:
    return KVStore([LayerShape(2, 4, 4)] * 2, 2, 2, torch.float32, kv_dtype=E4M3)


def one(value: float) -> torch.Tensor:
    return torch.tensor(value)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.{}.self_attn.{}_scale",
        "model.layers.{}.self_attn.{}_proj.{}_scale",
        "model.layers.{}.self_attn.attn.{}_scale",
        "model.language_model.layers.{}.self_attn.{}_scale",
        "transformer.h.{}.attn.{}_scale",
    ],
)
def test_names(name: str, tmp_path: Path) -> None:
    tensors = {
        name.format(layer, side, side): torch.tensor([layer + at])
        for layer in (0, 1)
        for side, at in (("k", 0.25), ("v", 0.5))
    }
    weights = {
        "model.layers.0.self_attn.k_proj.weight": torch.ones(2),
        "model.layers.0.mlp.up_proj.k_scale": torch.ones(1),
        "model.layers.0.self_attn.q_scale": torch.ones(1),
        "model.layers.0.self_attn.k_proj.weight_scale": torch.ones(1),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    save_file(weights, tmp_path / "b.safetensors")
    found = {place: float(scale) for place, scale in read_kv_scales(tmp_path).items()}
    expected = {("key", 0): 0.25, ("value", 0): 0.5, ("key", 1): 1.25, ("value", 1): 1.5}
    assert found == expected


def test_none_is_fine(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "a.safetensors")
    assert read_kv_scales(tmp_path) == {}


def test_two_of_one_thing_and_broken_files_are_refused(tmp_path: Path) -> None:
    save_file({"layers.0.self_attn.k_scale": torch.ones(1)}, tmp_path / "a.safetensors")
    save_file({"layers.0.self_attn.k_proj.k_scale": torch.ones(1)}, tmp_path / "b.safetensors")
    with pytest.raises(ModelLoadError, match="has a second scale layers"):
        read_kv_scales(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"none")
    with pytest.raises(ModelLoadError, match=r"cannot read .*a\.safetensors"):
        read_kv_scales(tmp_path)


def test_one_for_all_heads_or_one_for_each() -> None:
    made = store()
    each = torch.tensor([0.5, 2.0], dtype=torch.bfloat16)
    take_scales(
        made, {("key", 0): one(0.25), ("value", 0): each, ("key", 1): one(3), ("value", 1): one(4)}
    )
    found = {place: scale.tolist() for place, scale in made.scales.items()}
    assert found == {
        ("key", 0): [0.25, 0.25],
        ("value", 0): [0.5, 2.0],
        ("key", 1): [3.0, 3.0],
        ("value", 1): [4.0, 4.0],
    }
    assert all(s.dtype == torch.float32 and s.is_contiguous() for s in made.scales.values())
    # A key of 112 at a scale of 0.25 is e4m3's largest, 448.
    large = torch.tensor([[[112.0, 120.0, 1.0, 0.0]] * 2])
    assert made.rounded("key", 0, large)[0, 0].tolist() == [112.0, 112.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({("value", 1): None}, r"has 3 scales .* of layers \[0, 1\], but the model keeps .* of 2"),
        ({("key", 2): one(1)}, "use kv_dtype='fp8_e5m2', which needs none"),
        ({("key", 1): one(0)}, "key scale of layer 1 is no positive number"),
        ({("key", 1): one(torch.nan)}, "no positive number for each of 2 KV heads"),
        ({("value", 0): torch.ones(3)}, "value scale of layer 0"),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[tuple[str, int], torch.Tensor | None], message: str
) -> None:
    scales = {(side, layer): one(0.5) for side in ("key", "value") for layer in (0, 1)}
    given = {place: scale for place, scale in (scales | changes).items() if scale is not None}  # type: ignore[operator]
    with pytest.raises(ModelLoadError, match=message):
        take_scales(store(), given)
