"""Routers of expert layers: scores, selection and probabilities of the selected experts in one op.

A router is tested like every other module, with our own weight, bias and correction on the CPU. It runs in fp32 and in
bf16, which shows where it rounds logits and probabilities. The logits are computed as before, because auxiliary losses
and output recorders read them, and because different rounding would occasionally select different experts. Experts with
exactly equal probabilities may be selected in another order than torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rtkernels
from rtkernels.models import replace
from rtkernels.models.probe import (
    NotRecognized,
    Raised,
    Recognized,
    Trial,
    check_plain,
    check_pure,
    difference,
    normal,
    positional,
    probing,
    twin_of,
)
from rtkernels.models.recognize import TOLERANCE

_CORRECTION = "e_score_correction_bias"
_TOKENS = 33


class Scoring(NamedTuple):
    """Options of ``topk_router``; strings name attributes of the module."""

    score: str
    renormalize: bool
    correction: bool = False
    groups: tuple[str, str] | None = None
    scale: str | None = None


class Numbers(NamedTuple):
    """Where a router rounds, and the order of its results."""

    products: str  # "model": in the model's dtype; "rounded": the same, cast to fp32; "fp32": from fp32 copies
    probs: str  # "model" or "fp32"
    order: tuple[str, ...]


def is_router(module: nn.Module) -> bool:
    """Return True if a module may be a router: it has no children, a matrix, and `top_k`."""
    weight = module._parameters.get("weight")
    is_matrix = weight is not None and weight.dim() == 2
    return is_matrix and not module._modules and isinstance(getattr(module, "top_k", None), int)


@probing()
def recognize(module: nn.Module) -> Recognized:
    """Return how a candidate routes.

    Raises:
        NotRecognized: Its routing is none of ours.
    """
    if {name for name, p in module._parameters.items() if p is not None} - {"weight", "bias"}:
        raise NotRecognized("its parameters are more than a weight and a bias")
    if len(positional(type(module).forward)) != 2:
        raise NotRecognized("its forward takes more than the hidden states")
    experts, width = module.weight.shape
    generator = torch.Generator().manual_seed(0)
    drawn = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    x = torch.randn(_TOKENS, width, **drawn) * 4
    parameters = {"weight": torch.randn(experts, width, **drawn) * width**-0.5}
    if module._parameters.get("bias") is not None:
        parameters["bias"] = torch.randn(experts, **drawn)
    correction = module._buffers.get(_CORRECTION)
    buffers = {} if correction is None else {_CORRECTION: torch.rand(experts, **drawn)}
    if set(module._buffers) - set(buffers):
        raise NotRecognized("it has buffers that are not known here")

    def theirs(dtype: torch.dtype) -> dict[str, Tensor]:
        twin = twin_of(module, {name: p.to(dtype) for name, p in parameters.items()})
        twin._buffers = buffers
        try:
            routed = type(module).forward(twin, x.to(dtype))
        except Exception as error:
            raise Raised("as a router", error) from error
        return _by_name(routed, experts, module.top_k)

    exact, rounded = theirs(torch.float32), theirs(torch.bfloat16)
    numbers = _numbers(x, parameters, rounded)
    found = []
    for scoring in _scorings(module, correction is not None):
        routed = _route(module, exact["logits"], scoring, buffers.get(_CORRECTION))
        wanted = _dense(exact["probs"], exact["indices"], experts)
        if torch.allclose(_dense(routed.probs, routed.indices.long(), experts), wanted, rtol=TOLERANCE, atol=1e-6):
            found.append(scoring)
    if len(found) != 1:
        raise NotRecognized("it routes in no way of ours" if not found else "it routes in more than one way")
    flattens = _flattens(
        module, Recognized("router", (("numbers", numbers), ("scoring", found[0]))), parameters, buffers
    )
    return Recognized("router", (("flattens", flattens), ("numbers", numbers), ("scoring", found[0])))


def _flattens(module: nn.Module, kind: Recognized, parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> bool:
    """Compare our forward with the module's own, with gradients; return whether it flattens inputs of 3 dimensions.

    Raises:
        NotRecognized: They differ for inputs of 2 dimensions.
    """
    check_plain(module)
    experts, width = module.weight.shape
    ours, theirs = replace.forward_of("router", type(module), **dict(kind.options)), type(module).forward

    def dense(forward: Callable[..., Any], twin: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        results = dict(zip(dict(kind.options)["numbers"].order, forward(twin, x), strict=True))
        given = results["probs"]
        probs = torch.zeros(given.shape[0], experts, dtype=given.dtype, device=given.device)
        return results["logits"], probs.scatter(1, results["indices"], given)

    flat = Trial("for inputs of 2 dimensions", (normal(_TOKENS, width) * 4,), tolerance=TOLERANCE)
    high = Trial("for inputs of 3 dimensions", (normal(3, 5, width) * 4,), tolerance=TOLERANCE)
    for training in (False, True):
        twin = twin_of(module, parameters, training=training)
        twin._buffers = buffers
        functions = partial(dense, ours, twin), partial(dense, theirs, twin)
        check_pure(functions[1], twin, flat)
        if found := difference(*functions, flat, list(twin.parameters())):
            raise NotRecognized(f"it routes in no way of ours: {found}")
    try:
        return not difference(*functions, high, list(twin.parameters()))
    except Raised:
        return False


def _by_name(results: Any, experts: int, top_k: int) -> dict[str, Tensor]:
    """Return the results of a router as logits, probs and indices, in the order in which it returned them.

    Raises:
        NotRecognized: The results are not these three.
    """
    if not isinstance(results, tuple) or len(results) != 3 or not all(isinstance(t, Tensor) for t in results):
        raise NotRecognized("it does not give logits, probabilities and experts")
    names = {}
    for t in results:
        if t.shape == (_TOKENS, top_k) and not t.is_floating_point():
            names["indices"] = t
        elif t.shape == (_TOKENS, top_k):
            names["probs"] = t
        elif t.shape == (_TOKENS, experts):
            names["logits"] = t
    if len(names) != 3 or experts == top_k:
        raise NotRecognized("it does not give logits, probabilities and experts")
    return names


def _numbers(x: Tensor, parameters: dict[str, Tensor], results: dict[str, Tensor]) -> Numbers:
    """Find where a router rounds, from its results in bf16."""
    half = {name: p.bfloat16() for name, p in parameters.items()}
    for products in ("model", "rounded", "fp32"):
        logits = _logits(x.bfloat16(), half["weight"], half.get("bias"), products)
        if logits.dtype == results["logits"].dtype and torch.equal(logits, results["logits"]):
            probs = "model" if results["probs"].dtype == torch.bfloat16 else "fp32"
            return Numbers(products, probs, tuple(results))
    raise NotRecognized("its logits are no plain product")


def _scorings(module: nn.Module, corrected: bool) -> Iterator[Scoring]:
    has = {name for name in module.__dict__ if isinstance(module.__dict__[name], (int, float))}
    scale = "routed_scaling_factor" if "routed_scaling_factor" in has else None
    groups = ("num_group", "topk_group") if {"num_group", "topk_group"} <= has else None
    for renormalize in (False, True):
        if corrected:
            yield Scoring("sigmoid", renormalize, True, groups, scale)
        else:  # a softmax over the selected logits equals a renormalised softmax over all
            yield Scoring("softmax", renormalize, scale=scale)
            yield Scoring("sigmoid", renormalize, scale=scale)


def _dense(probs: Tensor, indices: Tensor, experts: int) -> Tensor:
    """Return probabilities by expert, because the order of the selected experts does not matter."""
    zeros = torch.zeros(probs.shape[0], experts, dtype=torch.float32, device=probs.device)
    return zeros.scatter_(1, indices, probs.float())


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, products: str) -> Tensor:
    if products == "fp32":
        if bias is None and x.is_cuda and x.dtype == weight.dtype == torch.bfloat16:
            return rtkernels.router_gemm(x, weight)
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    logits = F.linear(x, weight, bias)
    return logits.float() if products == "rounded" else logits


def _route(module: nn.Module, logits: Tensor, scoring: Scoring, correction: Tensor | None) -> Any:
    options: dict[str, Any] = {}
    if scoring.groups is not None:
        count, best = (getattr(module, name) for name in scoring.groups)
        options = {"num_groups": count, "top_groups": best, "group_k": 2}
    return rtkernels.topk_router(
        logits, module.top_k, score=scoring.score, renormalize=scoring.renormalize,
        bias=correction if scoring.correction else None,
        scale=1.0 if scoring.scale is None else getattr(module, scoring.scale), **options,
    )  # fmt: skip


def route(module: nn.Module, logits: Tensor, scoring: Scoring) -> Any:
    """Return what ``topk_router`` selects from the logits of a replaced router."""
    return _route(module, logits, scoring, module._buffers.get(_CORRECTION))


def _router(original: type[nn.Module], numbers: Numbers, scoring: Scoring, flattens: bool = True) -> Callable[..., Any]:
    own = original.forward

    def forward(self, hidden_states):
        weight, bias = self.weight, getattr(self, "bias", None)  # a DataParallel replica has no parameters
        if hidden_states.dtype != weight.dtype or weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return own(self, hidden_states)
        if hidden_states.dim() != 2 and not flattens:
            return own(self, hidden_states)
        x = hidden_states.reshape(-1, weight.shape[1])
        logits = _logits(x, weight, bias, numbers.products)
        routed = route(self, logits, scoring)
        probs = routed.probs.to(x.dtype) if numbers.probs == "model" else routed.probs
        results = {"logits": logits, "probs": probs, "indices": routed.indices.long()}
        return tuple(results[name] for name in numbers.order)

    return forward


replace.register("router", _router)
