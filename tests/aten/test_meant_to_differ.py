"""Where torch's operators on our kernels differ from torch's own on purpose: rows of the table in docs/operators.md."""

from __future__ import annotations

import pytest
import torch
from support.overrides import taken
from support.places import emulated

import rtkernels
from rtkernels.aten import row

INF, NAN = float("inf"), float("nan")


@emulated
@pytest.mark.parametrize("n", (7, 300, 5003))
def test_nan_of_either_sign_is_last(n: int) -> None:
    x = torch.randn(n)
    x[2], x[n // 2] = NAN, torch.tensor(NAN).neg()
    assert x[n // 2].signbit() != x[2].signbit()
    with taken("sm_80", "sort"):
        values, order = x.sort()
        first, places = x.sort(descending=True)
    assert values[-2:].isnan().all() and order[-2:].tolist() == [2, n // 2] and values[:-2].isfinite().all()
    assert first[:2].isnan().all() and places[:2].tolist() == [2, n // 2]


@emulated
@pytest.mark.parametrize("n", (4, 300))
def test_extremes_of_zeros_have_a_sign(n: int) -> None:
    """Whichever comes first."""
    for zeros in (torch.tensor([0.0, -0.0]).repeat(n // 2), torch.tensor([-0.0, 0.0]).repeat(n // 2)):
        with taken("sm_80", "red"):
            least = [zeros.amin(0), zeros.min()]
            greatest = [zeros.amax(0), zeros.max()]
        assert [value.signbit().item() for value in least] == [True, True]
        assert [value.signbit().item() for value in greatest] == [False, False]


@emulated
@pytest.mark.parametrize("at", (0, 3, 7))
def test_means_beside_variances_of_infinities(at: int) -> None:
    x = torch.randn(2, 8)
    x[0, at] = INF
    with taken("sm_80", "red"):
        variance, mean = torch.var_mean(x, 1)
        alone = x.mean(1)
    assert variance[0].isnan() and not mean[0].isfinite() and mean[1].isfinite()
    assert alone[0] == INF


@emulated
def test_sums_begin_at_zero() -> None:
    x = torch.tensor([-0.0, -0.0, 1.0])
    with taken("sm_80", "scan"):
        assert not x.cumsum(0).signbit().any()


@emulated
def test_scattered_slices_have_memory_of_their_own() -> None:
    x = torch.randn(4, 6)[1:]
    with taken("sm_80", "copy"):
        results = [x.slice_scatter(torch.ones(1, 6), 0, 0, 1), x.select_scatter(torch.ones(6), 0, 0)]
    assert x.storage_offset() == 6 and [result.storage_offset() for result in results] == [0, 0]


@emulated
def test_weights_beyond_a_norm() -> None:
    """The norm overflows: 0, also where their product with the magnitude would overflow first."""
    v, g = torch.full((2, 8), 1e30), torch.tensor([[1.0], [1e30]])
    with rtkernels.emulate("sm_80"):
        w, norms = row._weight_norm(v, g, 0)
    assert norms.isinf().all() and (w == 0).all()


@emulated
def test_products_overflow_before_they_are_added() -> None:
    """Torch's compiler may round product and sum as one, with which this product would not overflow."""
    top = torch.finfo(torch.float32).max
    x, big = torch.full((2, 2), -top), torch.full((2,), 1.5 * top**0.5)
    with taken("sm_80", ["addcmul", "addr"]):
        results = [torch.addcmul(x, big, big), torch.addr(x, big, big)]
        assert all((result == INF).all() for result in results)
        calm = torch.addcmul(x / 4, big / 2, big / 2)
    torch.testing.assert_close(calm, (x.double() / 4 + (big.double() / 2).square()).float())


@emulated
def test_total_weight_without_a_reduction() -> None:
    scores, labels, weight = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0]), torch.rand(3)
    with taken("sm_80", "nll_loss_forward"):
        _, total = torch.ops.aten.nll_loss_forward(scores, labels, weight, 0, -100)
    assert total.item() == 0.0
