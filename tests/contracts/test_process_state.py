"""Results do not depend on the state of the process: default dtype and device, deterministic mode, inference mode,
threads, autograd, autocast, what fresh memory holds, and calls before."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda_division import CudaDivision
from support.fresh_memory import fresh_memory
from support.places import emulated
from torch import Tensor

import rtkernels as rtk
from contracts import test_dynamic_rows
from contracts.samples import samples_of
from contracts.test_dynamic_rows import CALLS, F8, WEIGHT, _inputs
from rtkernels.runtime.operator import registry

PACKAGE = Path(rtk.__file__).parent
ROWS = 6
Call = Callable[[Tensor, Tensor], Any]

HALF = WEIGHT.bfloat16()
MORE: dict[str, Call] = {
    "add_bias": lambda x, ids: rtk.add_bias(x, WEIGHT),
    "cfg_combine": lambda x, ids: rtk.cfg_combine(x, x * 2, x * 3, 0.3),
    "cfg_combine, bf16": lambda x, ids: rtk.cfg_combine(*(x.bfloat16() * f for f in (1, 2, 3)), 0.3),
    "channel_mul": lambda x, ids: rtk.channel_mul(x, WEIGHT),
    "dequantize_mxfp4": lambda x, ids: rtk.dequantize_mxfp4(*rtk.quantize_mxfp4(x.detach()), dtype=torch.float32),
    "dequantize_mxfp8": lambda x, ids: rtk.dequantize_mxfp8(*rtk.quantize_mxfp8(x.detach()), dtype=torch.float32),
    "dequantize_nvfp4": lambda x, ids: rtk.dequantize_nvfp4(
        *rtk.quantize_nvfp4(x.detach(), global_scale=0.003)[:2], 0.003, dtype=torch.float32
    ),
    "dequantize_nvfp4, computed scale": lambda x, ids: rtk.dequantize_nvfp4(*rtk.quantize_nvfp4(x.detach())),
    "divided by rows": lambda x, ids: rtk.cross_entropy(x, ids[:, 0], reduction="mean", label_smoothing=0.1),
    "euler_step": lambda x, ids: rtk.euler_step(x, x * 2, 0.3),
    "euler_step, fp16": lambda x, ids: rtk.euler_step(x.half(), x.half() * 2, 0.3),
    "fp8_weight": lambda x, ids: rtk.fp8_weight(x.detach())[:2],
    "glu, quant": lambda x, ids: rtk.glu(x.detach(), quant=rtk.Quant(F8, 0.013)),
    "glu, nvfp4": lambda x, ids: rtk.glu(x.detach(), quant=rtk.Quant("nvfp4", 0.013)),
    "glu, row": lambda x, ids: rtk.glu(x.detach(), quant=rtk.Quant(F8, granularity="row")),
    "jsd, beta": lambda x, ids: rtk.jsd(x, x.detach() * 0.5, beta=0.3, from_logits=True),
    "kl_div, temperature": lambda x, ids: rtk.kl_div(x, x.detach() * 0.5, from_logits=True),
    "layer_norm, quant": lambda x, ids: rtk.layer_norm(x.detach(), WEIGHT, quant=rtk.Quant(F8, 0.013)),
    "nvfp4_swizzle": lambda x, ids: rtk.nvfp4_swizzle(rtk.quantize_nvfp4(x.detach())[1]),
    "patchify": lambda x, ids: rtk.patchify(x.detach()[:6, :192].reshape(1, 6, 64, 3), 2),
    "quantize_mxfp4, swizzled": lambda x, ids: rtk.quantize_mxfp4(x.detach(), swizzled=True),
    "quantize_mxfp8, swizzled": lambda x, ids: rtk.quantize_mxfp8(x.detach(), swizzled=True),
    "quantize_nvfp4, swizzled": lambda x, ids: rtk.quantize_nvfp4(x.detach(), swizzled=True),
    "quantize_nvfp4, number": lambda x, ids: rtk.quantize_nvfp4(x.detach(), global_scale=0.007),
    "rms_norm, quant": lambda x, ids: rtk.rms_norm(x.detach(), WEIGHT, quant=rtk.Quant(F8, 0.013)),
    "rms_norm, bf16 weight": lambda x, ids: rtk.rms_norm(x.bfloat16(), HALF),
    "rope_table": lambda x, ids: rtk.rope_table(64, 32, device="cpu"),
    "router_z_loss, whole": lambda x, ids: rtk.router_z_loss(x, 1),
    "topk_router, scaled": lambda x, ids: rtk.topk_router(x[:, :8], 2, scale=2.5)[0],
}  # fmt: skip
ALL = {**CALLS, **MORE}


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Torch fills fresh memory in this mode, so it shows as well what is read before it is written."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


STATES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "bfloat16 by default": lambda: _default_dtype(torch.bfloat16),
    "float16 by default": lambda: _default_dtype(torch.float16),
    "float64 by default": lambda: _default_dtype(torch.float64),
    "another default device": lambda: torch.device("meta"),
    "deterministic": _deterministic,
    "inference": torch.inference_mode,
    "without gradients": torch.no_grad,
    "threads": lambda: _threads(3),
}


def _flat(results: Any) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results.detach()]
    if isinstance(results, tuple | list):
        return [t for result in results for t in _flat(result)]
    return []


def _differences(plain: list[Tensor], found: list[Tensor]) -> str:
    if len(plain) != len(found):
        return f"{len(found)} results, {len(plain)} in a plain process"
    for i, (a, b) in enumerate(zip(plain, found, strict=True)):
        if (a.dtype, a.shape, a.stride(), a.device) != (b.dtype, b.shape, b.stride(), b.device):
            return f"result {i} is {b.dtype} {tuple(b.shape)} {b.stride()} {b.device}; {a.dtype} {tuple(a.shape)} {a.stride()} {a.device} in a plain process"  # noqa: E501
        bits = [t.contiguous().flatten().view(torch.uint8) for t in (a, b)] if a.numel() else []
        if bits and not torch.equal(*bits):
            return f"result {i} has {int((bits[0] != bits[1]).sum())} other bytes"
    return ""


def _changed(call: Callable[[], Any]) -> dict[str, str]:
    """Return the states of the process in which a call gives something else, and what."""
    plain, again = _flat(call()), _flat(call())
    found = {"again": _differences(plain, again)}
    for name, state in STATES.items():
        try:
            with state():
                results = call()
            found[name] = _differences(plain, _flat(results))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return {name: text for name, text in found.items() if text}


@pytest.mark.parametrize("name", ALL)
def test_references_do_not_depend_on_the_process(name: str) -> None:
    x, ids = _inputs(ROWS)
    changed = _changed(lambda: ALL[name](x, ids))
    assert not changed


def _cloned(args: Any) -> list[Any]:
    one = {Tensor: lambda a: a.clone(), list: _cloned, tuple: _cloned}
    return [one.get(type(a), lambda a: a)(a) for a in args]


@pytest.mark.parametrize("op", [op.name for op in registry.ops()])
def test_operators_do_not_depend_on_the_process(op: str) -> None:
    for operator, args in samples_of(op, "cpu"):
        kept = _cloned(args)

        def call(operator=operator, kept=kept) -> list[Any]:
            given = _cloned(kept)
            return [operator(*given), given]

        assert not _changed(call), operator.name


@emulated
@pytest.mark.one_in(16)
@pytest.mark.parametrize("name", ALL)
def test_launchers_do_not_depend_on_the_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the emulator, where fresh memory holds three different things, and torch divides as it does on a GPU."""
    x, ids = _inputs(ROWS)
    # All rows belong to an expert: those that do not are not written.
    monkeypatch.setattr(test_dynamic_rows, "COUNTS", torch.tensor([1, 0, 3, 2]))
    with rtk.emulate("sm_90"):
        changed = _changed(lambda: ALL[name](x, ids))
        plain = _flat(ALL[name](x, ids))
        with CudaDivision():
            if text := _differences(plain, _flat(ALL[name](x, ids))):
                changed["divides as CUDA"] = text
        for byte in (0, 0x3C, 0xFF):
            with fresh_memory(byte):
                if text := _differences(plain, _flat(ALL[name](x, ids))):
                    changed[f"memory of {byte:#x}"] = text
    assert not changed


# ---- by reading ------------------------------------------------------------------------------------------------------

FACTORIES = {
    *("tensor", "full", "zeros", "ones", "empty", "arange", "linspace", "logspace", "eye", "rand", "randn", "randint"),
    *("scalar_tensor", "as_tensor", "asarray", "empty_strided", "randperm", "hann_window", "normal", "range"),
}


@pytest.mark.every_op
@pytest.mark.one_in(1000)
def test_factories_say_their_dtype_and_device() -> None:
    """What torch would take from its defaults instead."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or getattr(node.func, "attr", None) not in FACTORIES:
                continue
            if ast.unparse(node.func).partition("torch.")[2] not in FACTORIES:
                continue
            given = {keyword.arg for keyword in node.keywords}
            if None not in given and not given >= {"dtype", "device"}:
                found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "\n".join(["these have no dtype= or device=:", *found])
