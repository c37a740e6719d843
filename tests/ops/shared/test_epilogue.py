"""The epilogue of a matrix product, ``gemm/epilogue.cuh``, alone: steps in fp32, one rounding, every output."""

from __future__ import annotations

import pytest
import torch
from support import device_probe
from support.compare import running_on
from support.device_probe import COPIED, DIRECT
from support.places import at, emulated

import rtkernels
from rtkernels.emulator import EmulatorError
from rtkernels.runtime.layout import DTYPE_TOKEN

HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
WAYS = {
    "bf16_direct": (torch.bfloat16, torch.float32, 32, DIRECT),
    "bf16_copied_int": (torch.bfloat16, torch.int32, 32, COPIED),
    "fp32_copied": (torch.float32, torch.float32, 32, COPIED),
    "fp16_direct": (torch.float16, torch.float32, 16, DIRECT),
}


def fragments(matrix: torch.Tensor, count: int) -> torch.Tensor:
    """Return the sums of each thread, [blocks * 256, count], of tiles of 128 rows and 2 count columns."""
    blocks = matrix.shape[0] // 128
    # row = 128 block + 64 warpgroup + 16 warp + 8 r + g, column = 8 j + 2 t + c; thread (block, warpgroup, warp, g, t)
    split = matrix.view(blocks, 2, 4, 2, 8, count // 4, 4, 2)
    return split.permute(0, 1, 2, 4, 6, 5, 3, 7).reshape(blocks * 256, count).contiguous()


def close(got: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> bool:
    """Return True if these are fp64 values rounded once, to fp32 steps of that magnitude and then to the dtype."""
    error = (got.double() - expected).abs()
    return bool((error <= HALF_ULP[got.dtype] * expected.abs() + 2.0**-20 * magnitude + 1e-7).all())


@at("sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("way", WAYS)
def test_steps_and_outputs(place: str, way: str) -> None:
    dtype, sum_dtype, count, output = WAYS[way]
    width = 2 * count
    torch.manual_seed(0)
    token = "i32" if sum_dtype == torch.int32 else DTYPE_TOKEN[sum_dtype]
    variant = DTYPE_TOKEN[dtype], token, count, output
    for rows, columns, stride, given in (
        (1, 1, 1, "abrcxy"), (128, width, width, "rcx"), (77, width - 1, width + 3, "aby"), (130, 21, 64, "crxy"),
        (64, width, width + 8, ""),
    ):  # fmt: skip
        blocks = -(-rows // 128)
        matrix = (torch.randn(128 * blocks, width) * 100).to(sum_dtype)
        a, b = torch.rand(1) + 0.5, torch.rand(1) / 100
        row_scale, column_scale = torch.rand(rows) + 0.5, torch.rand(columns) + 0.5
        bias, add = torch.randn(columns).to(dtype), torch.randn(rows, stride).to(dtype)
        exact, magnitude = matrix[:rows, :columns].double(), matrix[:rows, :columns].double().abs()
        for letter, factor in (("a", a), ("b", b), ("r", row_scale[:, None]), ("c", column_scale)):
            if letter in given:
                exact, magnitude = exact * factor.double(), magnitude * factor.double()
        for letter, term in (("x", bias), ("y", add[:, :columns])):
            if letter in given:
                exact, magnitude = exact + term.double(), magnitude + term.double().abs()
        expected = exact * torch.sigmoid(exact)
        with running_on(place) as device:
            out = torch.full((rows, stride), 7.0, dtype=dtype, device=device)
            named = zip("abrcxy", (a, b, row_scale, column_scale, bias, add), strict=True)
            tensors = [tensor.to(device) if letter in given else None for letter, tensor in named]
            aligned = int(stride % (16 // out.element_size()) == 0)
            device_probe.launch(
                device_probe.EPILOGUE, variant, out.device, blocks, 256, fragments(matrix, count).to(device), *tensors,
                out, stride, aligned, rows, columns,
                shared=2 * 64 * width * out.element_size() if output == COPIED else 0,
            )  # fmt: skip
        out = out.cpu()
        assert (out[:, columns:] == 7).all(), "wrote past the columns"
        assert close(out[:, :columns], expected, magnitude), (rows, columns, stride, given)


def sent(dtype: torch.dtype, rows: int, columns: int, times: int = 1, *, fault: int = 0, device: str = "cpu") -> None:
    """Store tiles to a matrix by TMA, and compare."""
    blocks, count = 2, 32 if dtype == torch.float32 else 64
    width = 2 * count
    columns = min(columns, width)
    matrix = torch.randn(128 * blocks, width)
    scale, bias = torch.rand(columns) + 0.5, torch.randn(columns)
    out = torch.full((rows, -(-columns // 8) * 8), 7.0, dtype=dtype, device=device)
    box = 128 // out.element_size()
    device_probe.launch(
        device_probe.EPILOGUE_TMA, (DTYPE_TOKEN[dtype], count), out.device, blocks, 256,
        lambda: device_probe.matrix_map(out.data_ptr(), DTYPE_TOKEN[dtype], rows, columns, out.shape[1], 64, box),
        fragments(matrix, count).to(device), scale.to(device), bias.to(device), rows, columns, times, fault,
        shared=2 * 64 * width * out.element_size(),
    )  # fmt: skip
    whole = matrix[:, :columns].repeat(times, 1)[:rows].double()
    expected = whole * scale.double() + bias.double()
    got = out.cpu()
    assert (got[:, columns:] == 7).all() and (got[whole.shape[0] :] == 7).all()
    assert close(got[: whole.shape[0], :columns], expected, whole.abs() * scale + bias.abs())


@at("sm_90", "cuda")
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_by_the_copy_engine(place: str, dtype: torch.dtype) -> None:
    with running_on(place) as device:
        for rows, columns, times in ((256, 128, 1), (200, 56, 1), (512, 64, 2), (700, 120, 3)):
            sent(dtype, rows, columns, times, device=device)


@emulated
@pytest.mark.parametrize("fault", (1, 2))
def test_stages_are_reused_only_after_they_left(fault: int) -> None:
    """Without open() a tile is written while the previous one is read; without close() the block returns too early."""
    for order in ("forward", "reverse", 0):
        with rtkernels.emulate("sm_90", order=order), pytest.raises(EmulatorError) as caught:
            sent(torch.float32, 512, 128, 2, fault=fault)
        assert caught.value.kind == "race"
