"""The operators between matrix products: both forms against values in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from radixkv import native
from radixkv.model import operators
from radixkv.model.operators import Gate, Norm, Rotary

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
FORMS = [
    "torch",
    pytest.param(
        "compiled",
        marks=pytest.mark.skipif(not native.is_available(), reason="compiled operators not built"),
    ),
]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(operators, "takes", lambda tensor: False)
    return str(request.param)


class RMSNorm(nn.Module):
    def __init__(self, weight: torch.Tensor, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.variance_epsilon = eps


class GemmaRMSNorm(RMSNorm):
    pass


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert bool(found.isfinite().all())
    error = float((found.double() - expected).norm() / expected.norm())
    assert error < TOLERANCE[found.dtype], error


def normalised(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 64, 576])
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(rows * width)
    x, added = (torch.randn(rows, width, generator=made).to(dtype) for _ in range(2))
    weight = torch.rand(width, generator=made).to(dtype)
    close(Norm(RMSNorm(weight))(x), normalised(x, weight))
    close(Norm(GemmaRMSNorm(weight))(x), normalised(x, 1 + weight))
    strided = torch.randn(rows, 3 * width, generator=made).to(dtype)[:, :width]
    close(Norm(RMSNorm(weight))(strided), normalised(strided, weight))
    kept = x.clone()
    for scale in (1.0, 0.22):
        total, normed = Norm(RMSNorm(weight)).after_adding(x, added, scale)
        expected = x.double() + scale * added.double()
        close(total, expected)
        close(normed, normalised(total, weight))
    assert torch.equal(x, kept)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU()], ids=["silu", "gelu"])
@pytest.mark.parametrize("width", [1, 16, 37, 1536])
def test_gate(width: int, activation: nn.Module, dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(width)
    gate_up = (4 * torch.randn(5, 2 * width, generator=made)).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    close(Gate(activation)(gate_up.clone()), activation(gate) * up)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gate_far_out(dtype: torch.dtype) -> None:
    gate = torch.tensor([-3e38, -200.0, -90.0, 0.0, 90.0, 200.0, 3e38])
    gate_up = torch.stack((gate, torch.ones(7)), 0).flatten()[None].to(dtype)
    found = Gate(nn.SiLU())(gate_up)[0].float()
    assert found[:4].abs().max() < 1e-30
    assert torch.equal(found[4:], gate[4:].to(dtype).float())


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [8, 24, 64])
@pytest.mark.parametrize("tokens", [1, 200])
def test_rotation(tokens: int, width: int, dtype: torch.dtype) -> None:
    """As `apply_rotary_pos_emb`, written out; dimensions behind the rotated ones stay."""
    made = torch.Generator().manual_seed(width)
    flat = torch.randn(tokens, 5 * 64, generator=made).to(dtype)
    heads = flat[:, : 3 * 64].unflatten(1, (3, 64))
    angle = torch.randn(1, tokens, width // 2, generator=made)
    cos, sin = (torch.cat((part, part), -1).to(dtype) for part in (angle.cos(), angle.sin()))
    c, s = (part[0, :, None, : width // 2].double() for part in (cos, sin))
    first, second, rest = heads.double().split((width // 2, width // 2, 64 - width), -1)
    expected = torch.cat((first * c - second * s, second * c + first * s, rest), -1)
    behind = flat[:, 3 * 64 :].clone()
    rotary = Rotary()
    close(rotary.rotate(heads.clone(), (cos, sin)), expected)
    close(rotary.rotate(heads, (cos, sin)), expected)
    assert torch.equal(flat[:, 3 * 64 :], behind)


@pytest.mark.usefixtures("form")
def test_other_angles_are_noticed() -> None:
    heads = torch.ones(1, 1, 2)
    rotary = Rotary()
    for angle in (0.0, 1.0, 2.0):
        cos = torch.full((1, 1, 2), angle).cos()
        found = rotary.rotate(heads.clone(), (cos, torch.full((1, 1, 2), angle).sin()))
        expected = [float(cos[0, 0, 0]) - torch.tensor(angle).sin()]
        assert float(found[0, 0, 0]) == pytest.approx(float(expected[0]), abs=1e-6)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_not_a_number_stays_one_in_its_own_row(dtype: torch.dtype) -> None:
    x = torch.ones(3, 64, dtype=dtype)
    x[1, 7] = torch.nan
    weight = torch.ones(64, dtype=dtype)
    for found in (
        Norm(RMSNorm(weight))(x),
        Norm(RMSNorm(weight)).after_adding(torch.ones_like(x), x, 1.0)[1],
        Gate(nn.SiLU())(x.clone()),
    ):
        assert bool(found[1].isnan().any())
        assert bool(found[[0, 2]].isfinite().all())


@pytest.mark.skipif(not native.is_available(), reason="compiled operators not built")
def test_compiled_operators_refuse_what_they_would_misread() -> None:
    ops = torch.ops.radixkv
    x, weight = torch.ones(2, 32), torch.ones(32)
    store, slots = torch.zeros(2, 4, 1, 32), torch.tensor([0, 7])
    heads, angles = torch.ones(2, 3, 32), torch.ones(2, 1, 32)
    kv = torch.ones(2, 1, 32)
    ops.write_kv(kv, kv, store, store, slots)
    assert float(store.sum()) == 64
    for call in (
        lambda: ops.add_rms_norm(x.half(), None, 1.0, weight.half(), 1e-5),
        lambda: ops.add_rms_norm(x, None, 1.0, torch.ones(31), 1e-5),
        lambda: ops.add_rms_norm(x.T, None, 1.0, torch.ones(2), 1e-5),
        lambda: ops.add_rms_norm(x, x.bfloat16(), 1.0, weight, 1e-5),
        lambda: ops.add_rms_norm(x, x[:1], 1.0, weight, 1e-5),
        lambda: ops.silu_mul(torch.ones(2, 33)),
        lambda: ops.silu_mul(torch.ones(64, 2).T),
        lambda: ops.rotate_(heads, torch.ones(2, 1, 34), torch.ones(2, 1, 34)),
        lambda: ops.rotate_(heads, torch.ones(2, 1, 7), torch.ones(2, 1, 7)),
        lambda: ops.rotate_(heads, torch.ones(3, 1, 32), torch.ones(3, 1, 32)),
        lambda: ops.rotate_(heads, angles, angles.bfloat16()),
        lambda: ops.rotate_(heads.transpose(0, 1), angles, angles),
        lambda: ops.write_kv(kv, kv, store, store, torch.tensor([0, 8])),
        lambda: ops.write_kv(kv, kv, store, store, torch.tensor([-1, 0])),
        lambda: ops.write_kv(kv, kv, store, store, slots.int()),
        lambda: ops.write_kv(kv, kv, store.bfloat16(), store, slots),
        lambda: ops.write_kv(kv[:1], kv, store, store, slots),
        lambda: ops.write_kv(kv[..., :16], kv, store, store, slots),
        lambda: ops.add_rms_norm(x[:, :0], None, 1.0, weight[:0], 1e-5),
    ):
        with pytest.raises(RuntimeError):
            call()
