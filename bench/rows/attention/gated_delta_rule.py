"""Benchmark rows of ``gated_delta_rule``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.rows.row import Row, by_sequence, gradients_of, in_fp32
from rtkernels.ops.attention import delta_gates
from rtkernels.ops.attention.gated_delta_rule import BACKWARD, gated_delta_rule, gated_delta_rule_step
from rtkernels.ops.attention.gated_delta_rule_reference import forward, step


def host(x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    heads, numbers = x.view(-1, 8, 128), x[:, :8].float()
    state = torch.zeros(heads.shape[0], 8, 128, 128, device=x.device)
    return {
        "gated_delta_rule": lambda: gated_delta_rule(*(heads[None],) * 3, -numbers[None].abs(), numbers[None]),
        "gated_delta_rule_step": lambda: gated_delta_rule_step(heads, heads, heads, -numbers.abs(), numbers, state),
    }


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """The same chunks in plain torch, as transformers' own code has them; differentiable."""
    from rtkernels.ops.attention import gated_delta_rule_reference as reference

    zero = torch.zeros(v.shape[2], q.shape[3], v.shape[3], device=q.device, dtype=in_fp32(q).dtype)
    scale = q.shape[3] ** -0.5
    outs = [reference.one(*(t[b] for t in (q, k, v, g, beta)), zero, scale, True)[0] for b in range(q.shape[0])]
    return torch.stack(outs).to(q.dtype)


def _exact(q, k, v, g, beta):
    return forward(*(t.double() for t in (q, k, v, g, beta)), None, None, q.shape[3] ** -0.5, True, False)[0]


def _by_channel() -> Iterator[Row]:
    """Kimi Linear's: FlashKDA takes 1.003 ms on an H100 with 24 heads (cudnn-frontend#1017)."""
    for batch, length, heads in ((1, 8192, 32), (1, 8192, 24), (8, 4096, 32)):

        def make(device: str, generator: torch.Generator, shape=(batch, length, heads)) -> dict[str, Any]:
            tensors = {name: torch.randn(*shape, 128, device=device, generator=generator).bfloat16() for name in "qkv"}
            g = -0.1 * torch.rand(*shape, 128, device=device, generator=generator)
            return tensors | {"g": g, "beta": torch.rand(*shape, device=device, generator=generator)}

        def make_bwd(device: str, generator: torch.Generator, make=make) -> dict[str, Any]:
            given = make(device, generator)
            dy = torch.randn(given["v"].shape, device=device, generator=generator).to(given["v"].dtype)
            return {"dy": dy, **given}

        shape, values = f"{batch}x{length} {heads} heads of 128", batch * length * heads * 128
        yield Row(
            name="kda_fwd", shape=shape, make=make,
            ours=lambda q, k, v, g, beta: gated_delta_rule(q, k, v, g, beta, l2norm=True), torch=_plain, exact=_exact,
            bytes=12 * values,
        )  # fmt: skip
        yield Row(
            name="kda_bwd", shape=shape, make=make_bwd,
            ours=lambda dy, q, k, v, g, beta: BACKWARD(
                dy, None, q, k, v, g, beta, None, None, q.shape[3] ** -0.5, True, False
            )[:5],
            torch=by_sequence(gradients_of(_plain)), bytes=22 * values,
            no_graph="the graph of plain torch fills the device" if batch > 1 else "",
        )  # fmt: skip


def _raw(rate: torch.Tensor, bias: torch.Tensor) -> dict[str, Any]:
    """The gates of Qwen3-Next."""
    return {"A_log": rate, "dt_bias": bias, "beta_sigmoid": True}


def _plain_gates(g, beta, rate, bias):
    """As models have them."""
    decay = -rate.to(in_fp32(rate).dtype).exp() * torch.nn.functional.softplus(g.to(in_fp32(g).dtype) + bias)
    return decay, beta.sigmoid()


def _raw_gates() -> Iterator[Row]:
    """Qwen3-Next's gates in the rule and its step, and those of Kimi Linear alone: 128 channels a head."""
    tokens, heads, width = 8192, 32, 128

    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        tensors = {
            name: torch.randn(1, tokens, count, width, device=device, generator=generator).bfloat16()
            for name, count in zip("qkv", (16, 16, heads), strict=True)
        }
        g, beta = torch.randn(2, 1, tokens, heads, device=device, generator=generator).bfloat16()
        rate, bias = torch.randn(2, heads, device=device, generator=generator)
        return tensors | {"g": g, "beta": beta, "rate": rate, "bias": bias}

    def plain(q, k, v, g, beta, rate, bias):
        return _plain(q, k, v, *_plain_gates(g, beta, rate, bias))

    yield Row(
        name="gated_delta_rule_fwd", shape="1x8192 16/32 heads of 128, raw gates", make=make,
        ours=lambda q, k, v, g, beta, rate, bias: gated_delta_rule(
            q, k, v, g, beta, l2norm=True, **_raw(rate, bias)
        ),
        torch=plain, bytes=(4 * heads + 4 * 16) * tokens * width + 4 * tokens * heads,
    )  # fmt: skip

    def make_channels(device: str, generator: torch.Generator) -> dict[str, Any]:
        g = torch.randn(1, tokens, heads, width, device=device, generator=generator).bfloat16()
        beta = torch.randn(1, tokens, heads, device=device, generator=generator).bfloat16()
        rate, bias = (torch.randn(*s, device=device, generator=generator) for s in ((heads, 1), (heads, width)))
        return {"g": g, "beta": beta, "rate": rate, "bias": bias}

    def gates(g, beta, rate, bias):
        return delta_gates.gates(g, beta, rate.flatten(), bias, 0.0, True, 1.0)

    def gradients(dy, g, beta, rate, bias):
        needs = (0.0, True, 1.0, True, True, True)
        given = (beta, g.flatten(-2), rate.flatten(), bias)
        return delta_gates.BACKWARD(*given, dy[0].flatten(-2), dy[1], *needs)[0].view(g.shape)

    def make_gradients(device: str, generator: torch.Generator) -> dict[str, Any]:
        numbers = torch.ones(1, tokens, heads, 1 + width, device=device)
        return {"dy": (numbers[..., 1:].contiguous(), numbers[..., 0].contiguous()), **make_channels(device, generator)}

    def plain_gradients(dy, g, beta, rate, bias):
        leaves = [t.detach().requires_grad_() for t in (g, beta, rate, bias)]
        found = _plain_gates(*leaves)
        return torch.autograd.grad(found, leaves, [t.to(y.dtype) for t, y in zip(dy, found, strict=True)])[0]

    values = tokens * heads * width
    yield Row(
        name="delta_gates_fwd", shape="1x8192x32x128", make=make_channels, ours=gates, torch=_plain_gates,
        bytes=6 * values,
    )  # fmt: skip
    yield Row(
        name="delta_gates_bwd", shape="1x8192x32x128",
        make=make_gradients, ours=gradients, torch=plain_gradients, bytes=8 * values,
    )  # fmt: skip

    batch = 128

    def make_step(device: str, generator: torch.Generator) -> dict[str, Any]:
        given = {name: t[0, :batch].contiguous() if t.dim() > 2 else t for name, t in make(device, generator).items()}
        return given | {"state": torch.zeros(batch, heads, width, width, device=device)}

    def plain_step(q, k, v, g, beta, rate, bias, state):
        return state, step(q, k, v, *_plain_gates(g, beta, rate, bias), state, scale=width**-0.5, l2norm=True)

    def exact_step(**given):
        given = {name: t.double() for name, t in given.items()}
        plain_step(**given)
        return plain_step(**given)

    yield Row(
        name="gated_delta_rule_step", shape="128 sequences, 16/32 heads of 128, raw gates", make=make_step,
        ours=lambda q, k, v, g, beta, rate, bias, state: (
            state, gated_delta_rule_step(q, k, v, g, beta, state, l2norm=True, **_raw(rate, bias))
        ),
        torch=plain_step, exact=exact_step, bytes=2 * 4 * batch * heads * width * width,
    )  # fmt: skip


def rows() -> Iterator[Row]:
    sizes = ((1, 8192, 16, 32), (8, 4096, 16, 32), (1, 32768, 16, 64), (1, 32768, 2, 8))  # FlashQLA's
    for batch, length, key_heads, heads in sizes:
        shape = f"{batch}x{length} {key_heads}/{heads} heads of 128"
        tokens = batch * length

        def make(
            device: str, generator: torch.Generator, batch=batch, length=length, counts=(key_heads, key_heads, heads)
        ) -> dict[str, Any]:
            tensors = {
                name: torch.randn(batch, length, count, 128, device=device, generator=generator).bfloat16()
                for name, count in zip("qkv", counts, strict=True)
            }
            g, beta = torch.rand(2, batch, length, counts[2], device=device, generator=generator)
            return tensors | {"g": -0.1 * g, "beta": beta}

        def make_bwd(device: str, generator: torch.Generator, make=make) -> dict[str, Any]:
            given = make(device, generator)
            dy = torch.randn(given["v"].shape, device=device, generator=generator).to(given["v"].dtype)
            return {"dy": dy, **given}

        values, keys, numbers = 2 * tokens * heads * 128, 2 * tokens * key_heads * 128, 4 * tokens * heads
        yield Row(
            name="gated_delta_rule_fwd", shape=shape, make=make,
            ours=lambda q, k, v, g, beta: gated_delta_rule(q, k, v, g, beta, l2norm=True), torch=_plain, exact=_exact,
            bytes=2 * values + 2 * keys + 2 * numbers,
        )  # fmt: skip
        yield Row(
            name="gated_delta_rule_bwd", shape=shape, make=make_bwd,
            ours=lambda dy, q, k, v, g, beta: BACKWARD(
                dy, None, q, k, v, g, beta, None, None, q.shape[3] ** -0.5, True, False
            )[:5],
            torch=gradients_of(_plain), bytes=3 * values + 4 * keys + 4 * numbers,
        )  # fmt: skip

    yield from _by_channel()
    yield from _raw_gates()

    def make_step(device: str, generator: torch.Generator) -> dict[str, Any]:
        tensors = {
            name: torch.randn(128, count, 128, device=device, generator=generator).bfloat16()
            for name, count in zip("qkv", (16, 16, 32), strict=True)
        }
        g, beta = torch.rand(2, 128, 32, device=device, generator=generator)
        return tensors | {"g": -g, "beta": beta, "state": torch.zeros(128, 32, 128, 128, device=device)}

    def plain_step(q, k, v, g, beta, state):
        return state, step(q, k, v, g, beta, state, scale=128**-0.5, l2norm=True)

    def exact_step(q, k, v, g, beta, state):
        """Of the second of two calls: results are compared in memory that the first one has used."""
        given = [t.double() for t in (q, k, v, g, beta, state)]
        plain_step(*given)
        return plain_step(*given)

    yield Row(
        name="gated_delta_rule_step", shape="128 sequences, 16/32 heads of 128", make=make_step,
        ours=lambda q, k, v, g, beta, state: (state, gated_delta_rule_step(q, k, v, g, beta, state, l2norm=True)),
        torch=plain_step, exact=exact_step, bytes=2 * 4 * 128 * 32 * 128 * 128,
    )  # fmt: skip
