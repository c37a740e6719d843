"""Which linear layers may be replaced by layers of codes: those that are nothing but a product."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from rtkernels.errors import RtkError
from rtkernels.models import replace
from rtkernels.models.served import BLOCK, ServedLinear, _blocks
from rtkernels.runtime.operator.sharding import is_sharded
from rtkernels.runtime.torch_private import TENSOR_TYPES

# What is read of a weight that a layer of codes has, too; beginnings of the names of methods that build a module.
_HARMLESS = ("device", "shape", "size", "ndim", "dim", "requires_grad")
_WHILE_BUILT = ("__init__", "_init", "init_", "reset", "tie_", "_tie")
_ROWS = 3  # multiplied to compare a forward with that of nn.Linear


def reasons(model: nn.Module) -> dict[str, str]:
    """Return the linear layers of a model that must stay as they are, by name, with the reason."""
    modules = dict(model.named_modules())
    found = {}
    for name, module in modules.items():
        if isinstance(module, nn.Linear) and not isinstance(module, ServedLinear):
            reason = _why_not(module) or _read_by_owner(modules, name)
            if reason:
                found[name] = reason
    return found


def _why_not(linear: nn.Linear) -> str | None:
    hooks = linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks or linear._backward_pre_hooks
    own = linear.__dict__.get("forward")
    if own is not None and _moves_only(linear):
        own = linear._old_forward
    if hooks or (own is not None and getattr(own, "__func__", None) is not type(linear).forward):
        return "it has hooks or a forward of its own, which a layer of codes would not run"
    weight = linear.weight
    scale = getattr(linear, "weight_scale_inv", None)
    if scale is not None and weight.element_size() == 1:  # transformers' FP8Linear
        if weight.dtype == torch.float8_e4m3fn and tuple(scale.shape) == tuple(map(_blocks, weight.shape)):
            return None
        return f"its codes are not e4m3 with a scale per {BLOCK} x {BLOCK}"
    if type(weight) not in TENSOR_TYPES and not is_sharded(weight):
        return f"its weight is a {type(weight).__name__}"
    if not weight.is_floating_point() or weight.element_size() == 1:
        return f"it has a weight of {str(weight.dtype).removeprefix('torch.')}"
    if replace.original_of(type(linear)).forward is not nn.Linear.forward and not _is_product(linear):
        return "its class computes something else than x @ weight.T + bias"
    return None


def _moves_only(linear: nn.Linear) -> bool:
    """Return True for the hook that accelerate (``device_map``) puts on every layer of a block that is on one device.

    It moves inputs to the device of the layer, where the block's own hook has already moved them.
    """
    hook = linear.__dict__.get("_hf_hook")
    plain = type(hook).__name__ == "AlignDevicesHook" and not hook.offload and not hook.io_same_device
    return plain and "_old_forward" in linear.__dict__


@torch.no_grad()
def _is_product(linear: nn.Linear) -> bool:
    """Return True if the forward of a class of its own gives what nn.Linear gives for some rows."""
    weight = linear.weight
    if type(weight) not in TENSOR_TYPES or weight.device.type == "meta":
        return False
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(_ROWS, weight.shape[1], generator=generator, dtype=torch.float32, device="cpu")
    x = x.to(weight.device, weight.dtype)
    wanted = nn.functional.linear(x, weight, linear.bias)
    training = linear.training
    try:
        got: Any = linear.eval()(x)  # served models are in eval mode
    except Exception:
        return False
    finally:
        linear.train(training)
    if not isinstance(got, Tensor) or got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    bound = 1e-2 * float(wanted.abs().max())
    return bool(torch.allclose(got.float(), wanted.float(), rtol=1e-2, atol=bound, equal_nan=True))


def _read_by_owner(modules: dict[str, nn.Module], name: str) -> str | None:
    """Return a reason if a module around a layer reads its weight: for a product of its own, or to cast to its dtype.

    T5, for example, casts the input of `wo` to the dtype of its weight, which would be that of the codes.
    """
    parts = name.split(".")
    for i in reversed(range(len(parts))):
        owner = replace.original_of(type(modules[".".join(parts[:i])]))
        if ".".join(parts[i:]) in _weights_read(owner):
            return f"{owner.__name__} reads its weight"
    return None


@cache
def _weights_read(cls: type[nn.Module]) -> frozenset[str]:
    """Return the paths of children whose weights methods of a class read, except for those that build the module."""
    found: set[str] = set()
    for base in cls.__mro__:
        if not issubclass(base, nn.Module) or base is nn.Module:
            continue
        for name, value in vars(base).items():
            if isinstance(value, FunctionType) and not name.startswith(_WHILE_BUILT):
                try:
                    found |= _read_in(ast.parse(textwrap.dedent(inspect.getsource(value))))
                except (OSError, TypeError, SyntaxError):  # a function without a file
                    continue
    return frozenset(found)


def _read_in(tree: ast.AST) -> set[str]:
    """Return NAME of each ``self.NAME.weight`` that is read for its values or dtype, except in training only."""
    found, nodes = set(), [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and _is_training(node.test):
            nodes += node.orelse
            continue
        if isinstance(node, ast.Attribute) and node.attr in _HARMLESS:
            node = node.value
            if isinstance(node, ast.Attribute) and node.attr == "weight":
                continue
        if isinstance(node, ast.Attribute) and node.attr == "weight":
            path, dot, name = ast.unparse(node.value).partition(".")
            found |= {name} if path == "self" and dot else set()
        nodes += ast.iter_child_nodes(node)
    return found


def _is_training(test: ast.expr) -> bool:
    """Return True for ``self.training`` and ``self.training and ...``: a served model is in eval mode."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(map(_is_training, test.values))
    return isinstance(test, ast.Attribute) and test.attr == "training"


def check_finite(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse infinite weights among the named ones: their codes would be finite.

    Raises:
        RtkError: A weight is infinite.
    """
    for name in sorted(names):
        path, _, part = name.rpartition(".")
        weight = getattr(model.get_submodule(path), part)
        if weight.element_size() == 1 or weight.device.type == "meta":
            continue
        # isinf needs one and a half times the memory: experts one at a time
        parts = weight.detach() if weight.dim() > 2 else (weight.detach(),)
        if any(bool(part.isinf().any()) for part in parts):
            raise RtkError(f"{path} has infinite weights, which fp8 codes cannot hold")
