"""Operands, scales and groups of matrix products in any layout, with their values in fp64; and backends run on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels import emulator
from rtkernels.ops.gemm.product import BYTES, Matrix, Product, Scales
from rtkernels.runtime.launch.device import device_info, emulate_features
from rtkernels.runtime.operator.plan import StepPlan
from support.compare import FP8_SUMS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn,
          "e5m2": torch.float8_e5m2, "int8": torch.int8, "uint8": torch.uint8, "int32": torch.int32}  # fmt: skip
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)

FLOAT_ACTS = {
    None: lambda x: x,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu": torch.nn.functional.gelu,
}
# Relative to the sum of magnitudes: what the result's type rounds to, and fp32 sums with room for their order.
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-20, "int32": 0.0}


class Operand(NamedTuple):
    tensor: Tensor
    matrix: Matrix
    values: Tensor  # fp64, [rows, k], or [groups, rows, k]


class Scaling(NamedTuple):
    tensor: Tensor
    scales: Scales
    values: Tensor  # fp64, [rows, k], or [groups, rows, k]


def codes(token: str, shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random elements (4-bit ones as bytes 0 to 15) and their values."""
    if token in ("bf16", "fp16"):
        x = torch.randn(shape, generator=generator).to(DTYPES[token])
        return x, x.double()
    if token in ("e4m3", "e5m2"):
        raw = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        raw = torch.where((raw & 0x7F) >= (0x60 if token == "e4m3" else 0x48), raw & 0x9F, raw)
        return raw.view(DTYPES[token]), raw.view(DTYPES[token]).double()
    if token in ("int8", "uint8"):
        low, high = (-128, 128) if token == "int8" else (0, 256)
        x = torch.randint(low, high, shape, generator=generator).to(DTYPES[token])
        return x, x.double()
    raw = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    return raw, nibble_values(raw, token)


def nibble_values(raw: Tensor, token: str) -> Tensor:
    """Return the values of 4-bit codes."""
    if token == "e2m1":
        return E2M1.to(raw.device)[raw.long()]
    return raw.double() if token == "uint4" else (raw ^ 8).double() - 8


def operand(
    token: str, rows: int, k: int, generator: torch.Generator, *, groups: int = 0, across: bool = False,
    aligned: bool = True, padding: int = 0,
) -> Operand:  # fmt: skip
    """Return a random operand.

    Args:
        token: Element type.
        rows: Along the result.
        k: Summed.
        generator: Of random numbers.
        groups: So many of them, consecutive; 0 for a plain matrix.
        across: Rows of memory are those of k.
        aligned: Address and pitch are multiples of 16 bytes; else neither is.
        padding: Elements between rows of memory that are not part of the matrix, more than `aligned` asks for.
    """
    elements, values = codes(token, (max(groups, 1), rows, k), generator)
    if across:
        elements = elements.transpose(1, 2)
    inner, outer = elements.shape[2], elements.shape[1]
    each = int(16 / BYTES[token])
    pitch = inner + padding
    pitch = -(-pitch // each) * each if aligned else pitch + (2 if BYTES[token] < 1 else 1) - pitch % 2
    offset = 0 if aligned else 1
    if BYTES[token] < 1:
        full = torch.zeros(max(groups, 1), outer, inner + inner % 2, dtype=torch.uint8)
        full[..., :inner] = elements
        elements, pitch, inner = full[..., ::2] | full[..., 1::2] << 4, pitch + pitch % 2, (inner + 1) // 2
        step = pitch // 2
    else:
        step = pitch
    memory = torch.empty(max(groups, 1) * outer * step + 1, dtype=elements.dtype)
    memory.view(torch.uint8).fill_(0xFF)  # NaN, or a code that is not 0, between rows
    tensor = memory.as_strided((max(groups, 1), outer, inner), (outer * step, step, 1), offset)
    tensor.copy_(elements)
    matrix = Matrix(token, pitch, across, aligned, outer * pitch if groups else 0)
    return Operand(tensor if groups else tensor[0], matrix, values if groups else values[0])


def scaling(
    rows: int, k: int, generator: torch.Generator, *, per_rows: int, depth: int, token: str = "fp32",
    columns_first: bool = False, swizzled: bool = False, groups: int = 0, aligned: bool = True,
) -> Scaling:  # fmt: skip
    """Return random scales of [rows, k]: one for `per_rows` rows and `depth` of k; 0 for all.

    ``columns_first``: those of the rows are neighbours in memory.
    """
    count = 1 if per_rows == 0 else -(-rows // per_rows)
    across = 1 if depth == 0 else -(-k // depth)
    shape = (max(groups, 1), count, max(across, 1))
    if token == "fp32":
        stored = torch.rand(shape, generator=generator) * 0.5 + 0.25
        numbers = stored.double()
    else:
        low, high = (118, 136) if token == "e8m0" else (1, 0x60)
        stored = torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)
        numbers = byte_values(stored, token)
    rows_of = torch.arange(rows) // per_rows if per_rows else torch.zeros(rows, dtype=torch.long)
    depth_of = torch.arange(k) // depth if depth else torch.zeros(k, dtype=torch.long)
    values = numbers[:, rows_of][:, :, depth_of]
    if swizzled:
        tensor = swizzle(stored)
        scales = Scales(per_rows, depth, 0, 0, token, True, True, tensor[0].numel() if groups else 0)
    else:
        order = stored.transpose(1, 2).contiguous().transpose(1, 2) if columns_first else stored.contiguous()
        if not aligned:
            memory = torch.empty(order.numel() + 1, dtype=order.dtype)
            tensor = memory.as_strided(order.shape, order.stride(), 1)
            tensor.copy_(order)
        else:
            tensor = order
        pitches = (1, count) if columns_first else (shape[2], 1)
        larger = max(pitches) * tensor.element_size()
        scales = Scales(per_rows, depth, *pitches, token, False, aligned and larger % 16 == 0,
                        count * shape[2] if groups else 0)  # fmt: skip
    return Scaling(tensor if groups else tensor[0], scales, values if groups else values[0])


def byte_values(stored: Tensor, token: str) -> Tensor:
    """Return what scales of one byte mean."""
    if token == "e8m0":
        return torch.where(stored == 255, torch.nan, torch.exp2(stored.double() - 127))
    return (stored & 0x7F).view(torch.float8_e4m3fn).double()


def swizzle(stored: Tensor) -> Tensor:
    """Return scales [groups, rows, columns] in blocks of 128 x 4, [groups, bytes]."""
    groups, rows, columns = stored.shape
    full = torch.zeros(groups, -(-rows // 128) * 128, -(-columns // 4) * 4, dtype=stored.dtype)
    full[:, :rows, :columns] = stored
    blocks = full.view(groups, -(-rows // 128), 4, 32, -(-columns // 4), 4)
    return blocks.permute(0, 1, 4, 3, 2, 5).reshape(groups, -1).contiguous()


def run(backend: Any, product: Product, tensors: Mapping[str, Tensor]) -> None:
    """Run a product with a backend on the tensors it names, on their GPU or, for CPU tensors, in the emulator."""
    device = tensors["a"].get_device()

    def launch() -> None:
        reason = backend.unsupported(product, device_info(device).target)
        if reason is not None:
            raise AssertionError(f"unsupported: {reason}")
        plan = StepPlan("product", list(tensors), (), {}, "tuple", backend.steps(product, device), device)
        plan.run(*(t.data_ptr() for t in tensors.values()))

    if device >= 0:
        launch()
        return
    with emulator.lock:
        emulate_features(emulator.active())
        with emulator.recording():
            launch()


# ---- one product, compared ------------------------------------------------------------------------------------------


def on_device(tensor: Tensor, device: str) -> Tensor:
    """Return a tensor with the same strides on a device."""
    if device == "cpu":
        return tensor
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((reach,), (1,)).to(device)
    return flat.as_strided(tensor.shape, tensor.stride(), 0)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def result_memory(token: str, *shape: int, padding: int = 0, aligned: bool = True) -> tuple[Tensor, Matrix]:
    """Return poisoned memory for a result, and its description."""
    pitch = shape[-1] + padding
    memory = torch.full((*shape[:-1], pitch + 1), 77, dtype=DTYPES[token])
    out = memory.view(-1)[0 if aligned else 1 :].as_strided(
        shape, [*([shape[-2] * pitch] * (len(shape) - 2)), pitch, 1]
    )
    return out, Matrix(token, pitch, False, aligned, shape[-2] * pitch if len(shape) == 3 else 0)


def check(got: Tensor, wanted: Tensor, magnitude: Tensor, token: str, lost: float = 2.0**-20) -> None:
    """Compare with the exact result; sums may lose `lost` of `magnitude`, the sum of magnitudes of their terms."""
    got = got.double()
    assert torch.equal(got.isnan(), wanted.isnan()), "NaN"
    wanted, got = wanted.nan_to_num(0.0, posinf=1e300, neginf=-1e300), got.nan_to_num(0.0, posinf=1e300, neginf=-1e300)
    allowed = ROUNDING[token] * wanted.abs() + lost * magnitude + 1e-30
    if token == "int32":
        allowed = torch.zeros_like(wanted)
    wrong = (got - wanted).abs() > allowed
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} wrong, first {got[wrong][0]} for {wanted[wrong][0]}"


def plain(
    backend: Any, a: str, b: str, m: int, n: int, k: int, *, out: str = "bf16", scale_a: dict | None = None,
    scale_b: dict | None = None, sums: str = "fp32", seed: int = 0, operand_a: dict | None = None,
    operand_b: dict | None = None, device: str = "cpu", **rest,
) -> None:  # fmt: skip
    """Run a product without groups and compare it; `rest` are fields of Product."""
    random = generator(seed)
    left = operand(a, m, k, random, **(operand_a or {}))
    right = operand(b, n * (2 if rest.get("gate") else 1), k, random, **(operand_b or {}))
    result, matrix = result_memory(out, m, n)
    tensors = {"a": left.tensor, "b": right.tensor, "out": result}
    x, y, described = left.values, right.values, {}
    for name, given, rows in (("scale_a", scale_a, m), ("scale_b", scale_b, right.values.shape[0])):
        if given is not None:
            s = scaling(rows, k, random, **given)
            tensors[name], described[name] = s.tensor, s.scales
            x, y = (x * s.values, y) if name == "scale_a" else (x, y * s.values)
    if rest.get("global_scale"):
        tensors["global_scale"] = torch.tensor([0.5, 3.0])[: rest["global_scale"]]
    wanted, magnitude = x @ y.T, x.abs() @ y.abs().T
    if rest.get("global_scale"):
        factor = torch.ones(right.values.shape[0], dtype=torch.float64) * 0.5
        if rest["global_scale"] == 2:
            factor[n:] = 3.0
        wanted, magnitude = wanted * factor, magnitude * factor
    if rest.get("bias"):
        tensors["bias"] = torch.randn(right.values.shape[0], generator=random).to(DTYPES[rest["bias"]])
        wanted = wanted + tensors["bias"].double()
    if rest.get("gate"):
        magnitude = (magnitude[:, :n] + 1) * (magnitude[:, n:] + 1)
        wanted = FLOAT_ACTS[rest["gate"]](wanted[:, :n]) * wanted[:, n:]
    if rest.get("add"):
        tensors["add"] = torch.randn(m, n, generator=random).to(DTYPES[rest["add"]])
        wanted, rest["add_pitch"] = wanted + tensors["add"].double(), n
    wanted = FLOAT_ACTS[rest.get("act")](wanted)
    if rest.get("accumulate"):
        wanted = wanted + 77
    product = Product(m, n, k, left.matrix, right.matrix, matrix, sums=sums, **described, **rest)
    moved = {name: on_device(t, device) for name, t in tensors.items()}
    run(backend, product, moved)
    result.copy_(moved["out"])
    lost = 2.0**-20 if sums == "fp32" else 2.0**-8
    check(result, wanted, magnitude + 1e-3, out, FP8_SUMS if device == "cuda" and a in ("e4m3", "e5m2") else lost)
