"""The skinny product: every format of weights and activations, untuned sizes, all epilogues."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.skinny_cases import check, make, poisoned, run

import rtkernels
from rtkernels.ops.gemm import skinny_plan
from rtkernels.ops.gemm.product import Groups, Product
from rtkernels.runtime import targets

CPU = torch.device("cpu")

# Activations, weights, scales of a, scales of b.
FORMATS = {
    "bf16": ("bf16", "bf16", None, None),
    "fp16": ("fp16", "fp16", None, None),
    "e4m3": ("bf16", "e4m3", None, ("fp32", 0, 0)),
    "e4m3_fp16": ("fp16", "e4m3", None, ("fp32", 1, 0)),
    "e5m2": ("bf16", "e5m2", None, ("fp32", 1, 0)),
    "e5m2_fp16": ("fp16", "e5m2", None, None),
    "int8": ("bf16", "int8", None, ("fp32", 1, 0)),
    "int8_fp16": ("fp16", "int8", None, ("fp32", 1, 64)),
    "int4_128": ("bf16", "int4", None, ("fp32", 1, 128)),
    "int4_64": ("fp16", "int4", None, ("fp32", 1, 64)),
    "uint4_32": ("bf16", "uint4", None, ("fp32", 1, 32)),
    "int4_row": ("fp16", "int4", None, ("fp32", 1, 0)),
    "int4_256": ("bf16", "int4", None, ("fp32", 1, 256)),
    "nvfp4": ("bf16", "e2m1", None, ("ue4m3", 1, 16)),
    "nvfp4_fp16": ("fp16", "e2m1", None, ("ue4m3", 1, 16, {"swizzled": True})),
    "mxfp4": ("bf16", "e2m1", None, ("e8m0", 1, 32)),
    "mxfp8": ("bf16", "e4m3", None, ("e8m0", 1, 32, {"swizzled": True})),
    "fp8_tensor": ("e4m3", "e4m3", ("fp32", 0, 0), ("fp32", 0, 0)),
    "fp8_row": ("e5m2", "e4m3", ("fp32", 1, 0), ("fp32", 1, 0)),
    "fp8_block": ("e4m3", "e4m3", ("fp32", 1, 128, {"columns_first": True}), ("fp32", 128, 128)),
    "fp8_1d1d": ("e4m3", "e5m2", ("fp32", 1, 128), ("fp32", 1, 128)),
    "w8a8": ("int8", "int8", ("fp32", 1, 0), ("fp32", 1, 0)),
    "w4a8": ("int8", "int4", ("fp32", 1, 0), ("fp32", 1, 128)),
    "w4a4": ("int4", "int4", ("fp32", 1, 0), ("fp32", 1, 0)),
    "w4a8_fp8": ("e4m3", "uint4", ("fp32", 1, 128), ("fp32", 1, 64)),
}


def _case(name: str, m: int, n: int, k: int, **options):
    a, b, scale_a, scale_b = FORMATS[name]
    return make(m, n, k, a, b, scale_a=scale_a, scale_b=scale_b, **options)


def _checked(case, out=None, target: str = "sm_90") -> torch.Tensor:
    p = case.product
    assert skinny_plan.unsupported(p, targets.parse(target)) is None
    out = poisoned(p.m, p.n, p.out.token) if out is None else out
    with rtkernels.emulate(target):
        run(p, CPU, out=out, **case.tensors)
    check(case, out)
    return out


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str) -> None:
    """Odd sizes: a tail of k and of n, tiles shared by blocks."""
    _checked(_case(name, 5, 150, 624))


@pytest.mark.parametrize("name", ("bf16", "e4m3", "int4_128", "nvfp4", "fp8_block", "w8a8"))
def test_formats_before_sm_90(name: str) -> None:
    _checked(_case(name, 5, 150, 624), target="sm_80")


def _tokens() -> Iterator[Any]:
    """Yield formats and tokens. A number of tiles of 8 tokens is a variant; one or two formats of each are quick."""
    for m in (1, 2, 8, 16, 17, 33, 64):
        for name in ("bf16", "e4m3", "int4_128", "fp8_block"):
            quick = m not in (16, 17) or name == "e4m3" or (m, name) == (16, "int4_128")
            yield pytest.param(name, m, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "m"), list(_tokens()))
def test_tokens(name: str, m: int) -> None:
    _checked(_case(name, m, 130, 320, seed=m))


@pytest.mark.parametrize("name", ("fp16", "e4m3_fp16", "int8", "int4_row", "uint4_32", "nvfp4", "w8a8", "mxfp4"))
@pytest.mark.parametrize("k", (1, 16, 31, 130, 257))
def test_depths(name: str, k: int) -> None:
    _checked(_case(name, 3, 20, k, out="fp32", seed=k))


@pytest.mark.parametrize("name", ("bf16", "e4m3", "int4_128", "w4a8", "nvfp4"))
def test_rows_in_any_place(name: str) -> None:
    """Unaligned rows."""
    pad = 2 if name == "bf16" else 3
    case = _case(name, 3, 17, 290, pad_a=2, pad_b=pad)
    assert not case.product.b.aligned and not case.product.a.aligned
    _checked(case)


def test_small_shared_memory() -> None:
    """If it cannot hold 64 tokens of a stage, there are two launches."""
    _checked(_case("int4_128", 61, 40, 300, bias="fp32", add="bf16"), target="sm_89")


@pytest.mark.parametrize("act", (None, "relu", "silu", "gelu_tanh", "gelu"))
def test_epilogue(act: str | None) -> None:
    _checked(_case("e4m3", 9, 37, 136, bias="bf16", add="fp16", act=act, out="fp16", global_scale=1))


@pytest.mark.parametrize("name", ("bf16", "int4_128", "fp8_row", "nvfp4"))
@pytest.mark.parametrize("act", ("silu", "gelu_tanh"))
def test_gated(name: str, act: str) -> None:
    _checked(_case(name, 6, 75, 400, gate=act, out="fp32", bias="fp32", global_scale=2))


@pytest.mark.parametrize("token", ("bf16", "fp32"))
def test_accumulates(token: str) -> None:
    case = _case("e4m3_fp16", 4, 140, 1000, out=token, accumulate=True)
    out = torch.randn(4, 140).to(torch.bfloat16 if token == "bf16" else torch.float32)
    case = case._replace(exact=case.exact + out.double())
    _checked(case, out)


@pytest.mark.parametrize("names", (("int8", "int8"), ("int4", "int4"), ("int8", "uint4")))
def test_integer_results_are_exact(names: tuple[str, str]) -> None:
    _checked(make(7, 90, 3000, *names, out="int32", sums="int32"))


def test_result_does_not_depend_on_the_order_of_blocks() -> None:
    case = _case("int4_128", 5, 260, 1300, out="fp32")
    results = []
    for order in ("forward", "reverse", 3):
        out = poisoned(5, 260, "fp32")
        with rtkernels.emulate("sm_90", order=order):
            run(case.product, CPU, out=out, **case.tensors)
        results.append(out)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", ("e4m3", "e4m3_fp16", "e5m2", "e5m2_fp16", "bf16"))
def test_not_numbers_of_weights(name: str) -> None:
    """NaN and infinity reach their column, for every token, and no other one."""
    case = _case(name, 10, 140, 300, out="fp32")
    codes = case.tensors["b"]
    if name.startswith("e4m3"):
        codes[3, 7], codes[12, 299], codes[130, 0] = 0x7F, 0xFF, 0x7F
    elif name.startswith("e5m2"):
        codes[3, 7], codes[12, 299], codes[130, 0] = 0x7F, 0x7C, 0xFE
    else:
        weights = codes.view(torch.bfloat16)
        weights[3, 7], weights[12, 299], weights[130, 0] = float("nan"), float("inf"), float("nan")
    out = poisoned(10, 140, "fp32")
    out.zero_()
    with rtkernels.emulate("sm_80"):
        run(case.product, CPU, out=out, **case.tensors)
    assert out[:, [3, 130]].isnan().all() and not out[:, 12].isfinite().any()
    rest = [i for i in range(140) if i not in (3, 12, 130)]
    check(case._replace(exact=case.exact[:, rest], magnitude=case.magnitude[:, rest]), out[:, rest])


@pytest.mark.parametrize("name", ("int4_128", "fp8_tensor"))
def test_not_numbers_of_activations(name: str) -> None:
    case = _case(name, 10, 40, 200, out="fp32")
    codes = case.tensors["a"]
    if name == "fp8_tensor":
        codes[4, 9] = 0x7F
    else:
        codes.view(torch.bfloat16)[4, 9] = float("nan")
    out = torch.zeros(10, 40)
    with rtkernels.emulate("sm_90"):
        run(case.product, CPU, out=out, **case.tensors)
    assert out[4].isnan().all()
    rest = [i for i in range(10) if i != 4]
    check(case._replace(exact=case.exact[rest], magnitude=case.magnitude[rest]), out[rest])


def test_every_code_has_its_value() -> None:
    """All codes of a byte or nibble, one at a time: a has a single 1."""
    for token, k in (("e4m3", 256), ("e5m2", 256), ("int8", 256), ("int4", 16), ("uint4", 16), ("e2m1", 16)):
        for math in ("bf16", "fp16"):
            case = make(8, 8, k, math, token, out="fp32")
            codes = (
                torch.arange(256, dtype=torch.uint8)
                if k == 256
                else torch.tensor([0x10 * (2 * i + 1) + 2 * i for i in range(8)], dtype=torch.uint8)
            )
            case.tensors["b"][:, : codes.numel()] = codes
            for first in range(0, k, 8):
                a = case.tensors["a"].view(torch.bfloat16 if math == "bf16" else torch.float16)
                a.zero_()
                for i in range(8):
                    a[i, first + i] = 1.0
                clean = case.tensors["b"].clone()
                if token == "e4m3":
                    clean[(clean & 0x7F) == 0x7F] = 0
                if token == "e5m2":
                    clean[(clean & 0x7C) == 0x7C] = 0
                out = poisoned(8, 8, "fp32")
                with rtkernels.emulate("sm_80"):
                    run(case.product, CPU, out=out, **{**case.tensors, "b": clean})
                if k == 256:
                    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}[token]
                    wanted = clean.view(dtype)[0, first : first + 8].float()
                else:
                    values = {"int4": [*range(8), *range(-8, 0)], "uint4": list(range(16))}.get(token)
                    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
                    values = values or [*magnitudes, *(-v for v in magnitudes)]
                    wanted = torch.tensor(values[first : first + 8], dtype=torch.float32)
                assert torch.equal(out, wanted[:, None].expand(8, 8)), (token, math, first)


def test_what_is_refused_is_named() -> None:
    target = targets.parse("sm_90a")
    fine: Product = _case("int4_128", 4, 64, 256).product
    assert skinny_plan.unsupported(fine, target) is None
    refused = {
        "grouped": fine._replace(groups=Groups("masked", 4)),
        "65 rows": fine._replace(m=65),
        "quantised": fine._replace(quantized="row"),
        "'fp16'": fine._replace(sums="fp16"),
        "fp32": fine._replace(b=fine.b._replace(token="fp32")),
        "summed dimension": fine._replace(b=fine.b._replace(across=True)),
        "1 x 48": fine._replace(scale_b=fine.scale_b._replace(depth=48)),
        "int32": fine._replace(out=fine.out._replace(token="int32")),
    }
    for word, product in refused.items():
        reason = skinny_plan.unsupported(product, target)
        assert reason is not None and word in reason, (word, reason)


def test_nothing_to_do() -> None:
    assert not skinny_plan.steps(_case("bf16", 4, 64, 256).product._replace(m=0), -1).steps
