"""Expert layers in decoding steps: router, selection, and two launches for the experts, with norm and residual sum."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from rtkernels.models import replace, router
from rtkernels.models.merged import has_watched_child, is_watched
from rtkernels.models.probe import NotRecognized, Recognized, twin_of
from rtkernels.ops.gemm import decode_linear, step_experts
from rtkernels.runtime.operator.kinds import meta_of

_OTHER = "its MLP is neither one with gate_proj, up_proj and down_proj nor a router and experts of ours"
_routers: dict[Hashable, Recognized | None] = {}
_proven: dict[type[nn.Module], bool] = {}


def _parts(mlp: nn.Module) -> tuple[str, str] | None:
    """Return the names of the router and the experts of a layer, None if it has other children."""
    names = [name for name, child in mlp._modules.items() if child is not None]
    experts = [n for n in names if (kind := replace.replaced(mlp._modules[n])) is not None and kind.kind == "experts"]
    others = [name for name in names if name not in experts]
    return (others[0], experts[0]) if len(experts) == len(others) == 1 else None


def _routing(module: nn.Module) -> Recognized | None:
    """Return how a router selects, replaced or not; routers of the same class, sizes and numbers select alike."""
    kind = replace.replaced(module)
    if kind is not None or not router.is_router(module):
        return kind if kind is not None and kind.kind == "router" else None
    numbers = sorted((k, v) for k, v in module.__dict__.items() if isinstance(v, (bool, int, float, str)))
    key = type(module), tuple(module.weight.shape), *module._parameters, *module._buffers, *numbers
    if key not in _routers:
        try:
            _routers[key] = router.recognize(module)
        except NotRecognized:
            _routers[key] = None
    return _routers[key]


def unsupported(mlp: nn.Module, x: Tensor) -> str | None:
    """Return why an MLP is no expert layer that runs here, None if it is one."""
    if (names := _parts(mlp)) is None:
        return _OTHER
    gate, experts = (mlp._modules[name] for name in names)
    if (routing := _routing(gate)) is None:
        return _OTHER
    if any(is_watched(module) for module in (mlp, gate, experts)) or has_watched_child(experts):
        return "its MLP has hooks"
    how, numbers = dict(replace.replaced(experts).options), dict(routing.options)["numbers"]
    if how["bias"] or how["transposed"] or not how["concatenated"]:
        return "its experts have biases or another layout"
    if numbers.products == "fp32" or getattr(gate, "bias", None) is not None:
        return "its router computes logits in fp32, or has a bias"
    weights = gate.weight, experts.gate_up_proj, experts.down_proj
    if any(w.dtype != x.dtype or not w.is_contiguous() or w.data_ptr() % 16 for w in weights):
        return "weights of its experts are of another dtype, or not dense"
    if x.is_cuda:
        reason = step_experts.unsupported(meta_of(x), meta_of(experts.gate_up_proj), gate.top_k, x.get_device())
        reason = reason or decode_linear.unsupported(x, gate.weight, norm=True)
        if reason is not None:
            return f"its experts: {reason}"
    return None if _is_plain(mlp, names, numbers.order) else "its MLP computes more than its router and its experts"


class _Routed(nn.Module):
    def __init__(self, results: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.results = results

    def forward(self, *given: Any) -> Any:
        self.given = given
        return self.results if len(self.results) > 1 else self.results[0]


def _is_plain(mlp: nn.Module, names: tuple[str, str], order: tuple[str, ...]) -> bool:
    """Return True if a layer gives its input to the router, both to the experts, and returns their result."""
    kind = type(mlp)
    if kind not in _proven:
        x = torch.randn(1, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
        results = {}
        for i, name in enumerate(order):
            results[name] = torch.full((2, 3), float(i), dtype=torch.float32, device="cpu")
        gate = _Routed(tuple(results.values()))
        rows = torch.randn(2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float32, device="cpu")
        experts = _Routed((rows,))
        twin = twin_of(mlp, {}, children=dict(zip(names, (gate, experts), strict=True)), training=False)
        try:
            with torch.no_grad():
                out = kind.forward(twin, x)
            rows, *routed = experts.given
            _proven[kind] = (
                isinstance(out, Tensor) and torch.equal(out, experts.results[0].view(1, 2, 4))
                and torch.equal(rows, x.view(2, 4)) and torch.equal(gate.given[0].reshape(2, 4), x.view(2, 4))
                and [id(t) for t in routed] == [id(results["indices"]), id(results["probs"])]
            )  # fmt: skip
        except Exception:  # a layer of another kind
            _proven[kind] = False
    return _proven[kind]


def call(mlp: nn.Module, x: Tensor, gain: Tensor, eps: float, offset: float) -> Tensor:
    """Return ``x + mlp(norm(x))`` of a layer that :func:`unsupported` accepts."""
    gate, experts = (mlp._modules[name] for name in _parts(mlp))
    options = dict(_routing(gate).options)
    numbers, scoring = options["numbers"], options["scoring"]
    constant = gain.data_ptr() % 16 == 0
    rows = x.reshape(-1, x.shape[-1])
    logits = decode_linear.FORWARD.call(
        rows, gate.weight, None, None, None, gain, None, None, None, False, constant, eps, offset, 1.0
    )
    routed = router.route(gate, logits, scoring)
    out = step_experts.FORWARD.call(
        rows, experts.gate_up_proj, experts.down_proj, routed.indices, routed.probs, rows, gain,
        dict(replace.replaced(experts).options)["act"], numbers.probs == "model", eps, offset,
    )  # fmt: skip
    return out.view(x.shape)
