"""sdpa: the results of torch's function for the same arguments, or an error that says why not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.attention_exact import assert_near
from support.compare import running_on
from support.places import at
from torch import Tensor

from rtkernels import ArgumentError, emulate, sdpa
from rtkernels.ops.attention.sdpa import _as_bias

BF16 = torch.bfloat16


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


CASES = {
    "plain": ((2, 4, 5, 16), (2, 4, 7, 16), {}),
    "causal": ((2, 4, 5, 16), (2, 4, 5, 16), {"is_causal": True}),
    "causal, fewer queries": ((2, 4, 5, 16), (2, 4, 7, 16), {"is_causal": True}),
    "causal, more queries": ((2, 4, 7, 16), (2, 4, 5, 16), {"is_causal": True}),
    "bool mask": ((2, 4, 5, 16), (2, 4, 7, 16), {"attn_mask": random(2, 1, 5, 7, seed=3) > 0}),
    "mask of one row": ((2, 4, 5, 16), (2, 4, 7, 16), {"attn_mask": random(1, 7, seed=3) > -0.5}),
    "float mask": ((2, 4, 5, 16), (2, 4, 7, 16), {"attn_mask": random(5, 7, seed=3)}),
    "grouped": ((2, 4, 5, 16), (2, 2, 7, 16), {"enable_gqa": True, "scale": 0.7}),
    "three dimensions": ((4, 5, 16), (4, 7, 16), {}),
    "two dimensions": ((5, 16), (7, 16), {"is_causal": True}),
    "five dimensions": ((2, 3, 2, 5, 16), (2, 3, 2, 7, 16), {"attn_mask": random(2, 1, 1, 5, 7, seed=3)}),
}


@at("cpu", "sm_80", "cuda")
@pytest.mark.parametrize("name", CASES)
def test_as_torch(name: str, place: str) -> None:
    q_shape, k_shape, options = CASES[name]
    tensors = random(*q_shape), random(*k_shape, seed=1), random(*k_shape, seed=2)
    g = random(*q_shape, seed=4)
    wide = [t.double().requires_grad_() for t in tensors]
    mask = options.get("attn_mask")
    converted = options | ({"attn_mask": mask.double()} if mask is not None and mask.dtype != torch.bool else {})
    exact = F.scaled_dot_product_attention(*wide, **converted)
    wanted = torch.autograd.grad(exact, wide, g.double())
    with running_on(place) as device:
        leaves = [t.to(device).requires_grad_() for t in tensors]
        given = {n: o.to(device) if isinstance(o, Tensor) else o for n, o in options.items()}
        out = sdpa(*leaves, **given)
        grads = torch.autograd.grad(out, leaves, g.to(device))
    assert_near(out, exact, 2.0**-6, "out")
    for grad, expected in zip(grads, wanted, strict=True):
        assert_near(grad, expected, 2.0**-6, "gradient")


def emulated_coverage() -> None:
    """Run a call in the emulator; kernels are those of attention."""
    with emulate("sm_90"):
        sdpa(*(random(1, 1, 3, 16, seed=i) for i in range(3)))


def test_rows_without_keys_are_zero() -> None:
    q, k, v = random(1, 2, 3, 16), random(1, 2, 4, 16, seed=1), random(1, 2, 4, 16, seed=2)
    mask = torch.tensor([True, False, True]).view(3, 1).expand(3, 4)
    out = sdpa(q, k, v, mask)
    assert not out[:, :, 1].any() and not out.isnan().any()


@at("cpu", "sm_90")
def test_expanded_masks_are_not_written_out(place: str) -> None:
    """A mask that was expanded over heads and queries becomes a bias of one row, and counts for all of them."""
    q, k, v = (random(2, 3, 9, 16, seed=i) for i in range(3))
    row = (random(2, 9, seed=3) > -0.5).view(2, 1, 1, 9)
    shape = (2, 3, 9, 9)
    assert _as_bias(row.expand(shape), q, shape).untyped_storage().nbytes() == 2 * row.numel()
    with running_on(place):
        assert torch.equal(sdpa(q, k, v, row.expand(shape)), sdpa(q, k, v, row))


@pytest.mark.parametrize("shape", [(2, 2, 3, 5), (2, 2, 5, 4), (3, 2, 3, 4), (2, 2, 2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.bool, BF16])
def test_expanded_masks_of_other_shapes_are_refused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Sizes that a mask was expanded to count, though it is used with sizes of 1."""
    q, k, v = random(2, 2, 3, 16), random(2, 2, 4, 16, seed=1), random(2, 2, 4, 16, seed=2)
    with pytest.raises(ArgumentError, match="attn_mask has shape"):
        sdpa(q, k, v, torch.ones(1, dtype=dtype).expand(shape))


@pytest.mark.gpu
@pytest.mark.parametrize("width", (64, 96, 128))
@pytest.mark.parametrize(
    "shape", ((2, 1, 1, 1032), (2, 1, 520, 1032), (1, 4, 520, 1032), (2, 4, 520, 1032), (520, 1032), (1, 1, 519, 1031))
)
@pytest.mark.parametrize("floating", (False, True))
def test_masks_on_a_gpu(shape: tuple[int, ...], width: int, floating: bool) -> None:
    queries, keys = shape[-2] if shape[-2] > 1 else 520, shape[-1]
    q, k, v = random(2, 4, queries, width), random(2, 4, keys, width, seed=1), random(2, 4, keys, width, seed=2)
    mask = random(*shape, seed=3)
    if shape[-2] > 1:
        mask[..., 2, :] = -9.0  # bool: a query that attends to nothing
    seen = mask > -0.5
    mask = mask.masked_fill(~seen, float("-inf")) if floating else seen
    q, k, v, mask = (t.cuda() for t in (q, k, v, mask))
    bias = mask.double() if floating else torch.zeros(shape).double().cuda().masked_fill(~mask, float("-inf"))
    s = q.double() @ k.double().transpose(-1, -2) * width**-0.5 + bias
    wanted = s.softmax(-1).nan_to_num() @ v.double()
    out = sdpa(q, k, v, mask)
    assert_near(out, wanted, 2.0**-6, "out")
    assert torch.equal(out, sdpa(q, k, v, mask))


def test_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    q, k, v = (random(1, 2, 4, 16, seed=i) for i in range(3))
    assert F.scaled_dot_product_attention(q, k, v, None, 0.0, True).shape == q.shape


def test_bad_arguments() -> None:
    q, k, v = (random(1, 2, 4, 16, seed=i) for i in range(3))
    with pytest.raises(ArgumentError, match=r"dropout_p is 0.1; expected 0"):
        sdpa(q, k, v, dropout_p=0.1)
    with pytest.raises(ArgumentError, match="attn_mask and is_causal are both given"):
        sdpa(q, k, v, torch.ones(4, 4, dtype=torch.bool), is_causal=True)
    with pytest.raises(ArgumentError, match="attn_mask has shape"):
        sdpa(q, k, v, torch.ones(3, 4, dtype=torch.bool))
    with pytest.raises(ArgumentError, match="query has dtype float32"):
        sdpa(q.float(), k.float(), v.float())


@pytest.mark.parametrize("shape", ((0, 8), (2, 0, 8), (3, 0, 2, 5, 8)))
def test_nothing_to_attend(shape: tuple[int, ...]) -> None:
    q = torch.ones(shape, dtype=BF16)
    assert sdpa(q, q, q).shape == F.scaled_dot_product_attention(q, q, q).shape
