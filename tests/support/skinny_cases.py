"""Operands of the skinny product in all their formats, their values in fp64, and a way to run a plan's steps alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels import emulator
from rtkernels.ops.gemm import skinny_plan
from rtkernels.ops.gemm.product import BYTES, Matrix, Product, Scales
from rtkernels.runtime.launch.device import emulate_features
from rtkernels.runtime.operator.plan import StepPlan

DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int32": torch.int32, "int8": torch.int8,
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
}  # fmt: skip
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NAMES = ("a", "b", "scale_a", "scale_b", "global_scale", "bias", "add", "out")


class Operand(NamedTuple):
    """Codes in memory ``[rows, pitch]``, their layout, and their values, fp64 ``[rows, k]``."""

    codes: Tensor
    matrix: Matrix
    values: Tensor


class Scaling(NamedTuple):
    """Scales in memory, their layout, and the factor of every element, fp64 ``[rows, k]``."""

    tensor: Tensor
    scales: Scales
    factors: Tensor


def operand(token: str, rows: int, k: int, seed: int = 0, pad: int = 0) -> Operand:
    """Return random codes; `pad`: bytes after each row, filled with values that must not be read."""
    generator = torch.Generator().manual_seed(seed)
    if BYTES[token] < 1:
        nibbles = torch.randint(0, 16, (rows, k + k % 2), generator=generator)
        if token == "e2m1":
            table = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64)
            values = table[nibbles]
        else:
            values = (nibbles if token == "uint4" else (nibbles ^ 8) - 8).double()
        content = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).to(torch.uint8)
        values = values[:, :k]
    elif token == "int8":
        codes = torch.randint(-128, 128, (rows, k), generator=generator).to(torch.int8)
        content, values = codes.view(torch.uint8), codes.double()
    else:
        codes = torch.randn(rows, k, generator=generator).to(DTYPES[token])
        content, values = codes.view(torch.uint8), codes.double()
    row_bytes = content.shape[1]
    # Rows start at multiples of 16 bytes unless `pad` says otherwise.
    pitch = row_bytes + pad if pad else -(-row_bytes // 16) * 16
    memory = torch.full((rows, pitch), 0xFF, dtype=torch.uint8)
    memory[:, :row_bytes] = content
    aligned = pitch % 16 == 0
    return Operand(memory, Matrix(token, int(pitch / BYTES[token]), aligned=aligned), values)


def scaling(token: str, rows: int, depth: int, of_rows: int, k: int, *, seed: int = 1, swizzled: bool = False,
            columns_first: bool = False) -> Scaling:  # fmt: skip
    """Return random scales of `rows` rows by `depth` of k (0: all) for an operand of `of_rows` rows."""
    generator = torch.Generator().manual_seed(seed)
    count_rows = 1 if rows == 0 else -(-of_rows // rows)
    count_k = 1 if depth == 0 else -(-k // depth)
    if token == "fp32":
        tensor = torch.rand(count_rows, count_k, generator=generator) + 0.5
        values = tensor.double()
    elif token == "e8m0":
        tensor = torch.randint(120, 134, (count_rows, count_k), generator=generator).to(torch.uint8)
        values = 2.0 ** (tensor.double() - 127)
    else:
        tensor = torch.randint(1, 0x7F, (count_rows, count_k), generator=generator).to(torch.uint8)
        values = tensor.view(torch.float8_e4m3fn).double()
    factors = values.repeat_interleave(rows or of_rows, 0)[:of_rows].repeat_interleave(depth or k, 1)[:, :k]
    if swizzled:
        padded = torch.zeros(-(-count_rows // 128) * 128, -(-count_k // 4) * 4, dtype=torch.uint8)
        padded[:count_rows, :count_k] = tensor
        tensor = padded.view(-1, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4).contiguous()
        return Scaling(tensor, Scales(rows, depth, token=token, swizzled=True), factors)
    if columns_first:
        tensor = tensor.t().contiguous().t()
    pitches = tensor.stride() if count_k > 1 else (tensor.stride(0), 1)
    scales = Scales(rows, depth, *pitches, token=token, aligned=count_k % 16 == 0)
    return Scaling(tensor, scales, factors)


def activated(x: Tensor, act: str | None) -> Tensor:
    """Return an activation in fp64."""
    functional = torch.nn.functional
    if act in ("gelu", "gelu_tanh"):
        return functional.gelu(x, approximate="tanh" if act == "gelu_tanh" else "none")
    return x if act is None else getattr(functional, act)(x)


def run(product: Product, device: torch.device, **tensors: Tensor) -> None:
    """Run the steps of a product on tensors of a GPU, or in the emulator that is active; `out` is written."""

    def launch() -> None:
        index = device.index or 0 if device.type == "cuda" else -1
        plan = StepPlan("skinny", NAMES, (), {}, "tuple", skinny_plan.steps(product, index), index)
        plan.run(*(tensors[name].data_ptr() if tensors.get(name) is not None else 0 for name in NAMES))

    if device.type == "cuda":
        launch()
        return
    with emulator.lock:
        emulate_features(emulator.active())
        with emulator.recording():
            launch()


class SkinnyCase(NamedTuple):
    """A product with its tensors (without out) and the exact result, fp64 ``[m, n]``, with the sum of magnitudes."""

    product: Product
    tensors: dict[str, Any]
    exact: Tensor
    magnitude: Tensor


def make(
    m: int, n: int, k: int, a: str, b: str, *, scale_a: tuple | None = None, scale_b: tuple | None = None,
    out: str = "bf16", bias: str | None = None, add: str | None = None, act: str | None = None, gate: str | None = None,
    global_scale: int = 0, pad_a: int = 0, pad_b: int = 0, seed: int = 0, device: str = "cpu", **options: Any,
) -> SkinnyCase:  # fmt: skip
    """Return a product of random operands; scales as ``(token, rows, depth)`` with options of ``scaling`` behind."""
    rows_b = 2 * n if gate else n
    left, right = operand(a, m, k, seed, pad_a), operand(b, rows_b, k, seed + 1, pad_b)
    tensors: dict[str, Any] = {"a": left.codes, "b": right.codes}
    values_a, values_b = left.values, right.values
    described: dict[str, Scales | None] = {"scale_a": None, "scale_b": None}
    for name, given, rows in (("scale_a", scale_a, m), ("scale_b", scale_b, rows_b)):
        if given is not None:
            token, per_rows, depth, *more = given
            scale = scaling(token, per_rows, depth, rows, k, seed=seed + len(name), **(more[0] if more else {}))
            tensors[name], described[name] = scale.tensor, scale.scales
            if name == "scale_a":
                values_a = values_a * scale.factors
            else:
                values_b = values_b * scale.factors
    sums, magnitude = values_a @ values_b.T, values_a.abs() @ values_b.abs().T
    generator = torch.Generator().manual_seed(seed + 9)
    if global_scale:
        tensors["global_scale"] = torch.rand(global_scale, generator=generator) + 0.5
        factors = tensors["global_scale"].double().repeat_interleave(-(-rows_b // global_scale))[:rows_b]
        sums, magnitude = sums * factors, magnitude * factors
    if bias is not None:
        tensors["bias"] = torch.randn(rows_b, generator=generator).to(DTYPES[bias])
        sums = sums + tensors["bias"].double()
    if add is not None:
        tensors["add"] = torch.randn(m, n + 3, generator=generator).to(DTYPES[add])[:, :n]
        sums = sums + tensors["add"].double()
    if gate:
        up = sums[:, n:]
        magnitude = magnitude[:, :n] * up.abs() + magnitude[:, n:] * sums[:, :n].abs()
        exact = activated(sums[:, :n], gate) * up
    else:
        exact = activated(sums, act)
    product = Product(
        m, n, k, left.matrix, right.matrix, Matrix(out, n, aligned=n % 8 == 0), bias=bias, add=add, add_pitch=n + 3,
        act=act, gate=gate, **described, **options,
    )  # fmt: skip
    if global_scale:
        product = product._replace(global_scale=global_scale)
    return SkinnyCase(product, {name: _moved(tensor, device) for name, tensor in tensors.items()}, exact, magnitude)


def _moved(tensor: Tensor, device: str) -> Tensor:
    """Return a tensor on a device with the strides it has: ``to`` gives up the pitch of rows."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


def check(case: SkinnyCase, got: Tensor) -> float:
    """Raise if a result has more error than fp32 sums and one rounding; return the largest error by its bound."""
    got, exact = got.double().cpu(), case.exact
    if case.product.out.token == "int32":
        assert torch.equal(got, exact)
        return 0.0
    rounding = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-22}[case.product.out.token]
    bound = exact.abs() * rounding + case.magnitude * 2.0**-19 + 1e-30
    if case.product.out.token == "fp16":
        exact = exact.to(torch.float16).double()  # beyond its range
        bound = bound + 2.0**-24
    error = torch.where(got == exact, 0.0, (got - exact).abs())
    ratio = (error / bound).nan_to_num(torch.inf)
    worst = ratio.max().item() if ratio.numel() else 0.0
    assert worst <= 1.0, f"error {worst:.3g} times its bound at {divmod(int(ratio.argmax()), ratio.shape[1])}"
    return worst


def poisoned(m: int, n: int, token: str, device: str = "cpu") -> Tensor:
    """Return memory for a result, filled with numbers that a result cannot have."""
    out = torch.full((m, n), -77, dtype=DTYPES[token], device=device)
    return out if token == "int32" else out.fill_(float("nan"))
