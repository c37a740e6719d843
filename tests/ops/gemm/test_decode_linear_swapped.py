"""Linear layers of decoding steps by the kernel of ``swapped_plan``: norm, gate, residual, when it is chosen."""

from __future__ import annotations

import pytest
import torch
from ops.gemm.test_decode_linear import BF16, FP16, case
from support.compare import running_on
from support.inference import assert_captures
from support.places import at

import rtkernels
from rtkernels.ops.gemm import chunk_plan, decode_linear, decode_plan, swapped_codes_plan, swapped_plan
from rtkernels.ops.gemm.decode_linear import FORWARD
from rtkernels.ops.gemm.product import Matrix, Product
from rtkernels.runtime import targets


@at("sm_90", "cuda")
@pytest.mark.parametrize("constant", (False, True))
@pytest.mark.parametrize(("m", "n", "k"), ((12, 70, 1160), (17, 70, 1088), (40, 33, 72), (64, 80, 528)))
def test_nine_to_64_rows_by_wgmma(
    m: int, n: int, k: int, constant: bool, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of ``swapped_plan``, in clusters; with constant weights, the first of which are loaded at once."""
    monkeypatch.setattr(swapped_plan, "_SMALL", 0)
    own, found = swapped_plan.launches, []

    def launches(*given, **options):
        found.append(given)
        return own(*given, **options, parts=2)

    monkeypatch.setattr(swapped_plan, "launches", launches)
    for arguments, exact, error in (
        case("16bit", m, n, k, add=True, bias=True, factor=0.5),
        case("16bit", m, n, k, norm=True, gated=True, act="silu", bias=True),
        case("16bit", m, n, k, norm=True, add=True),
        case("16bit", m, n, k, FP16, gated=True, act="gelu_tanh", add=True, factor=2.0),
    ):
        given = (*arguments[:10], constant, *arguments[11:])
        with running_on(place) as device:
            out = FORWARD.call(*(t.to(device) if isinstance(t, torch.Tensor) else t for t in given)).cpu()
        assert ((out.double() - exact).abs() <= error).all()
    assert len(found) == 4


def test_steps_that_take_the_kernel() -> None:
    chosen, sm_90 = swapped_plan.serves_step, targets.parse("sm_90a")
    matrix = Matrix("bf16", 4096)
    product = Product(32, 4096, 4096, matrix, matrix, matrix)
    assert chosen(product, sm_90, True) and chosen(product._replace(m=16, gate="silu"), sm_90, True)
    assert not chosen(product._replace(m=65), sm_90, False)
    assert not chosen(product, targets.parse("sm_80"), False)


@pytest.mark.parametrize(
    ("name", "dtype", "n", "wanted"),
    (
        ("16bit", BF16, 64, "chunk_plan"), ("16bit", BF16, 8256, "swapped_plan"), ("16bit", FP16, 64, "swapped_plan"),
        ("e4m3_row", BF16, 64, "chunk_plan"), ("e4m3_row", BF16, 16448, "swapped_codes_plan"),
        ("e4m3_block", BF16, 64, "swapped_codes_plan"), ("int4_group", BF16, 64, "swapped_codes_plan"),
    ),
)  # fmt: skip
def test_kernels_of_12_rows(
    name: str, dtype: torch.dtype, n: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few weights are those of ``chunk_plan``, codes too; what it does not compute is that of the others."""
    for module in (chunk_plan, decode_plan, swapped_plan, swapped_codes_plan):
        found = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, "launches", lambda *given, found=found, **options: found)
    call = decode_linear.DecodeLinear(*case(name, 12, n, 512, dtype)[0]).metas
    with rtkernels.emulate("sm_90"):
        assert decode_linear._plan(call, -1) == wanted


@pytest.mark.gpu
def test_a_chain_of_steps_of_many_rows_in_a_graph() -> None:
    g = torch.Generator().manual_seed(0)
    x, gain, up, down = (
        torch.randn(*s, generator=g).to(BF16).cuda() for s in ((32, 1024), (1024,), (8192, 1024), (1024, 4096))
    )

    def chain() -> torch.Tensor:
        y = x
        for _ in range(6):
            y = rtkernels.decode_linear(y, up, norm_weight=gain, gated=True, act="silu", constant=True)
            y = rtkernels.decode_linear(y, down, add=x, factor=0.01, constant=True)
        return y

    assert_captures(chain)
