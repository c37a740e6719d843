"""Replace what the linear layers of hybrid models call: short convolutions, gated delta rules, the SSD of Mamba-2.

transformers calls them as globals of the modelling file, which are those of fla, causal_conv1d or mamba_ssm where these
are installed. Our forward has the same code and other globals (``rope_view``). A global is replaced if its plain torch
form gives the results and gradients of ours on the CPU. Calls that our ops do not take go to the model's own function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import rtkernels
from rtkernels.models import replace
from rtkernels.models.mixer_trials import TRIALS
from rtkernels.models.probe import NotRecognized, Recognized, difference, positional, probing
from rtkernels.models.rope_view import viewed

_HALVES = (torch.bfloat16, torch.float16)
_FLOATS = (*_HALVES, torch.float32)
_SILU = ("silu", "swish")
_PACKED = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")
Function = Callable[..., Any]


def is_mixer(module: nn.Module) -> bool:
    """Return True if the forward of a module calls one of the functions by a global of its file."""
    return bool(_names(type(module).forward))


def _names(forward: Function) -> list[str]:
    inner = inspect.unwrap(forward)
    code = getattr(inner, "__code__", None)
    return [] if code is None else [name for name in code.co_names if name in _ALL and name in inner.__globals__]


def recognize(module: nn.Module) -> Recognized:
    """Return which functions of a module's forward are replaced.

    Raises:
        NotRecognized: None of them is; the reason is that of the first.
    """
    forward = inspect.unwrap(type(module).forward)
    found, reasons = [], left_alone(module)
    for name in _names(forward):
        if name not in reasons:
            found.append((name, ("ours",)))
    if all(name in _IN_ONE for name, _ in found):
        raise NotRecognized(next(f"{name}: {reason}" for name, reason in reasons.items()))
    return Recognized("mixer", (("names", tuple(found)),))


def left_alone(module: nn.Module) -> dict[str, str]:
    """Return the functions of a module's forward that are not replaced, with the reasons."""
    forward = inspect.unwrap(replace.original_of(type(module)).forward)
    found = {name: _why_not(inspect.unwrap(forward.__globals__[name]), name) for name in _names(forward)}
    return {name: reason for name, reason in found.items() if reason}


@functools.cache
def _why_not(function: Function, name: str) -> str:
    """Return why a function is not replaced, "" if it is."""
    try:
        if name not in _IN_ONE:
            _prove(function, name)
    except NotRecognized as error:
        return str(error)
    return ""


def _mixer(original: type[nn.Module], names: tuple[tuple[str, tuple[str, ...]], ...]) -> Function:
    own = original.forward
    inner = viewed(inspect.unwrap(own), dict(names), _replacement)
    named = positional(inspect.unwrap(own))[1:3]  # the hidden states and the cache

    def forward(self, *args, **kwargs):
        if any("_hf_hook" in child.__dict__ for child in self._modules.values() if child is not None):
            return own(self, *args, **kwargs)  # accelerate moves the weights of children that are not called
        if _is_packed(kwargs) and _is_behind_others(self, dict(zip(named, args, strict=False)) | kwargs, named):
            return own(self, *args, **kwargs)
        return inner(self, *args, **kwargs)

    return forward


def _is_behind_others(module: nn.Module, given: dict[str, Any], named: list[str]) -> bool:
    """Return True if the cache puts rows before those of a call, so that they are not where `cu_seqlens` says.

    These are earlier inputs, or zeros if there are fewer rows than taps.
    """
    x, cache = (given.get(name) for name in named) if len(named) == 2 else (None, None)
    if cache is None or not isinstance(x, Tensor):
        return False
    known = getattr(cache, "has_previous_state", None)
    taps = next((c.kernel_size[0] for c in module._modules.values() if isinstance(c, nn.Conv1d)), 0)
    return not callable(known) or bool(known(module.layer_idx)) or x.shape[1] < taps


replace.register("mixer", _mixer)


def _replacement(original: Function, _: tuple[str, ...]) -> Function:
    name = inspect.unwrap(original).__name__
    return _ALL[name](original)


# ---- replacements ---------------------------------------------------------------------------------------------------


def _starts(kwargs: dict[str, Any], batch: int) -> Tensor | None:
    """Return the starts of packed sequences that a call has, as int32."""
    starts = next((kwargs[n] for n in ("cu_seqlens", "cu_seq_lens_q") if kwargs.get(n) is not None), None)
    if starts is None and isinstance(idx := kwargs.get("seq_idx"), Tensor) and idx.shape[0] == 1:
        ends = torch.nonzero(idx[0, 1:] != idx[0, :-1]).flatten() + 1
        starts = torch.cat((ends.new_zeros(1), ends, ends.new_full((1,), idx.shape[1])))
    return starts.to(torch.int32) if isinstance(starts, Tensor) and batch == 1 else None


def _is_packed(kwargs: dict[str, Any]) -> bool:
    return any(kwargs.get(name) is not None for name in _PACKED)


def _apart(
    starts: Tensor, state: Tensor | None, tensors: tuple[Tensor, ...], call: Function, dim: int = 1
) -> tuple[Tensor, Tensor | None]:
    """Return the result and the final states of the model's own function, called for one packed sequence after another.

    `call` takes the rows of a sequence in `tensors` and its initial state. Plain torch forms ignore or refuse packed
    sequences. The starts are read on the host.
    """
    bounds, out = starts.tolist(), None
    states: list[Tensor | None] = [None if state is None else state[i : i + 1] for i in range(len(bounds) - 1)]
    for i, (first, end) in enumerate(pairwise(bounds)):
        if end <= first:
            continue
        own, states[i] = call(*(t.narrow(dim, first, end - first) for t in tensors), states[i])
        if out is None:
            shape = list(own.shape)
            shape[dim] = tensors[0].shape[dim]
            out = own.new_zeros(shape)
        out.narrow(dim, first, end - first).copy_(own)
    known = next((s for s in states if s is not None), None)
    if out is None:
        return call(*tensors, state)
    return out, known if known is None else torch.cat([torch.zeros_like(known) if s is None else s for s in states])


def _unpacked(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in _PACKED}


def _alike(*tensors: Any, dtypes: tuple[torch.dtype, ...]) -> bool:
    first = tensors[0]
    return all(isinstance(t, Tensor) and t.dtype == first.dtype for t in tensors) and first.dtype in dtypes


def _convolution(original: Function) -> Function:
    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
        fits = (
            _alike(hidden_states, dtypes=_FLOATS)
            and hidden_states.dim() == 3
            and weight.dtype in (hidden_states.dtype, torch.float32)
            and (bias is None or bias.dtype in (hidden_states.dtype, torch.float32))
            and 2 <= weight.shape[-1] <= 8
            and activation in (None, *_SILU)
        )
        starts = _starts(kwargs, hidden_states.shape[0])
        if not fits and starts is not None:
            plain = _unpacked(kwargs)
            found = _apart(
                starts, None, (hidden_states,),
                lambda x, _: (original(x, weight, bias, activation=activation, **plain), None), -1,
            )  # fmt: skip
            return found[0]
        if not fits or (starts is None and _is_packed(kwargs)):
            return original(hidden_states, weight, bias, activation=activation, **kwargs)
        act, x = "silu" if activation else None, hidden_states.transpose(1, 2)
        if starts is None:
            return rtkernels.causal_conv1d(x, weight, bias, activation=act).transpose(1, 2)
        y = rtkernels.causal_conv1d(x[0], weight, bias, activation=act, cu_seqlens=starts)
        return y.t().unsqueeze(0)

    return causal_conv1d_fn


def _convolution_step(original: Function) -> Function:
    def causal_conv1d_update(hidden_states, conv_state, weight, bias=None, activation=None):
        fits = (
            _alike(hidden_states, conv_state, dtypes=_FLOATS)
            and not torch.is_grad_enabled()
            and hidden_states.dim() == 3
            and hidden_states.shape[-1] == 1
            and conv_state.is_contiguous()
            and weight.dtype in (hidden_states.dtype, torch.float32)
            and (bias is None or bias.dtype in (hidden_states.dtype, torch.float32))
            and 2 <= weight.shape[-1] <= 8
            and conv_state.shape[-1] in (weight.shape[-1], weight.shape[-1] - 1)
            and activation in (None, *_SILU)
        )
        if not fits:
            return original(hidden_states, conv_state, weight, bias, activation)
        act = "silu" if activation else None
        y = rtkernels.causal_conv1d_step(hidden_states[..., 0], weight, bias, conv_state, activation=act)
        return y.unsqueeze(-1)

    return causal_conv1d_update


def _delta_rule(original: Function) -> Function:
    def gated_delta_rule(
        query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
        **kwargs,
    ):  # fmt: skip
        starts, packed = _starts(kwargs, query.shape[0]), _is_packed(kwargs)
        fits = (
            _alike(query, key, value, dtypes=_HALVES)
            and query.dim() == 4
            and query.shape[-1] % 8 == value.shape[-1] % 8 == 0
            and query.shape[-1] <= 128
            and value.shape[-1] <= 256
            and value.shape[2] % query.shape[2] == 0
            and (starts is not None or not packed)
        )

        def own(q, k, v, g, beta, state, **more):
            return original(
                q, k, v, g=g, beta=beta, initial_state=state, output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **more,
            )  # fmt: skip

        if not fits and starts is not None:
            call = functools.partial(own, **_unpacked(kwargs))
            return _apart(starts, initial_state, (query, key, value, g, beta), call)
        if not fits:
            return own(query, key, value, g, beta, initial_state, **kwargs)
        tensors = (query, key, value, g, beta)
        if initial_state is not None and query.shape[1] == 1 and not torch.is_grad_enabled() and starts is None:
            state = initial_state.float().clone(memory_format=torch.contiguous_format)  # the caller's does not change
            out = rtkernels.gated_delta_rule_step(*(t[:, 0] for t in tensors), state, l2norm=use_qk_l2norm_in_kernel)
            return out.unsqueeze(1), state if output_final_state else None
        options = {"initial_state": initial_state, "return_state": True, "l2norm": use_qk_l2norm_in_kernel}
        if starts is None:
            out, state = rtkernels.gated_delta_rule(*tensors, **options)
        else:
            out, state = rtkernels.gated_delta_rule(*(t[0] for t in tensors), cu_seqlens=starts, **options)
            out = out.unsqueeze(0)
        return out, state if output_final_state else None

    return gated_delta_rule


def _scan(original: Function) -> Function:
    def mamba2_chunk_scan(
        hidden_states, dt, A, B, C, chunk_size, D=None, dt_bias=None, initial_states=None, dt_softplus=False,
        dt_limit=(0.0, float("inf")), return_final_states=False, z=None, **kwargs,
    ):  # fmt: skip
        starts, packed = _starts(kwargs, hidden_states.shape[0]), _is_packed(kwargs)
        fits = (
            _alike(hidden_states, B, C, dtypes=_HALVES)
            and z is None
            and A.dim() == 1
            and (D is None or D.dim() == 1)
            and hidden_states.shape[-1] % 8 == B.shape[-1] % 8 == 0
            and hidden_states.shape[-1] <= 256
            and B.shape[-1] <= 256
            and (starts is not None or not packed)
        )

        def own(x, dt, B, C, state, z=None, **more):
            return original(
                x, dt, A, B, C, chunk_size=chunk_size, D=D, dt_bias=dt_bias, initial_states=state,
                dt_softplus=dt_softplus, dt_limit=dt_limit, return_final_states=return_final_states, z=z, **more,
            )  # fmt: skip

        if not fits and starts is not None and z is None:
            plain = _unpacked(kwargs)

            def call(*given):
                found = own(*given, **plain)
                return found if return_final_states else (found, None)

            found = _apart(starts, initial_states, (hidden_states, dt, B, C), call)
            return found if return_final_states else found[0]
        if not fits:
            return own(hidden_states, dt, B, C, initial_states, z=z, **kwargs)
        options = {
            "D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": tuple(dt_limit),
            "initial_state": initial_states, "return_state": return_final_states, "cu_seqlens": starts,
        }  # fmt: skip
        if starts is None:
            return rtkernels.ssd(hidden_states, dt, A, B, C, **options)
        found = rtkernels.ssd(hidden_states[0], dt[0], A, B[0], C[0], **options)
        return (found[0].unsqueeze(0), found[1]) if return_final_states else found.unsqueeze(0)

    return mamba2_chunk_scan


def _is_expanded(t: Tensor | None, dims: int, own: int) -> bool:
    """Return True if only the first `own` dimensions of a tensor differ."""
    if t is None:
        return True
    return t.dim() == dims and all(n == 1 or s == 0 for n, s in zip(t.shape[own:], t.stride()[own:], strict=True))


def _scan_step(original: Function) -> Function:
    def mamba2_selective_state_update(
        state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None, **kwargs
    ):
        fits = (
            _alike(hidden_states, B, C, *(() if z is None else (z,)), dtypes=_HALVES)
            and state.dtype == torch.float32
            and state.is_contiguous()
            and not torch.is_grad_enabled()
            and (z is None or z.shape == hidden_states.shape)
            and hidden_states.dim() == 3
            and _is_expanded(dt, 3, 2)
            and _is_expanded(A, 3, 1)
            and _is_expanded(D, 2, 1)
            and _is_expanded(dt_bias, 2, 1)
            and hidden_states.shape[-1] % 8 == B.shape[-1] % 8 == 0
            and B.shape[-1] <= 256
        )
        if not fits:
            return original(
                state, hidden_states, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, **kwargs
            )
        factors = {"D": None if D is None else D[:, 0], "dt_bias": None if dt_bias is None else dt_bias[:, 0]}
        out = rtkernels.ssd_step(hidden_states, dt[..., 0], A[:, 0, 0], B, C, state, dt_softplus=dt_softplus, **factors)
        return out if z is None else rtkernels.glu(z, out)

    return mamba2_selective_state_update


def _in_parts(original: Function) -> Function:
    def mamba2_split_conv1d_scan_combined(*args, **kwargs):
        return None  # the forward calls the parts instead

    return mamba2_split_conv1d_scan_combined


_IN_ONE = ("mamba2_split_conv1d_scan_combined",)
_ALL: dict[str, Callable[[Function], Function]] = {
    "causal_conv1d_fn": _convolution,
    "causal_conv1d_update": _convolution_step,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "mamba2_chunk_scan": _scan,
    "mamba2_selective_state_update": _scan_step,
    "mamba2_split_conv1d_scan_combined": _in_parts,
    "chunk_kimi_delta_attention": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
}


@probing()
def _prove(theirs: Function, name: str) -> None:
    """Compare a function with its replacement.

    Raises:
        NotRecognized: They differ.
    """

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a call that ours does not take")

    ours = _ALL[name](refuse)
    for trial, call, gradients in TRIALS[name](theirs):
        with torch.set_grad_enabled(gradients):
            found = difference(lambda *a, c=call: c(ours, *a), lambda *a, c=call: c(theirs, *a), trial)
        if found:
            raise NotRecognized(f"it computes something else than ours: {found}")
