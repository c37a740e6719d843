"""Losses of a router: z-loss and load balancing over a batch or over sequences, and their backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd.function import once_differentiable

from rtkernels import interop
from rtkernels._guard import constant, is_dynamo_compiling, needs_grad
from rtkernels._kernel import Kernel, Plans, device_info
from rtkernels._layout import GRID_LIMIT, address, check_same, metadata, row_count, row_stride, rowed, vector_bytes
from rtkernels._registry import Op, TorchOp
from rtkernels.errors import ArgumentError
from rtkernels.ops._moe_layout import MAX_EXPERTS
from rtkernels.ops._router_rows import KIND, check_rows, zeroed_scratch
from rtkernels.testing.rows import Row

_Z, _SOFTMAX, _SIGMOID, _PLAIN = range(4)  # which loss; of load balancing, what the scores are
_SCORES = {"softmax": _SOFTMAX, "sigmoid": _SIGMOID, None: _PLAIN}
_UNIT, _PIECE, _WARPS, _BLOCKS_PER_SM = "router/losses.cu", 4, 8, 5
_DIMS = "rows:i64 experts:i64 x_stride:i64 inner:i64 interleaved:i64 number_kind:i64"

_FWD = Kernel(
    _UNIT,
    "router_loss_fwd",
    template="PIECE",
    args=f"x:ptr counts:ptr partial:ptr loss:ptr scratch:ptr {_DIMS} whole:i64 loss_kind:i64 factor:f64",
    variants=[(_PIECE,)],
    max_registers=64,
)
_BWD = Kernel(
    _UNIT,
    "router_loss_bwd",
    template="PIECE",
    args=f"g:ptr x:ptr counts:ptr dx:ptr {_DIMS} whole_in:i64 whole_out:i64 loss_kind:i64 factor:f64",
    variants=[(_PIECE,)],
    max_registers=64,
)
_COUNTS = Kernel(
    _UNIT,
    "router_counts",
    template="I",
    args="indices:ptr counts:ptr length:i64 top_k:i64 experts:i64 first_step:i64 row_step:i64",
    variants=[("i32",), ("i64",)],
    max_registers=40,
)


# ---- launchers ------------------------------------------------------------------------------------------------------


def _check(x: tuple[Any, ...], counts: tuple[Any, ...] | None, inner: int, interleaved: bool) -> None:
    check_rows("logits", x, MAX_EXPERTS, "experts")
    if counts is None:
        return
    rows, experts = row_count(x[1]), x[1][-1]
    if counts[0] != torch.int32:
        raise ArgumentError(f"counts has dtype {str(counts[0])[6:]}; expected int32")
    if inner < 0 or (inner and rows % inner):
        raise ArgumentError(f"inner is {inner}; expected 0 or a divisor of the {rows} rows")
    sequences = 1 if inner == 0 else inner if interleaved else rows // inner
    wanted = (experts,) if inner == 0 else (sequences, experts)
    if tuple(counts[1]) != wanted:
        raise ArgumentError(f"counts has shape {tuple(counts[1])}; expected {wanted}")
    check_same("counts", counts[3], x[3], "device index", of="logits")


def _plan(x, counts, align: int, out_align: int | None, inner: int, interleaved: bool):
    _check(x, counts, inner, interleaved)
    dtype, shape, stride, device = x
    rows, experts, size = row_count(shape), shape[-1], dtype.itemsize
    if rows == 0:
        return None, 0, ()
    piece, step = _PIECE * size, row_stride(shape, stride)
    whole = [int(vector_bytes(align, step * size, experts * size, most=piece) == piece)]
    if out_align is None:
        most = _WARPS * _BLOCKS_PER_SM * device_info(device).sm_count
        rounds = -(-rows // most)
        grid = -(-rows // (_WARPS * rounds))
        launch = _FWD.bind((_PIECE,), device, grid, 32 * _WARPS)
    else:
        grid = min(-(-rows // _WARPS), GRID_LIMIT)
        launch = _BWD.bind((_PIECE,), device, grid, 32 * _WARPS)
        whole.append(int(vector_bytes(out_align, experts * size, most=piece) == piece))
    return launch, grid, (rows, experts, step, inner, int(interleaved), KIND[dtype], *whole)


_PLANS = Plans(_plan)


def _launch_fwd(x, counts, kind, inner, interleaved, factor):
    if x.dim():
        x = rowed(x)
    counts = None if counts is None else counts.contiguous()
    x_address = x.data_ptr()
    launch, grid, numbers = _PLANS[metadata(x), metadata(counts), x_address & 15, None, inner, interleaved]
    if launch is None:
        return torch.zeros((), device=x.device)
    loss = torch.empty((), dtype=torch.float32, device=x.device)
    partial = torch.empty(grid, dtype=torch.float32, device=x.device)
    scratch = zeroed_scratch(x.get_device())
    pointers = x_address, address(counts), partial.data_ptr(), loss.data_ptr(), scratch.data_ptr()
    launch(*pointers, *numbers, kind, factor)
    return loss


def _launch_bwd(g, x, counts, kind, inner, interleaved, factor):
    _check_g(g)
    if x.dim():
        x = rowed(x)
    counts = None if counts is None else counts.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x_address, out = x.data_ptr(), dx.data_ptr()
    launch, _, numbers = _PLANS[metadata(x), metadata(counts), x_address & 15, out & 15, inner, interleaved]
    if launch is not None:
        launch(g.data_ptr(), x_address, address(counts), out, *numbers, kind, factor)
    return dx


def _check_g(g: Tensor) -> None:
    if g.dtype != torch.float32 or g.numel() != 1:
        raise ArgumentError(f"g has dtype {str(g.dtype)[6:]} and shape {tuple(g.shape)}; expected one float32 number")


def _check_indices(indices: Tensor, experts: int, inner: int) -> None:
    if indices.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"indices has dtype {str(indices.dtype)[6:]}; expected one of int32, int64")
    if not indices.dim():
        raise ArgumentError("indices has no dimensions; expected at least one")
    if not 1 <= experts <= MAX_EXPERTS:
        raise ArgumentError(f"experts is {experts}; expected 1 to {MAX_EXPERTS}")
    if inner < 0 or (inner and row_count(indices.shape) % inner):
        raise ArgumentError(f"inner is {inner}; expected 0 or a divisor of the {row_count(indices.shape)} rows")


def _split(rows: int, inner: int, interleaved: bool) -> tuple[int, int, int, int]:
    """Return the number of sequences, their length, the rows from one to the next, and from row to row in one."""
    if inner == 0:
        return 1, rows, rows, 1
    return (inner, rows // inner, 1, inner) if interleaved else (rows // inner, inner, inner, 1)


def _plan_counts(device: int, wide: bool, sequences: int, experts: int):
    return _COUNTS.bind(("i64" if wide else "i32",), device, sequences, 1024 if device >= 0 else 64, 4 * experts)


_COUNTS_PLANS = Plans(_plan_counts)


def _launch_counts(indices, experts, inner, interleaved):
    _check_indices(indices, experts, inner)
    indices = indices.contiguous()
    sequences, length, first_step, row_step = _split(row_count(indices.shape), inner, interleaved)
    shape = (experts,) if inner == 0 else (sequences, experts)
    counts = torch.empty(shape, dtype=torch.int32, device=indices.device)
    if counts.numel() == 0 or indices.numel() == 0:
        return counts.zero_()
    launch = _COUNTS_PLANS[indices.get_device(), indices.dtype == torch.int64, sequences, experts]
    launch(indices.data_ptr(), counts.data_ptr(), length, indices.shape[-1], experts, first_step, row_step)
    return counts


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _of_rows(counts: Tensor, rows: int, inner: int, interleaved: bool) -> Tensor:
    """Return the counts each row is weighed with."""
    if inner == 0:
        return counts.float()
    return counts.float().repeat(rows // inner, 1) if interleaved else counts.float().repeat_interleave(inner, 0)


def _plain_scores(x: Tensor, kind: int) -> Tensor:
    if kind == _SOFTMAX:
        return torch.softmax(x, -1)
    s = torch.sigmoid(x)
    return s / s.sum(-1, keepdim=True)


def _reference_fwd(x, counts, kind, inner, interleaved, factor):
    _check(metadata(x), metadata(counts), inner, interleaved)
    wide = x.float().reshape(-1, x.shape[-1])
    if kind == _Z:
        return torch.logsumexp(wide, -1).square().sum() * factor
    s = wide if kind == _PLAIN else _plain_scores(wide, kind)
    return (s * _of_rows(counts, len(wide), inner, interleaved)).sum() * factor


def _reference_bwd(g, x, counts, kind, inner, interleaved, factor):
    _check(metadata(x), metadata(counts), inner, interleaved)
    _check_g(g)
    wide = x.float().reshape(-1, x.shape[-1])
    scale = g.reshape(()) * factor
    if kind == _Z:
        dx = 2 * scale * torch.logsumexp(wide, -1, keepdim=True) * torch.softmax(wide, -1)
    else:
        weights = _of_rows(counts, len(wide), inner, interleaved)
        if kind == _PLAIN:
            dx = (scale * weights).expand_as(wide)
        else:
            s = _plain_scores(wide, kind)
            dx = scale * s * (weights - (s * weights).sum(-1, keepdim=True))
            if kind == _SIGMOID:
                dx = dx * (1 - torch.sigmoid(wide))
    return dx.reshape(x.shape).to(x.dtype).contiguous()


def _reference_counts(indices, experts, inner, interleaved):
    _check_indices(indices, experts, inner)
    rows = row_count(indices.shape)
    sequences, length, _, _ = _split(rows, inner, interleaved)
    flat = indices.reshape(rows, -1).long()
    place = torch.arange(rows, device=indices.device)
    sequence = torch.zeros_like(place) if inner == 0 else place % inner if interleaved else place // inner
    valid = (flat >= 0) & (flat < experts)
    key = torch.where(valid, sequence[:, None] * experts + flat, sequences * experts).reshape(-1)
    counts = torch.zeros(sequences * experts + 1, dtype=torch.int32, device=indices.device)
    counts = counts.scatter_add(0, key, torch.ones_like(key, dtype=torch.int32))[:-1]
    return counts.view((experts,) if inner == 0 else (sequences, experts)).clone()


def _fake_fwd(x, counts, kind, inner, interleaved, factor):
    return x.new_empty((), dtype=torch.float32)


def _fake_bwd(g, x, counts, kind, inner, interleaved, factor):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_counts(indices, experts, inner, interleaved):
    rows = indices.numel() // indices.shape[-1] if inner else 0
    sequences = 0 if inner == 0 else inner if interleaved else rows // inner
    return indices.new_empty((experts,) if inner == 0 else (sequences, experts), dtype=torch.int32)


FORWARD = TorchOp(
    "router_loss_fwd(Tensor x, Tensor? counts, int kind, int inner, bool interleaved, float factor) -> Tensor",
    launch=_launch_fwd,
    reference=_reference_fwd,
    fake=_fake_fwd,
)
BACKWARD = TorchOp(
    "router_loss_bwd(Tensor g, Tensor x, Tensor? counts, int kind, int inner, bool interleaved, float factor) -> Tensor",
    launch=_launch_bwd,
    reference=_reference_bwd,
    fake=_fake_bwd,
)
COUNTS = TorchOp(
    "router_counts(Tensor indices, int experts, int inner, bool interleaved) -> Tensor",
    launch=_launch_counts,
    reference=_reference_counts,
    fake=_fake_counts,
)


# ---- public ---------------------------------------------------------------------------------------------------------


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, counts, kind, inner, interleaved, factor):
        ctx.save_for_backward(x, counts)
        ctx.options = kind, inner, interleaved, factor
        return FORWARD(x, counts, kind, inner, interleaved, factor)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, counts = ctx.saved_tensors
        return BACKWARD(g, x, counts, *ctx.options), None, None, None, None, None


def _loss(x: Tensor, counts: Tensor | None, kind: int, inner: int, interleaved: bool, factor: float) -> Tensor:
    if is_grad_enabled() and needs_grad(x):
        if is_dynamo_compiling():
            factor = constant(factor)
        return _Loss.apply(x, counts, kind, inner, interleaved, factor)
    return FORWARD(x, counts, kind, inner, interleaved, factor)


def router_z_loss(logits: Tensor, coefficient: float = 1.0) -> Tensor:
    """Return ``coefficient * mean over tokens of logsumexp(logits)^2``, which keeps router logits small.

    fp32 arithmetic, sums in a fixed order. Differentiable once.

    Args:
        logits: ``[..., experts]``, 1 to 4096 experts; bfloat16, float16 or float32, any strides (a copy is made unless
            rows are unit-stride and evenly spaced). May be any object with ``__dlpack__``; the result is of its kind.
        coefficient: Factor of the loss.

    Returns:
        float32, no dimensions; 0 without tokens.
    """
    if not isinstance(logits, Tensor):
        return interop.call(router_z_loss, logits, coefficient)
    tokens = logits.shape[:-1].numel() if logits.dim() else 1
    return _loss(logits, None, _Z, 0, False, coefficient / max(tokens, 1))


def load_balancing_loss(
    logits: Tensor,
    indices: Tensor | None = None,
    *,
    counts: Tensor | None = None,
    k: int | None = None,
    score: str | None = "softmax",
    coefficient: float = 1.0,
    sequence_dim: int | None = None,
) -> Tensor:
    """Return the auxiliary loss that spreads tokens over experts: ``coefficient * experts * sum over e of f_e P_e``.

    f_e is the fraction of all choices that went to expert e, P_e the mean score of e over the tokens (Switch
    Transformer, Megatron's ``aux_loss``). With `sequence_dim`, f and P are those of each sequence, and the result is
    the mean over the sequences (DeepSeek's sequence-wise loss, Megatron's ``seq_aux_loss``). fp32 arithmetic, sums in
    a fixed order. Differentiable once in the logits; the counts are constants.

    Args:
        logits: ``[..., experts]``, 1 to 4096 experts; bfloat16, float16 or float32, any strides (a copy is made unless
            rows are unit-stride and evenly spaced). May be any object with ``__dlpack__``; the result is of its kind.
        indices: ``[..., k]`` int32 or int64, the chosen experts of each token; others than 0 to experts - 1 (dropped
            choices) are not counted. Not needed where `counts` is given.
        counts: int32, how many tokens chose each expert: ``[experts]``, or ``[sequences, experts]`` with
            `sequence_dim`.
        k: Choices per token; the last size of `indices` if None, and needed without them.
        score: ``"softmax"``, ``"sigmoid"`` (sigmoids divided by their sum over all experts, as in DeepSeek-V3), or None
            where `logits` are scores already.
        coefficient: Factor of the loss.
        sequence_dim: None for a loss over the whole batch. Else logits are ``[a, b, experts]`` and this is the dimension
            of the tokens of a sequence: 1 for batch first, 0 for sequence first.

    Returns:
        float32, no dimensions; 0 without tokens.
    """
    if not isinstance(logits, Tensor):
        return interop.call(
            load_balancing_loss, logits, indices, counts=counts, k=k, score=score, coefficient=coefficient,
            sequence_dim=sequence_dim,
        )  # fmt: skip
    if score not in _SCORES:
        raise ArgumentError(f"score is {score!r}; expected 'softmax', 'sigmoid' or None")
    if not logits.dim():
        raise ArgumentError("logits has no dimensions; expected at least one")
    tokens, experts, inner, interleaved = logits.shape[:-1].numel(), logits.shape[-1], 0, False
    length = tokens
    if sequence_dim is not None:
        if logits.dim() != 3 or sequence_dim not in (0, 1):
            raise ArgumentError(
                f"sequence_dim is {sequence_dim} for logits of shape {tuple(logits.shape)}; expected 0 or 1, and three "
                f"dimensions"
            )
        inner, interleaved, length = logits.shape[1], sequence_dim == 0, logits.shape[sequence_dim]
    if k is None:
        if indices is None:
            raise ArgumentError("k is None; expected a number where no indices are given")
        k = indices.shape[-1] if indices.dim() else 1
    if k < 1:
        raise ArgumentError(f"k is {k}; expected at least 1")
    if tokens == 0:
        return logits.new_zeros((), dtype=torch.float32) + logits.sum().float() * 0
    if counts is None:
        if indices is None:
            raise ArgumentError("indices and counts are None; expected one of them")
        check_same("indices", indices.shape[:-1], logits.shape[:-1], "leading shape", of="logits")
        counts = COUNTS(indices, experts, inner, interleaved)
    factor = coefficient * experts / (k * length * tokens)
    return _loss(logits, counts, _SCORES[score], inner, interleaved, factor)


# ---- registry -------------------------------------------------------------------------------------------------------


def _samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(4, 6, 16, generator=g, device=device)
    indices = torch.topk(x, 3).indices
    one = torch.ones((), device=device)
    counts = _reference_counts(indices, 16, 6, False)
    yield COUNTS, (indices, 16, 6, False)
    yield COUNTS, (indices.int(), 16, 0, False)
    yield FORWARD, (x, None, _Z, 0, False, 0.1)
    yield FORWARD, (x.bfloat16(), counts, _SIGMOID, 6, False, 0.1)
    yield BACKWARD, (one, x, None, _Z, 0, False, 0.1)
    yield BACKWARD, (one, x.half(), counts, _SOFTMAX, 6, False, 0.1)


def _rows() -> Iterator[Row]:
    tokens, experts, k = 8192, 256, 8
    n = tokens * experts * 4

    def make(device: str, generator: torch.Generator, *, counted: bool, backward: bool) -> dict[str, Any]:
        logits = torch.randn(tokens, experts, device=device, generator=generator)
        inputs: dict[str, Any] = {"dy": torch.ones((), device=device)} if backward else {}
        inputs["logits"] = logits
        if counted:
            inputs["counts"] = torch.full((experts,), tokens * k // experts, dtype=torch.int32, device=device)
        return inputs

    def z_loss(logits: Tensor) -> Tensor:
        return torch.logsumexp(logits, -1).square().mean()

    def balance(logits: Tensor, counts: Tensor) -> Tensor:
        return experts / (k * tokens) * (torch.softmax(logits, -1).mean(0) * counts).sum()

    def z_loss_bwd(dy: Tensor, logits: Tensor) -> Tensor:
        return dy * 2 / tokens * torch.logsumexp(logits, -1, keepdim=True) * torch.softmax(logits, -1)

    def balance_bwd(dy: Tensor, logits: Tensor, counts: Tensor) -> Tensor:
        s = torch.softmax(logits, -1)
        return dy * factor * s * (counts - (s * counts).sum(-1, keepdim=True))

    factor = experts / (k * tokens * tokens)
    shape = f"{tokens}x{experts}"
    for name, counted, kind, scale, forward, backward in (
        ("z_loss", False, _Z, 1 / tokens, z_loss, z_loss_bwd),
        ("balance_loss", True, _SOFTMAX, factor, balance, balance_bwd),
    ):
        yield Row(
            name=f"{name}_fwd",
            shape=shape,
            make=lambda device, g, counted=counted: make(device, g, counted=counted, backward=False),
            ours=lambda logits, counts=None, kind=kind, scale=scale: FORWARD(logits, counts, kind, 0, False, scale),
            torch=forward,
            bytes=n + 4,
        )
        yield Row(
            name=f"{name}_bwd",
            shape=shape,
            make=lambda device, g, counted=counted: make(device, g, counted=counted, backward=True),
            ours=lambda dy, logits, counts=None, kind=kind, scale=scale: BACKWARD(
                dy, logits, counts, kind, 0, False, scale
            ),
            torch=backward,
            bytes=2 * n,
        )


OP = Op(
    "router_loss",
    public=("router_z_loss", "load_balancing_loss"),
    kernels=(_FWD, _BWD, _COUNTS),
    torch_ops=(FORWARD, BACKWARD, COUNTS),
    samples=_samples,
    rows=_rows,
)
