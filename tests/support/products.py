"""Matrix products for tests of the backends of ``ops/gemm``: tensors, their ``Product``, a launch, and fp64 results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels import emulator
from rtkernels.ops.gemm.product import Groups, Matrix, Product, Scales
from rtkernels.runtime.launch.device import emulate_features
from rtkernels.runtime.operator.plan import StepPlan

DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2, "int8": torch.int8, "uint8": torch.uint8, "int32": torch.int32,
}  # fmt: skip
TOKENS = {dtype: token for token, dtype in DTYPES.items()}
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-23, "int32": 0.0, "e4m3": 2.0**-4, "e5m2": 2.0**-3}
ACTS = {
    None: lambda x: x, "relu": torch.relu, "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}  # fmt: skip


def codes(token: str, *shape: int, device: str = "cpu") -> Tensor:
    """Return random elements, those of 8 bits over their whole range but for NaN and infinities."""
    if token in ("int8", "uint8"):
        low = -128 if token == "int8" else 0
        return torch.randint(low, low + 256, shape, device=device, dtype=torch.int32).to(DTYPES[token])
    return torch.randn(*shape, device=device).to(DTYPES[token])


def operand(
    token: str, rows: int, k: int, *, across: bool = False, groups: int = 0, device: str = "cpu", halves: bool = False
) -> Tensor:
    """Return [rows, k] or [groups, rows, k]; rows of its memory (of k with `across`) are multiples of 16 bytes.

    With `halves`, they are odd multiples of 8 bytes, and end with the tensor's memory.
    """
    if halves:
        pitch = k + (8 - k) % 16
        return codes(token, rows * pitch + k - pitch, device=device).as_strided((rows, k), (pitch, 1))
    each = 16 // DTYPES[token].itemsize
    outer, inner = (k, rows) if across else (rows, k)
    whole = codes(token, *([groups] if groups else []), outer, -(-inner // each) * each, device=device)
    view = whole[..., :inner]
    return view.transpose(-1, -2) if across else view


def matrix(tensor: Tensor, *, across: bool = False) -> Matrix:
    """Describe an operand, [.., rows, k], or a result."""
    strides, each = tensor.stride(), 16 // tensor.dtype.itemsize
    pitch = strides[-1] if across else strides[-2]
    group = strides[0] if tensor.dim() == 3 else 0
    aligned = pitch % each == 0 and group % each == 0 and tensor.data_ptr() % 16 == 0
    halves = not aligned and pitch * tensor.dtype.itemsize % 8 == 0 and tensor.data_ptr() % 16 == 0 and not group
    return Matrix(TOKENS[tensor.dtype], pitch, across, aligned, group, halves)


def scales_of(tensor: Tensor | None, rows: int, depth: int) -> Scales | None:
    """Describe scales [.., i, j] that cover `rows` rows and `depth` of k each; of 0, those dimensions have one."""
    if tensor is None:
        return None
    row, deep = tensor.stride()[-2:]
    group = tensor.stride(0) if tensor.dim() == 3 else 0
    aligned = tensor.data_ptr() % 16 == 0 and max(row, deep) % 4 == 0
    return Scales(rows, depth, 0 if rows == 0 else row, 0 if depth == 0 else deep, aligned=aligned, group_pitch=group)


def expanded(tensor: Tensor | None, rows: int, depth: int, m: int, k: int) -> Tensor | float:
    """Return scales for every element, fp64 [.., m, k]."""
    if tensor is None:
        return 1.0
    full = tensor.double().repeat_interleave(rows or m, -2)[..., :m, :]
    return full.repeat_interleave(depth or k, -1)[..., :k]


def launch(backend: Any, product: Product, tensors: dict[str, Tensor], device: torch.device, **options: Any) -> None:
    """Run a product on a GPU, or in the emulator that is active. Results among `tensors` are overwritten."""

    def run() -> None:
        index = device.index or 0 if device.type == "cuda" else -1
        plan = StepPlan("product", list(tensors), (), {}, "tuple", backend.steps(product, index, **options), index)
        plan.run(*(t.data_ptr() for t in tensors.values()))

    if device.type == "cuda":
        run()
        return
    with emulator.lock:
        emulate_features(emulator.active())
        with emulator.recording():
            run()


def close(got: Tensor, expected: Tensor, magnitude: Tensor, token: str, *, slack: float = 2.0**-17) -> None:
    """Compare with fp64: one rounding to the result's type, and `slack` of the sum of magnitudes."""
    got = got.double()
    error, allowed = (got - expected).abs(), ROUNDING[token] * expected.abs() + slack * magnitude
    same = (got == expected) | (got.isnan() & expected.isnan())
    bad = ~(same | (error <= allowed))
    assert not bad.any(), (
        f"{int(bad.sum())} of {bad.numel()}, first at {bad.nonzero()[0].tolist()}: {got[bad][0]} for {expected[bad][0]}"
    )


def quantized_close(got: Tensor, scale: Tensor, expected: Tensor, slack: Tensor) -> None:
    """Compare codes and scales per 128 columns with fp64 results."""
    m, n = expected.shape
    largest = torch.finfo(got.dtype).max
    parts = torch.nn.functional.pad(expected.abs(), (0, -n % 128)).reshape(m, -1, 128)
    wanted = parts.amax(-1) / largest
    loose = torch.nn.functional.pad(slack, (0, -n % 128)).reshape(m, -1, 128).amax(-1) / largest
    assert ((scale.double() - wanted).abs() <= loose + wanted * 2.0**-18 + 1e-30).all()
    each = scale.double().repeat_interleave(128, 1)[:, :n]
    back = got.double() * each
    step = 2.0**-4 if got.dtype == torch.float8_e4m3fn else 2.0**-3
    error = (back - expected).abs()
    assert (error <= step * expected.abs() + each * 2.0**-9 + slack).all(), float((error / each).max())


def dense(
    backend: Any, m: int, n: int, k: int, *, a: str = "bf16", b: str = "", out: str = "bf16", device: str = "cpu",
    across: tuple[bool, bool] = (False, False), scale_a: tuple[int, int] | None = None,
    scale_b: tuple[int, int] | None = None, contiguous: str = "rows", sums: str = "fp32", bias: str | None = None,
    add: str | None = None, act: str | None = None, accumulate: bool = False, slack: float = 2.0**-15,
    narrow: int = 0, gate: str | None = None, quantized: str | None = None, halves: str = "",
    **options: Any,
) -> None:  # fmt: skip
    """Multiply random matrices and compare. Scales are (rows, depth); `contiguous` says along which they are dense.

    `narrow` is how many more columns the memory of the result has, which must stay unchanged. `halves` names the
    operands whose rows are odd multiples of 8 bytes apart.
    """
    b = b or a
    left = operand(a, m, k, across=across[0], device=device, halves="a" in halves)
    b_rows = 2 * n if gate else n
    right = operand(b, b_rows, k, across=across[1], device=device, halves="b" in halves)
    tensors = {"a": left, "b": right}

    def scales(name: str, covers: tuple[int, int] | None, rows: int) -> Tensor | None:
        if covers is None:
            return None
        shape = (-(-rows // covers[0]) if covers[0] else 1, -(-k // covers[1]) if covers[1] else 1)
        tensors[name] = torch.rand(*shape, device=device) + 0.5
        if contiguous == "depth":
            tensors[name] = tensors[name].contiguous()
        else:
            padded = torch.full((shape[1], -(-shape[0] // 4) * 4), 3.0, device=device)
            padded[:, : shape[0]] = tensors[name].t()
            tensors[name] = padded[:, : shape[0]].t()
        return tensors[name]

    sa, sb = scales("scale_a", scale_a, m), scales("scale_b", scale_b, b_rows)
    memory = torch.randn(m, n + narrow, device=device).mul(3).to(DTYPES[out])
    before = memory.clone()
    tensors["out"] = memory[:, :n]
    if quantized:
        blocks, padded = -(-n // 128), -(-m // 4) * 4
        tensors["out_scale"] = torch.full((blocks, padded), -1.0, device=device)[:, :m].t()
    if bias:
        tensors["bias"] = torch.randn(b_rows, device=device).to(DTYPES[bias])
    if add:
        tensors["add"] = torch.randn(m, n, device=device).to(DTYPES[add])
    product = Product(
        m, n, k, matrix(left, across=across[0]), matrix(right, across=across[1]), matrix(tensors["out"]),
        scales_of(sa, *(scale_a or (0, 0))), scales_of(sb, *(scale_b or (0, 0))), sums, bias, add, n if add else 0, act,
        accumulate, gate, quantized,
    )  # fmt: skip
    launch(backend, product, tensors, memory.device, **options)
    x = left.double() * expanded(sa, *(scale_a or (0, 0)), m, k)
    y = right.double() * expanded(sb, *(scale_b or (0, 0)), b_rows, k)
    expected, magnitude = x @ y.T, x.abs() @ y.abs().T
    for name in ("bias", "add"):
        if name in tensors:
            expected, magnitude = expected + tensors[name].double(), magnitude + tensors[name].double().abs()
    expected = ACTS[act](expected)
    if gate:
        first, second = expected[:, :n], expected[:, n:]
        magnitude = magnitude[:, :n] * (second.abs() + 1) + (first.abs() + 1) * magnitude[:, n:]
        expected = ACTS[gate](first) * second
    if quantized:
        quantized_close(tensors["out"], tensors["out_scale"], expected, magnitude * slack)
        return
    if accumulate:
        expected, magnitude = expected + before[:, :n].double(), magnitude + before[:, :n].double().abs()
    close(tensors["out"], expected, magnitude, out, slack=slack)
    assert torch.equal(memory[:, n:], before[:, n:])


def grouped(
    backend: Any, kind: str, sizes: list[int], n: int, k: int, *, a: str = "bf16", out: str = "bf16", align: int = 1,
    scale_a: tuple[int, int] | None = None, scale_b: tuple[int, int] | None = None, across: bool = False,
    sums: str = "fp32", accumulate: bool = False, m: int = 0, device: str = "cpu", slack: float = 2.0**-15,
    **options: Any,
) -> None:  # fmt: skip
    """Multiply groups of these sizes and compare. "masked" groups have room for `m` rows, "depth" ones have m rows."""
    count, starts, total = len(sizes), [], 0
    for size in sizes:
        starts.append(total)
        total += -(-size // align) * align if kind == "labels" or align > 1 else size
    rows = {"masked": m, "depth": m}.get(kind, total + 5)
    depth = total + 3 if kind == "depth" else k
    if kind == "depth":
        left = operand(a, rows, depth, across=across, device=device)
        right = operand(a, n, depth, across=across, device=device)
    else:
        left = operand(a, rows, k, groups=count if kind == "masked" else 0, device=device)
        right = operand(a, n, k, groups=count, device=device)
    shape = (count, rows, n) if kind in ("masked", "depth") else (rows, n)
    tensors = {"a": left, "b": right, "out": torch.randn(*shape, device=device).to(DTYPES[out])}
    before = tensors["out"].clone()

    def scales(name: str, covers: tuple[int, int] | None, length: int, many: bool) -> None:
        if covers is not None:
            size = (-(-length // covers[0]) if covers[0] else 1, -(-depth // covers[1]) if covers[1] else 1)
            tensors[name] = torch.rand(*([count] if many else []), *size, device=device) + 0.5

    scales("scale_a", scale_a, rows, kind == "masked")
    scales("scale_b", scale_b, n, kind != "depth")
    ends = [starts[g] + sizes[g] for g in range(count)]
    if kind in ("rows", "depth"):
        if align == 1:
            tensors["ends"] = torch.tensor(ends, dtype=torch.int32, device=device)
        else:  # groups begin where the previous one ends, so padding belongs to it, except for the last
            padded = [*starts[1:], ends[-1]]
            tensors["ends"] = torch.tensor(padded, dtype=torch.int32, device=device)
            ends = padded
    elif kind == "masked":
        tensors["sizes"] = torch.tensor(sizes, dtype=torch.int32, device=device)
    else:
        labels = torch.full((rows,), -1, dtype=torch.int32)
        for g in range(count):
            labels[starts[g] : ends[g]] = g
        tensors["row_groups"] = labels.to(device)
    product = Product(
        rows, n, depth, matrix(left, across=across), matrix(right, across=across), matrix(tensors["out"]),
        scales_of(tensors.get("scale_a"), *(scale_a or (0, 0))),
        scales_of(tensors.get("scale_b"), *(scale_b or (0, 0))),
        sums, accumulate=accumulate, groups=Groups(kind, count, align),
    )  # fmt: skip
    launch(backend, product, tensors, tensors["out"].device, **options)
    x = left.double() * expanded(tensors.get("scale_a"), *(scale_a or (0, 0)), rows, depth)
    y = right.double() * expanded(tensors.get("scale_b"), *(scale_b or (0, 0)), n, depth)
    expected, magnitude = before.double(), torch.zeros_like(before, dtype=torch.float64)
    for g in range(count):
        if kind == "depth":
            cut = slice(starts[g], ends[g])
            parts, place = (x[:, cut], y[:, cut]), (g,)
        elif kind == "masked":
            parts, place = (x[g, : sizes[g]], y[g]), (g, slice(0, sizes[g]))
        else:
            parts, place = (x[starts[g] : ends[g]], y[g]), (slice(starts[g], ends[g]),)
        sums_here = parts[0] @ parts[1].T
        magnitude[place] = parts[0].abs() @ parts[1].abs().T + before[place].double().abs() * accumulate
        expected[place] = sums_here + before[place].double() * accumulate
    close(tensors["out"], expected, magnitude, out, slack=slack)
