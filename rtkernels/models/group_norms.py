"""Replace ``nn.GroupNorm``, together with a silu behind it, as the residual blocks of diffusion models write it.

The silu is another module, which the parent's forward calls with the result of the norm. The norm then computes both,
and marks its result; the silu returns marked tensors as they are, and serves any other as before. That nothing but the
silu reads the result is seen in the code of the parent: every call of the norm is a statement ``y = self.norm(x)`` that
``z = self.silu(y)`` follows.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import rtkernels
from rtkernels.models import replace
from rtkernels.models.merged import is_watched
from rtkernels.models.patcher import Patcher
from rtkernels.models.probe import NotRecognized, Recognized, Trial, check_plain, normal, probing, twin_of
from rtkernels.models.proof import Setting, prove
from rtkernels.models.recognize import autocasts
from rtkernels.runtime.torch_private import is_dynamo_compiling

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_MARK = "_rtkernels_activated"


def is_group_norm(module: nn.Module) -> bool:
    """Return True if a module may be a group norm."""
    return isinstance(module, nn.GroupNorm) and not module._modules


@probing()
def recognize(module: nn.Module) -> Recognized:
    """Return the replacement of a group norm.

    Raises:
        NotRecognized: It computes something else.
    """
    given = {name: p for name, p in module._parameters.items() if p is not None}
    if set(given) not in (set(), {"weight", "bias"}):
        raise NotRecognized(f"its parameters are {', '.join(given)}; expected weight and bias, or none")
    check_plain(module)
    channels = module.num_channels

    def twin(width: int, dtype: torch.dtype, training: bool) -> nn.Module:
        fresh = {name: normal(width, seed=i, dtype=dtype) for i, name in enumerate(given)}
        return twin_of(module, fresh, training=training)

    def setting(
        where: str, *spatial: int, dtype: torch.dtype = torch.float32, training: bool = True, **more: Any
    ) -> Setting:
        def trial(width: int) -> Trial:
            scales = torch.tensor([1e-2, 1.0, 1e2], dtype=torch.float32, device="cpu") if dtype == torch.float32 else 1
            x = normal(*spatial, 3, width).movedim((-2, -1), (0, 1)) + 0.5
            x = (x.movedim(0, -1) * scales).movedim(-1, 0).to(dtype)
            return Trial(where, (x.contiguous(**more),))

        return Setting(trial, (channels,), dtype, training)

    settings = [
        setting("for inputs of 4 dimensions", 3, 5),
        setting("for inputs of 3 dimensions", 7),
        setting("for inputs of 5 dimensions", 2, 3, 2),
        setting("for channels that lie last", 3, 5, memory_format=torch.channels_last),
        setting("in evaluation", 4, 4, training=False),
        *(setting(f"in {str(dtype)[6:]}", 4, 4, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)),
    ]
    kind = Recognized("group_norm", (("silu", False),))
    return prove(module, channels, [("group_norm", kind)], twin, settings)


def replace_activations(model: nn.Module, patcher: Patcher) -> None:
    """Let replaced group norms compute the silu behind them, where the code of their parent calls one."""
    parents: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                parents.setdefault(child, []).append((parent, name))
    for name, module in model.named_modules():
        if replace.replaced(module) != Recognized("group_norm", (("silu", False),)) or len(parents[module]) != 1:
            continue
        parent, child = parents[module][0]
        behind = _behind(parent, child)
        silu = None if behind is None else parent._modules.get(behind)
        if silu is None or replace.original_of(type(silu)) is not nn.SiLU or is_watched(silu) or is_watched(module):
            continue
        replace.change(module, Recognized("group_norm", (("silu", True),)))
        if replace.replaced(silu) is None:
            action = partial(replace.replace, silu, Recognized("behind_norm", ()))
            patcher.attempt("norm", f"{name} with {behind}", silu, action)


# ---- the code of the parent -----------------------------------------------------------------------------------------


def _behind(parent: nn.Module, norm: str) -> str | None:
    """Return the child that every result of a norm goes to, and nothing else reads; None if there is none."""
    cls = replace.original_of(type(parent))
    own = [f for c in cls.__mro__ if issubclass(c, nn.Module) and c is not nn.Module for f in vars(c).values()]
    found: set[str | None] = set()
    for function in own:
        if not inspect.isfunction(function) or function.__name__ == "__init__":
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            return None
        tree = _Reachable(parent).visit(tree)
        mentioned = sum(_is_child(node, norm) for node in ast.walk(tree))
        if not mentioned:
            continue
        followed = list(_followed(tree.body[0].body, [], norm))
        if function is not cls.forward or len(followed) != mentioned:
            return None
        found |= set(followed)
    return found.pop() if len(found) == 1 else None


def _is_child(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name and _is_name(node.value, "self")


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _call(statement: ast.stmt) -> tuple[str, str, str] | None:
    """Return ``(y, child, x)`` of a statement ``y = self.child(x)``."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    to, value = statement.targets[0], statement.value
    if not isinstance(to, ast.Name) or not isinstance(value, ast.Call) or value.keywords or len(value.args) != 1:
        return None
    called, given = value.func, value.args[0]
    if not isinstance(called, ast.Attribute) or not _is_name(called.value, "self") or not isinstance(given, ast.Name):
        return None
    return to.id, called.attr, given.id


class _Reachable(ast.NodeTransformer):
    """Keeps of each condition on a module's own text or children the branch that is taken."""

    def __init__(self, parent: nn.Module) -> None:
        self._parent = parent

    def visit_If(self, node: ast.If) -> Any:
        known = self._known(node.test)
        if known is None:
            return self.generic_visit(node)
        return [kept for one in (node.body if known else node.orelse) for kept in self._visited(one)]

    def _visited(self, statement: ast.stmt) -> list[ast.stmt]:
        kept = self.visit(statement)
        return kept if isinstance(kept, list) else [kept]

    def _known(self, test: ast.expr) -> bool | None:
        """Return the value of ``self.child``, ``self.child is not None`` and ``self.name == "text"``, else None."""
        right = None
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.comparators[0], ast.Constant):
            right, how, test = test.comparators[0].value, test.ops[0], test.left
            if not isinstance(how, ast.IsNot if right is None else ast.Eq):
                return None
        if not isinstance(test, ast.Attribute) or not _is_name(test.value, "self"):
            return None
        if right is None:
            modules = self._parent._modules
            return modules[test.attr] is not None if test.attr in modules else None
        value = self._parent.__dict__.get(test.attr)
        return value == right if isinstance(value, str) and isinstance(right, str) else None


def _followed(body: list[ast.stmt], after: list[ast.stmt], norm: str) -> Iterator[str | None]:
    """Yield the child that follows each call of a norm in a body, None if none does; `after` follows the body."""
    for i, statement in enumerate(body):
        rest = body[i + 1 :] + after
        if isinstance(statement, ast.If):
            yield from _followed(statement.body, rest, norm)
            yield from _followed(statement.orelse, rest, norm)
            continue
        call = _call(statement)
        if call is None or call[1] != norm:
            continue
        next_call = _call(rest[0]) if rest else None
        # The result is overwritten by the silu's, so nobody else can read it.
        follows = next_call is not None and next_call[0] == next_call[2] == call[0]
        yield next_call[1] if follows else None


# ---- forwards -------------------------------------------------------------------------------------------------------


def _group_norm(original: type[nn.Module], silu: bool) -> replace.Forward:
    own = original.forward

    def forward(self, input):
        x, weight, bias = input, self.weight, self.bias
        fits = isinstance(x, Tensor) and x.dtype in _FLOATS and x.dim() > 1 and x.numel() > 0 and not autocasts(x)
        if not fits or (weight is not None and weight.dtype != x.dtype):
            return own(self, x)
        both = silu and not is_dynamo_compiling() and not is_watched(self)
        y = rtkernels.group_norm(x, weight, bias, groups=self.num_groups, eps=self.eps, act="silu" if both else None)
        if both:
            setattr(y, _MARK, True)
        return y

    return forward


def _behind_norm(original: type[nn.Module]) -> replace.Forward:
    own = original.forward

    def forward(self, input):
        if getattr(input, _MARK, False):
            delattr(input, _MARK)
            return input
        return own(self, input)

    return forward


replace.register("group_norm", _group_norm)
replace.register("behind_norm", _behind_norm)
