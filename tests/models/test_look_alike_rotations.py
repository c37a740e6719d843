"""Functions that look like rotations: the real ones are replaced, all others are rejected with a reason."""

from __future__ import annotations

import pytest
import torch
from support.look_alikes import patched, refused
from torch import Tensor, nn

pytest.importorskip("transformers", minversion="5.0")


def _turned(x: Tensor, cos: Tensor, sin: Tensor, dim: int) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos.unsqueeze(dim) + torch.cat((-x[..., half:], x[..., :half]), -1) * sin.unsqueeze(dim)


SCALE = 2.0  # which a function reads


def apply_rotary_true(q, k, cos, sin, unsqueeze_dim=1):
    return _turned(q, cos, sin, unsqueeze_dim), _turned(k, cos, sin, unsqueeze_dim)


def apply_rotary_only_q(q, k, cos, sin, unsqueeze_dim=1):
    return _turned(q, cos, sin, unsqueeze_dim), k * 1


def apply_rotary_back(q, k, cos, sin, unsqueeze_dim=1):
    return apply_rotary_true(q, k, cos, -sin, unsqueeze_dim)


def apply_rotary_detached(q, k, cos, sin, unsqueeze_dim=1):
    return apply_rotary_true(q, k.detach(), cos, sin, unsqueeze_dim)


def apply_rotary_scaled(q, k, cos, sin, unsqueeze_dim=1):
    q, k = apply_rotary_true(q, k, cos, sin, unsqueeze_dim)
    return q * SCALE, k


def apply_rotary_in_place(q, k, cos, sin, unsqueeze_dim=1):
    result = apply_rotary_true(q, k, cos, sin, unsqueeze_dim)
    q.zero_()
    return result


def apply_rotary_long(q, k, cos, sin, unsqueeze_dim=1):
    q, k = apply_rotary_true(q, k, cos, sin, unsqueeze_dim)
    return (q * 2, k) if q.shape[2] > 64 else (q, k)


def apply_rotary_unknown(a, b, c, d):
    return apply_rotary_true(a, b, c, d)


def apply_rotary_complex(xq, xk, freqs_cis):
    return xq, xk


class Attention(nn.Module):
    """Calls a rotation as a global of its file."""

    def forward(self, q, k, cos, sin):
        return apply_rotary_true(q, k, cos, sin)


def apply_rotary_of_one_too(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
    q = _turned(q, cos, sin, unsqueeze_dim)
    return q if k is None else (q, _turned(k, cos, sin, unsqueeze_dim))


class AllForms(Attention):
    """Calls a rotation in each form that it has: of one tensor, with names, with a number."""

    def forward(self, q, k, cos, sin):
        one = apply_rotary_of_one_too(q, cos=cos, sin=sin)
        named = apply_rotary_of_one_too(k=k, q=q, sin=sin, cos=cos)
        placed = apply_rotary_of_one_too(q, k, cos, sin, 1)
        first = apply_rotary_of_one_too(q.transpose(1, 2), cos=cos, sin=sin, unsqueeze_dim=2)
        return one, *named, *placed, *apply_rotary_of_one_too(q, None, cos, sin=sin), first


class OnlyQ(Attention):
    def forward(self, q, k, cos, sin):
        return apply_rotary_only_q(q, k, cos, sin)


class Back(Attention):
    def forward(self, q, k, cos, sin):
        return apply_rotary_back(q, k, cos, sin)


class KeysDetached(Attention):
    def forward(self, q, k, cos, sin):
        return apply_rotary_detached(q, k, cos, sin)


class ScaledByGlobal(Attention):
    def forward(self, q, k, cos, sin):
        return apply_rotary_scaled(q, k, cos, sin)


class QueriesOverwritten(Attention):
    def forward(self, q, k, cos, sin):
        return apply_rotary_in_place(q, k, cos, sin)


class LongOnes(Attention):
    def forward(self, q, k, cos, sin):
        return apply_rotary_long(q, k, cos, sin)


class OtherArguments(Attention):
    def forward(self, q, k, cos, sin):
        return apply_rotary_complex(q, k, torch.complex(cos, sin))


class UnknownArguments(Attention):
    def forward(self, q, k, cos, sin):
        return apply_rotary_unknown(q, k, cos, sin)


class Method(Attention):
    def _apply_rotary(self, q, k, cos, sin):
        return q, k

    def forward(self, q, k, cos, sin):
        return self._apply_rotary(q, k, cos, sin)


def test_rotation() -> None:
    module = Attention()
    q, k = (torch.randn(2, 3, 5, 16, requires_grad=True) for _ in range(2))
    angles = torch.randn(2, 5, 8).repeat(1, 1, 2)
    tables = angles.cos().requires_grad_(), angles.sin()
    wanted = module(q, k, *tables)
    assert patched(module).replaced["rope"] == 1
    for got, value in zip(module(q, k, *tables), wanted, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(result[0].sum(), tables[0])[0] for result in (module(q, k, *tables), wanted)]
    torch.testing.assert_close(*grads)  # learned tables go to the model's own rotation
    half = [t.detach().bfloat16() for t in (q, k)]
    assert module(*half, *(t.detach() for t in tables))[0].dtype == torch.float32  # as the model's own


def test_rotation_is_called_in_every_form() -> None:
    module = AllForms()
    q, k = (torch.randn(2, 3, 5, 16) for _ in range(2))
    angles = torch.randn(2, 5, 8).repeat(1, 1, 2)
    wanted = module(q, k, angles.cos(), angles.sin())
    assert patched(module).replaced["rope"] == 1
    for got, value in zip(module(q, k, angles.cos(), angles.sin()), wanted, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="apply_rotary_of_one_too"):  # the original's error
        type(module).forward.__globals__["apply_rotary_of_one_too"](q, k, angles, angles, 1, 2)


REFUSED_ROTATIONS = {
    OnlyQ: "no way of ours",
    KeysDetached: "like halves, but with other gradients of its input",
    ScaledByGlobal: "reads SCALE, a float that may change",
    QueriesOverwritten: "it changes its input in place",
    LongOnes: "like halves, but with other results",
    OtherArguments: "no way of ours",
    UnknownArguments: "its arguments are a, b, c, d; expected q, k, cos, sin, or one tensor, or a complex table",
    Method: "_apply_rotary is no global of its file",
}


@pytest.mark.parametrize("cls", REFUSED_ROTATIONS, ids=lambda cls: cls.__name__)
def test_rotation_look_alike(cls: type[nn.Module]) -> None:
    refused(cls(), REFUSED_ROTATIONS[cls], "rope")


def _neighbours_turned(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x[..., ::2], x[..., 1::2]
    return first * cos - second * sin, second * cos + first * sin


def apply_rotary_to_halves(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    half = cos.shape[-1] // 2
    cos, sin = (t[..., :half].unsqueeze(unsqueeze_dim) for t in (cos, sin))
    return tuple(torch.cat(_neighbours_turned(x, cos, sin), -1) for x in (q, k))


def apply_rotary_vision(q, k, cos, sin):
    return _turned(q, cos, sin, -2), _turned(k, cos, sin, -2)


def apply_rotary_single(x, cos, sin, unsqueeze_dim=1):
    return _turned(x, cos, sin, unsqueeze_dim)


def apply_rotary_last(x, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    start = x.shape[-1] - 2 * cos.shape[-1]
    part = torch.stack(_neighbours_turned(x[..., start:], cos, sin), -1).flatten(-2)
    return torch.cat((x[..., :start], part), -1)


def apply_rotary_cis(xq, xk, freqs_cis):
    def turned(x: Tensor) -> Tensor:
        whole = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * freqs_cis[:, :, None]
        return torch.view_as_real(whole).flatten(-2).type_as(x)

    return turned(xq), turned(xk)


def apply_rotary_patches(q, k, cos, sin):
    prefix = q.shape[-2] - cos.shape[-2]
    return tuple(torch.cat((x[..., :prefix, :], _turned(x[..., prefix:, :], cos, sin, 0)), -2) for x in (q, k))


class ToHalves(Attention):
    def forward(self, q, k, cos, sin):
        return apply_rotary_to_halves(q, k, cos, sin)


class Vision(Attention):
    def forward(self, q, k, cos, sin):
        q, k = (x.transpose(1, 2).flatten(0, 1) for x in (q, k))
        return apply_rotary_vision(q, k, cos.flatten(0, 1), sin.flatten(0, 1))


class Single(Attention):
    def forward(self, q, k, cos, sin):
        return apply_rotary_single(q, cos, sin), apply_rotary_single(k, cos=cos, sin=sin)


class Last(Attention):
    def forward(self, q, k, cos, sin):
        cos, sin = cos[..., :3], sin[..., :3]
        return apply_rotary_last(q, cos, sin), apply_rotary_last(k.transpose(1, 2), cos, sin, unsqueeze_dim=2)


class Complex(Attention):
    def forward(self, q, k, cos, sin):
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        return apply_rotary_cis(q, k, torch.complex(cos.detach()[..., :8], sin[..., :8]))


class Patches(Attention):
    def forward(self, q, k, cos, sin):
        return apply_rotary_patches(q, k, cos[0, 2:], sin[0, 2:])


class UnlikeLast(Last):
    """Tables that do not belong to a call: of another length, in fp32 for bf16."""

    def forward(self, q, k, cos, sin):
        return apply_rotary_single(q, cos[:, :1], sin[:, :1]), apply_rotary_single(k.bfloat16(), cos, sin)


@pytest.mark.parametrize("cls", [ToHalves, Vision, Single, Last, Complex, Patches, Back, UnlikeLast])
def test_rotation_of_another_form(cls: type[nn.Module]) -> None:
    module = cls()
    q, k = (torch.randn(2, heads, 5, 16, requires_grad=True) for heads in (3, 1))
    angles = torch.randn(2, 5, 8).repeat(1, 1, 2)
    wanted = module(q, k, angles.cos(), angles.sin())
    assert patched(module).replaced["rope"] == 1
    got = module(q, k, angles.cos(), angles.sin())
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(sum(t.square().sum() for t in found), (q, k)) for found in (got, wanted)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def apply_rotary_to_other_halves(q, k, cos, sin):
    half = cos.shape[-1] // 2
    cos, sin = (t[..., :half].unsqueeze(1) for t in (cos, sin))
    return tuple(torch.cat(_neighbours_turned(x, cos, sin)[::-1], -1) for x in (q, k))


class ToOtherHalves(Attention):
    def forward(self, q, k, cos, sin):
        return apply_rotary_to_other_halves(q, k, cos, sin)


def test_rotation_into_another_order_is_left_alone() -> None:
    refused(ToOtherHalves(), "no way of ours", "rope")
