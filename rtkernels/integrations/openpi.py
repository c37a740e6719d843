"""openpi's training in JAX with fp8 products: its LoRA ``Einsum`` and ``FeedForward``, and returns-to-go of episodes.

    import openpi.models.lora as lora
    from rtkernels.integrations import openpi
    openpi.patch(lora)               # before the model is created; openpi.unpatch(lora) takes it back

The products with the large weights run in fp8 (a scale for each row of the activations and each column of the weight);
their gradients, and the adapters with theirs, stay in the activations' dtype. Weights keep their names, shapes and
dtypes, so checkpoints do not change.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from torch import Tensor

import rtkernels
from rtkernels.errors import ArgumentError
from rtkernels.jax import as_jax


def _fp8_product(x: Tensor, w: Tensor) -> Tensor:
    """Return ``x @ w`` for w ``[k, n]``."""
    codes, scale = rtkernels.quantize_fp8(w, granularity="channel")
    rows, of_rows = rtkernels.quantize_fp8(x, granularity="row")
    return rtkernels.scaled_mm(rows, codes, of_rows, scale, recipe="row", out_dtype=x.dtype, b_layout="nk")


_multiply = as_jax(_fp8_product, name="fp8_dot")


@jax.custom_vjp
def fp8_dot(x: Any, w: Any) -> Any:
    """Return ``x @ w`` from fp8 codes of both, with gradients of plain products.

    Args:
        x: bfloat16, float16 or float32 ``[..., k]``; a scale for each row.
        w: ``[k, n]``, in x's dtype or another; a scale for each column.

    Returns:
        ``[..., n]`` in x's dtype.
    """
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ArgumentError(f"x and w have shapes {x.shape} and {w.shape}; expected [..., k] and [k, n]")
    flat = _multiply(x.reshape(-1, x.shape[-1]), w)
    return flat.reshape(*x.shape[:-1], w.shape[1])


def _forward(x: Any, w: Any) -> tuple[Any, tuple[Any, Any]]:
    return fp8_dot(x, w), (x, w)


def _backward(saved: tuple[Any, Any], dy: Any) -> tuple[Any, Any]:
    x, w = saved
    dx = jnp.einsum("...n,kn->...k", dy, w.astype(dy.dtype))
    return dx.astype(x.dtype), jnp.einsum("...k,...n->kn", x, dy).astype(w.dtype)


fp8_dot.defvjp(_forward, _backward)


def fp8_einsum(equation: str, x: Any, w: Any) -> Any:
    """Return ``einsum(equation, x, w)`` by :func:`fp8_dot`.

    Args:
        equation: As in ``jnp.einsum``, with one letter per dimension: ``"BTD,NDH->BTNH"``. Each letter of x is either
            summed with one of w or in the result; each letter of w likewise. x and w share no letter of the result.
        x: The activations.
        w: The weight; dimensions are moved if it is not ``[summed, ..., kept, ...]`` already.
    """
    sides = equation.replace(" ", "").split("->")
    terms = sides[0].split(",")
    if len(sides) != 2 or len(terms) != 2 or "." in equation or any(len(set(t)) != len(t) for t in (*terms, sides[1])):
        raise ArgumentError(f"equation is {equation!r}; expected two terms and a result, each letter once in each")
    (of_x, of_w), result = terms, sides[1]
    summed = [letter for letter in of_x if letter in of_w]
    kept_x, kept_w = ([t for t in term if t not in summed] for term in (of_x, of_w))
    if not summed or sorted(result) != sorted(kept_x + kept_w):
        raise ArgumentError(f"equation is {equation!r}; expected letters that are summed, and no others in both terms")
    if x.ndim != len(of_x) or w.ndim != len(of_w):
        raise ArgumentError(f"x and w have shapes {x.shape} and {w.shape}; expected as many dimensions as {equation!r}")
    left = jnp.transpose(x, [of_x.index(t) for t in kept_x + summed])
    right = jnp.transpose(w, [of_w.index(t) for t in summed + kept_w])
    inner = [right.shape[i] for i in range(len(summed))]
    if list(left.shape[len(kept_x) :]) != inner:
        raise ArgumentError(
            f"x and w have shapes {x.shape} and {w.shape}; expected equal sizes where {equation!r} sums"
        )
    size = 1
    for n in inner:
        size *= n
    flat = fp8_dot(left.reshape(*left.shape[: len(kept_x)], size), right.reshape(size, -1))
    flat = flat.reshape(*left.shape[: len(kept_x)], *right.shape[len(summed) :])
    return jnp.transpose(flat, [(kept_x + kept_w).index(t) for t in result])


def lora_einsum(
    equation: str, x: Any, w: Any, lora: tuple[Any, Any] | None = None, *, scale: float = 1.0,
    axes: tuple[int, int] = (-2, -1),
) -> Any:  # fmt: skip
    """Return ``einsum(equation, x, w)`` in fp8, plus the low-rank product of an adapter in x's dtype.

    Args:
        equation: As for :func:`fp8_einsum`.
        x: The activations.
        w: The weight.
        lora: ``(a, b)``: a has w's shape with the rank in place of dimension ``axes[1]``, b with the rank in place of
            ``axes[0]``. None without an adapter.
        scale: Factor of the adapter's product.
        axes: The two dimensions of w that the adapter factorises.
    """
    base = fp8_einsum(equation, x, w)
    if lora is None:
        return base
    (of_x, of_w), result = equation.replace(" ", "").split("->")[0].split(","), equation.replace(" ", "").split("->")[1]
    first, second = of_w[axes[0]], of_w[axes[1]]
    rank = next(letter for letter in "LMQRSTUVWXYZABCDEFGHIJKNOP" if letter not in equation)
    low = result.replace(second, rank)
    inner = jnp.einsum(f"{of_x},{of_w.replace(second, rank)}->{low}", x, lora[0].astype(x.dtype))
    outer = jnp.einsum(f"{low},{of_w.replace(first, rank)}->{result}", inner, lora[1].astype(x.dtype))
    return base + outer * jnp.asarray(scale, x.dtype)


def _einsum_call(self: Any, eqn: str, x: Any) -> Any:
    config = self.lora_config
    if config is None:
        return lora_einsum(eqn, x, self.w)
    return lora_einsum(eqn, x, self.w, (self.w_a, self.w_b), scale=config.scaling_value, axes=tuple(config.axes))


def _dot_call(self: Any, x: Any, w: Any, lora_weights: tuple[Any, Any] | None) -> Any:
    base = fp8_dot(x, w)
    if lora_weights is None:
        return base
    a, b = (weight.astype(x.dtype) for weight in lora_weights)
    return base + jnp.dot(jnp.dot(x, a), b)


def patch(lora: Any) -> None:
    """Let the classes ``Einsum`` and ``FeedForward`` of openpi's module ``openpi.models.lora`` multiply in fp8."""
    for cls, name, function in ((lora.Einsum, "__call__", _einsum_call), (lora.FeedForward, "_dot", _dot_call)):
        if not hasattr(cls, name):
            raise ArgumentError(f"lora.{cls.__name__} has no {name}; expected the module openpi.models.lora")
        if "_rtkernels_original" not in vars(cls):
            cls._rtkernels_original = name, getattr(cls, name)
            setattr(cls, name, function)


def unpatch(lora: Any) -> None:
    """Undo :func:`patch`."""
    for cls in (lora.Einsum, lora.FeedForward):
        if "_rtkernels_original" in vars(cls):
            setattr(cls, *cls._rtkernels_original)
            del cls._rtkernels_original


def return_to_go(rewards: Any, last: Any, *, discount: float = 1.0, bootstrap: Any = None) -> Any:
    """Return the sum of rewards from each step to the end of its episode, as RECAP labels its batches.

    ``y[t] = rewards[t] + discount * y[t + 1]``, which starts again after a last step.

    Args:
        rewards: ``[..., steps]``, floating-point: episodes one after the other.
        last: bool ``[..., steps]``: the last step of an episode.
        discount: Factor of each later reward.
        bootstrap: ``[...]``, the value after the last step of all, if its episode goes on. Default: 0.

    Returns:
        float32 ``[..., steps]``.
    """
    rewards, last = jnp.asarray(rewards), jnp.asarray(last)
    if rewards.shape != last.shape or rewards.ndim < 1:
        raise ArgumentError(f"rewards and last have shapes {rewards.shape} and {last.shape}; expected [..., steps]")
    if last.dtype != jnp.bool_:
        raise ArgumentError(f"last has dtype {last.dtype}; expected bool")
    values, factors = rewards.astype(jnp.float32), jnp.where(last, 0.0, jnp.float32(discount))
    if bootstrap is not None and rewards.shape[-1]:
        values = values.at[..., -1].add(factors[..., -1] * jnp.asarray(bootstrap, jnp.float32))

    def later(right: tuple[Any, Any], left: tuple[Any, Any]) -> tuple[Any, Any]:
        # In a scan from the end: `left` is the earlier step.
        return left[0] + left[1] * right[0], left[1] * right[1]

    return jax.lax.associative_scan(later, (values, factors), reverse=True, axis=rewards.ndim - 1)[0]


def return_to_go_batch(
    rewards: Any, last: Any, steps: Any, *, discount: float = 1.0, low: float | None = None, high: float | None = None,
    bins: int | None = None,
) -> Any:  # fmt: skip
    """Return the labels of sampled steps: returns-to-go, scaled to 0 .. 1, or their bins.

    Args:
        rewards: As for :func:`return_to_go`, ``[steps]``.
        last: As for :func:`return_to_go`.
        steps: Integers ``[batch]``: the sampled steps.
        discount: As for :func:`return_to_go`.
        low: The return that becomes 0. Default: the smallest one. Returns outside of low and high are clamped.
        high: The return that becomes 1. Default: the largest one.
        bins: Number of bins of a distribution over returns. Default: none.

    Returns:
        float32 ``[batch]``; with bins int32 ``[batch]``, 0 to ``bins - 1``.
    """
    returns = return_to_go(rewards, last, discount=discount)
    low, high = returns.min() if low is None else low, returns.max() if high is None else high
    width = jnp.where(jnp.asarray(high) > jnp.asarray(low), high - low, 1.0)
    scaled = jnp.clip((returns[steps] - low) / width, 0.0, 1.0)
    if bins is None:
        return scaled
    if bins < 1:
        raise ArgumentError(f"bins is {bins}; expected at least 1")
    return jnp.minimum((scaled * bins).astype(jnp.int32), bins - 1)
