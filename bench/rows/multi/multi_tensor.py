"""Benchmark rows of the multi-tensor ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row

_BETAS, _EPS, _DECAY, _RATE = (0.9, 0.95), 1e-8, 0.1, 1e-3
_ADAMW_TENSORS, _ADAMW_SIZE = 500, 2_000_000


def _normal(sizes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32):
    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        return {"tensors": [torch.randn(s, generator=generator, device=device, dtype=dtype) for s in sizes]}

    return make


def _zeros(device: str, generator: torch.Generator) -> dict[str, Any]:
    def one() -> Tensor:
        x = torch.randn(4096, 4096, generator=generator, device=device)
        return x.to(torch.float8_e4m3fn).float()  # about 0.1 percent zeros

    return {"tensors": [one() for _ in range(32)]}


def _norm(tensors: list[Tensor]) -> Tensor:
    import rtkernels

    return rtkernels.multi_norm(tensors)


def _foreach_norm(tensors: list[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))


def _exact_norm(tensors: list[Tensor]) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(t, dtype=torch.float64).square() for t in tensors]).sum().sqrt()


def _count(tensors: list[Tensor]) -> Tensor:
    import rtkernels

    return rtkernels.multi_count_zeros(tensors)


def _torch_count(tensors: list[Tensor]) -> Tensor:
    return torch.stack([(t == 0).sum() for t in tensors]).sum()


_LARGE = 1e9  # nothing needs clipping: repeated calls find the same data, and only torch writes it


def _clip(tensors: list[Tensor]) -> Tensor:
    import rtkernels

    return rtkernels.multi_clip_norm_(tensors, _LARGE)


def _torch_clip(tensors: list[Tensor]) -> Tensor:
    norm = _foreach_norm(tensors)
    torch._foreach_mul_(tensors, (_LARGE / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _scale(tensors: list[Tensor]) -> Tensor:
    import rtkernels

    rtkernels.multi_scale_(tensors, -1.0)
    return torch.ones(1)


def _torch_scale(tensors: list[Tensor]) -> Tensor:
    torch._foreach_mul_(tensors, -1.0)
    return torch.ones(1)


def _adamw_inputs(low: bool):
    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        sizes = [(_ADAMW_SIZE,)] * _ADAMW_TENSORS

        def some(scale: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
            return [torch.randn(s, generator=generator, device=device, dtype=dtype).mul_(scale) for s in sizes]

        weights = some(0.02)
        return {
            "weights": weights,
            "grads": some(1e-3, torch.bfloat16 if low else torch.float32),
            "exp_avgs": some(1e-4),
            "exp_avg_sqs": [t.square_() for t in some(1e-3)],
            "steps": [torch.full((), 10.0, device=device) for _ in sizes],
            "copies": [t.bfloat16() for t in weights] if low else [],
        }

    return make


def _adamw(**lists: Any) -> None:
    from rtkernels.ops.multi import multi_adamw

    multi_adamw.STEP(*lists.values(), None, None, None, _RATE, *_BETAS, _EPS, _DECAY, False)


def _fused_adamw(weights, grads, exp_avgs, exp_avg_sqs, steps, copies) -> None:
    if copies:
        grads = [g.float() for g in grads]
    torch._foreach_add_(steps, 1.0)
    torch._fused_adamw_(
        weights, grads, exp_avgs, exp_avg_sqs, [], steps, lr=_RATE, beta1=_BETAS[0], beta2=_BETAS[1],
        weight_decay=_DECAY, eps=_EPS, amsgrad=False, maximize=False,
    )  # fmt: skip
    if copies:
        torch._foreach_copy_(copies, weights)


def _foreach_adamw(weights, grads, exp_avgs, exp_avg_sqs, steps, copies) -> None:
    if copies:
        grads = [g.float() for g in grads]
    torch._foreach_add_(steps, 1.0)
    torch._foreach_mul_(weights, 1 - _RATE * _DECAY)
    torch._foreach_lerp_(exp_avgs, grads, 1 - _BETAS[0])
    torch._foreach_mul_(exp_avg_sqs, _BETAS[1])
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - _BETAS[1])
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, (1 - _BETAS[1] ** 11) ** 0.5)
    torch._foreach_add_(denominators, _EPS)
    torch._foreach_addcdiv_(weights, exp_avgs, denominators, -_RATE / (1 - _BETAS[0] ** 11))
    if copies:
        torch._foreach_copy_(copies, weights)


def _codes_inputs(kind: str):
    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        from rtkernels.ops.multi import dynamic_codes

        size = (_ADAMW_SIZE,)
        one = torch.randn(size, generator=generator, device=device)
        first, scale1 = dynamic_codes.encode(one * 1e-4, kind, True)
        second, scale2 = dynamic_codes.encode((one * 1e-3).square(), kind, False)

        def many(t: Tensor) -> list[Tensor]:
            return [t.clone() for _ in range(_ADAMW_TENSORS)]

        return {
            "weights": many((one * 0.02).bfloat16()),
            "grads": many((one * 1e-3).bfloat16()),
            "exp_avgs": many(first),
            "exp_avg_sqs": many(second),
            "steps": many(torch.full((), 10.0, device=device)),
            "origins": [torch.tensor([i, 0], device=device) for i in range(_ADAMW_TENSORS)],
            "scales1": many(scale1),
            "scales2": many(scale2),
        }

    return make


def _adamw_codes(**lists: Any) -> None:
    from rtkernels.ops.multi import multi_adamw_codes

    numbers = (_RATE, *_BETAS, _EPS, _DECAY, False, 0, True)
    multi_adamw_codes.STEP(*lists.values(), [], None, None, None, *numbers)


def _lion_inputs(low: bool):
    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        given = _adamw_inputs(low)(device, generator)
        kept = {name: given[name] for name in ("weights", "grads", "exp_avgs", "steps", "copies")}
        return kept | {"origins": [torch.tensor([i, 0], device=device) for i in range(_ADAMW_TENSORS)]}

    return make


def _lion(weights, grads, exp_avgs, steps, copies, origins) -> None:
    from rtkernels.ops.multi import multi_lion

    numbers = (_RATE, 0.9, 0.99, _DECAY, False, 0, False)
    multi_lion.STEP(weights, grads, exp_avgs, origins, steps, [], copies, None, None, None, *numbers)


def _foreach_lion(weights, grads, exp_avgs, steps, copies, origins) -> None:
    if copies:
        grads = [g.float() for g in grads]
    torch._foreach_add_(steps, 1.0)
    torch._foreach_mul_(weights, 1 - _RATE * _DECAY)
    signs = torch._foreach_sign(torch._foreach_lerp(exp_avgs, grads, 1 - 0.9))
    torch._foreach_add_(weights, signs, alpha=-_RATE)
    torch._foreach_lerp_(exp_avgs, grads, 1 - 0.99)
    if copies:
        torch._foreach_copy_(copies, weights)


def _bf16_adamw(weights, grads, exp_avgs, exp_avg_sqs, steps, **_: Any) -> None:
    """torch's fused step with bfloat16 moments of its own: 14 bytes per parameter instead of 10 or 8."""
    if exp_avgs[0].shape == weights[0].shape:
        firsts, seconds = ([t.bfloat16() for t in moments] for moments in (exp_avgs, exp_avg_sqs))
    else:  # two codes in a byte
        firsts, seconds = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    torch._fused_adamw_(
        weights, grads, firsts, seconds, [], steps, lr=_RATE, beta1=_BETAS[0], beta2=_BETAS[1], weight_decay=_DECAY,
        eps=_EPS, amsgrad=False, maximize=False,
    )  # fmt: skip


def _stepping(function):
    """Return a step as a row: every call changes its inputs, so there is no result to compare."""

    def call(**lists: Any) -> Tensor:
        function(**lists)
        return torch.ones(1)

    return call


def rows() -> Iterator[Row]:
    """Yield the rows."""
    norm_rows = (
        ("batch_grad_norm", "32x4096x8192", [(4096, 8192)] * 32),
        ("grad_norm", "512x1048576", [(1024, 1024)] * 512),
        ("grad_norm", "5000x4096", [(4096,)] * 5000),
    )
    for name, shape, sizes in norm_rows:
        elements = sum(torch.Size(s).numel() for s in sizes)
        yield Row(name, shape, _normal(sizes), _norm, _foreach_norm, 4 * elements, exact=_exact_norm)
    yield Row(
        "batch_count_zero", "32x4096x4096", _zeros, _count, _torch_count, 4 * 32 * 4096 * 4096, exact=_torch_count
    )
    many, elements = _normal([(1024, 1024)] * 512), 512 * 1024 * 1024
    yield Row("clip_grad_norm", "512x1048576", many, _clip, _torch_clip, 4 * elements, exact=_exact_norm)
    yield Row(
        "multi_scale", "512x1048576", many, _scale, _torch_scale, 8 * elements, exact=lambda tensors: torch.ones(1)
    )
    for name, low in (("adamw_master", True), ("adamw_fp32", False)):
        yield Row(
            name,
            f"{_ADAMW_TENSORS}x{_ADAMW_SIZE}",
            _adamw_inputs(low),
            _stepping(_adamw),
            _stepping(_foreach_adamw),
            28 * _ADAMW_TENSORS * _ADAMW_SIZE,
            exact=lambda **lists: torch.ones(1),
            fused=_stepping(_fused_adamw),
        )
    for name, low in (("lion_master", True), ("lion_fp32", False)):
        yield Row(
            name,
            f"{_ADAMW_TENSORS}x{_ADAMW_SIZE}",
            _lion_inputs(low),
            _stepping(_lion),
            _stepping(_foreach_lion),
            20 * _ADAMW_TENSORS * _ADAMW_SIZE,
            exact=lambda **lists: torch.ones(1),
        )
    for name, kind, size in (("adamw_8bit", "8bit", 10), ("adamw_fp8", "fp8", 10), ("adamw_4bit", "4bit", 8)):
        yield Row(
            name,
            f"{_ADAMW_TENSORS}x{_ADAMW_SIZE}",
            _codes_inputs(kind),
            _stepping(_adamw_codes),
            _stepping(_bf16_adamw),
            size * _ADAMW_TENSORS * _ADAMW_SIZE,
            exact=lambda **lists: torch.ones(1),
        )
