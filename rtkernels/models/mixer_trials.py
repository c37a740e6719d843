"""Inputs with which functions of linear layers are compared with ours (``mixers``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rtkernels.models.probe import Trial, normal

_TOLERANCE = 1e-2  # of rows of fp32 gradients of decays, which are differences of larger sums
Function = Callable[..., Any]
Trials = Iterator[tuple[Trial, Function, bool]]  # inputs, the call of a function, with gradients


def _trial(where: str, *shapes: tuple[int, ...], dtypes: tuple[torch.dtype, ...], gradients: bool = True) -> Trial:
    leaves = tuple(normal(*s, seed=i, dtype=d) for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True)))
    return Trial(where, leaves, gradients=gradients, tolerance=_TOLERANCE)


def _convolution_trials() -> Trials:
    for dtype in (torch.float32, torch.bfloat16):
        for taps, bias, act in ((4, True, "silu"), (3, False, None), (2, True, "silu"), (7, True, None)):
            shapes = ((2, 6, 9), (6, taps), *(((6,),) if bias else ()))
            trial = _trial(f"for {taps} taps", *shapes, dtypes=(dtype,) * len(shapes))
            yield trial, lambda f, x, w, b=None, act=act: f(x, w, b, activation=act), True


def _convolution_step_trials() -> Trials:
    for dtype in (torch.float32, torch.bfloat16):
        for taps, columns, act in ((4, 4, "silu"), (3, 2, None)):
            shapes = ((2, 6, 1), (2, 6, columns), (6, taps), (6,))
            trial = _trial("for one token", *shapes, dtypes=(dtype,) * 4, gradients=False)

            def call(f: Function, x: Tensor, state: Tensor, w: Tensor, b: Tensor, act=act) -> tuple[Tensor, Tensor]:
                state = state.clone()
                return f(x, state, w, b, act), state

            yield trial, call, False


def _shares_keys(theirs: Function) -> bool:
    """Return True if a gated delta rule takes fewer heads of keys than of values; models repeat keys for others."""
    state = torch.zeros(1, 4, 8, 8, dtype=torch.float32, device="cpu")
    q, v, numbers = state[:, :1, :2] + 1, state[:, :1, :4] + 1, state[:, :1, :4, 0]
    try:
        theirs(q, q, v, g=numbers, beta=numbers, initial_state=state)
    except (RuntimeError, ValueError):
        return False
    return True


def _delta_trials(theirs: Function, tokens: int, gradients: bool, channels: bool = False) -> Trials:
    key_heads = 4 if channels or not _shares_keys(theirs) else 2
    # Without a state before it, the gradient of the first decay is a rounding of 0.
    for l2norm, dtype, state, grads in (
        (True, torch.bfloat16, True, gradients), (False, torch.float16, True, gradients),
        (True, torch.bfloat16, False, False),
    ):  # fmt: skip
        keys, numbers = (2, tokens, key_heads, 16), (2, tokens, 4)
        decays = (*numbers, 16) if channels else numbers
        shapes = (keys, keys, (2, tokens, 4, 24), decays, numbers, (2, 4, 16, 24))
        dtypes = (dtype, dtype, dtype, torch.float32, torch.float32, torch.float32)
        trial = _trial(f"for {tokens} tokens", *shapes, dtypes=dtypes, gradients=grads)

        def call(f, q, k, v, g, beta, s, l2norm=l2norm, state=state):
            options = {"initial_state": s if state or tokens == 1 else None, "output_final_state": True}
            decay, strength = -torch.nn.functional.softplus(g), beta.sigmoid().to(q.dtype)
            return f(q, k / (1 if l2norm else 8), v, g=decay, beta=strength, use_qk_l2norm_in_kernel=l2norm, **options)

        yield trial, call, grads


def _scan_trials() -> Trials:
    for groups, states, dtype in ((1, 16, torch.bfloat16), (2, 24, torch.float16)):
        tokens, heads, width = 70, 4, 8
        shapes = (
            (2, tokens, heads, width), (2, tokens, heads), (heads,), (2, tokens, groups, states),
            (2, tokens, groups, states), (heads,), (heads,), (2, heads, width, states),
        )  # fmt: skip
        dtypes = (dtype, torch.float32, torch.float32, dtype, dtype, *(torch.float32,) * 3)

        def call(f, x, dt, a, b, c, d, bias, s, groups=groups):
            y, final = f(
                x, dt, -a.abs(), b, c, chunk_size=32, D=d, z=None, return_final_states=True, dt_bias=bias,
                dt_softplus=True, initial_states=s if groups == 1 else None, dt_limit=(0.2, 1.5),
            )  # fmt: skip
            return y.to(x.dtype), final

        yield _trial("for 70 tokens", *shapes, dtypes=dtypes), call, True


def _scan_step_trials() -> Trials:
    for groups, states, gated, dtype in ((1, 16, False, torch.bfloat16), (2, 24, True, torch.float16)):
        heads, width = 4, 8
        shapes = (
            (2, heads, width, states), (2, heads, width), (2, heads, 1), (heads,), (2, groups, states),
            (2, groups, states), (heads,), (heads,), (2, heads, width),
        )  # fmt: skip
        dtypes = (torch.float32, dtype, torch.float32, torch.float32, dtype, dtype, torch.float32, torch.float32, dtype)

        def call(f, s, x, dt, a, b, c, d, bias, z, width=width, gated=gated):
            s, rate = s.clone(), (-a.abs())[:, None, None].expand(-1, width, s.shape[-1])
            d, bias = (t[:, None].expand(-1, width) for t in (d, bias))
            gate = z if gated else None
            y = f(s, x, dt.expand(-1, -1, width), rate, b, c, d, z=gate, dt_bias=bias, dt_softplus=True)
            return y, s

        yield _trial("for one token", *shapes, dtypes=dtypes, gradients=False), call, False


# By name: from a model's own function.
TRIALS: dict[str, Callable[[Function], Trials]] = {
    "causal_conv1d_fn": lambda f: _convolution_trials(),
    "causal_conv1d_update": lambda f: _convolution_step_trials(),
    "torch_chunk_gated_delta_rule": lambda f: _delta_trials(f, 70, True),
    "torch_recurrent_gated_delta_rule": lambda f: _delta_trials(f, 1, False),
    "chunk_kimi_delta_attention": lambda f: _delta_trials(f, 70, True, channels=True),
    "recurrent_kimi_delta_attention": lambda f: _delta_trials(f, 1, False, channels=True),
    "mamba2_chunk_scan": lambda f: _scan_trials(),
    "mamba2_selective_state_update": lambda f: _scan_step_trials(),
}
