"""C expressions of ``rtkernels.pointwise``: their names, their functors, and the dtypes of their results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rtkernels.aten.functors import ANY, NUMBERS
from rtkernels.errors import ArgumentError
from rtkernels.runtime.suggest import did_you_mean

TENSORS, SCALARS = "abc", ("s0", "s1", "s2", "s3")
# By kind: how a functor promotes, its result if not the promoted dtype, and the promoted dtypes that it takes.
PROMOTIONS: dict[str, tuple[str, torch.dtype | None, frozenset[torch.dtype]]] = {
    "default": ("default", None, NUMBERS),
    "no_opmath": ("default", None, ANY),
    "int_to_float": ("float", None, NUMBERS),
    "always_bool": ("default", torch.bool, ANY),
    "bool_to_long": ("long", None, NUMBERS),
}


class Expression:
    """C text, and the tensors and numbers that it names.

    Args:
        argument: What the user calls it.
        text: One C expression.
        tensors: Names that stand for tensors, in order.
    """

    def __init__(self, argument: str, text: Any, tensors: Sequence[str]) -> None:
        if not isinstance(text, str) or not text.strip() or re.search(r"[;{}#\n\\]", text):
            raise ArgumentError(f"{argument} is {text!r}; expected one C expression")
        self.text = text
        named = set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", text))
        self.tensors = [tensor for tensor in tensors if tensor in named]
        self.scalars = [scalar for scalar in SCALARS if scalar in named]

    def struct(self, name: str, tensors: Sequence[str] | None = None) -> str:
        """Return the functor of this expression, with those tensors for operands; None: that it names."""
        operands = self.tensors if tensors is None else tensors
        values = ", ".join(f"C {tensor}" for tensor in operands)
        numbers = "".join(f"        const C {s} = s.{s};\n" for s in self.scalars)
        return f"""
struct {name} {{
    static constexpr int kInputs = {len(operands)}, kOwnType = 0;
    template <typename T, typename C>
    RTK_DEVICE static auto apply({values}, const Scalars<T>& s) {{
{numbers}        return {self.text};
    }}
}};
"""


class Forward:
    """The expressions of all results, with the tensors and numbers that any of them names.

    Args:
        expression: As ``pointwise`` takes it: one text, or a list of two or three.
        promotion: As ``pointwise`` takes it: a kind for all, or for each.
    """

    def __init__(self, expression: Any, promotion: Any) -> None:
        self.single = isinstance(expression, str) or not isinstance(expression, Sequence)
        texts = [expression] if self.single else list(expression)
        if not 1 <= len(texts) <= 3:
            raise ArgumentError(f"expression has {len(texts)} expressions; expected one to three")
        names = ["expression"] if self.single else [f"expression[{i}]" for i in range(len(texts))]
        self.results = [Expression(name, text, TENSORS) for name, text in zip(names, texts, strict=True)]
        self.tensors = [t for t in TENSORS if any(t in e.tensors for e in self.results)]
        self.scalars = [s for s in SCALARS if any(s in e.scalars for e in self.results)]
        self.text = ", ".join(texts)
        if not self.tensors:
            raise ArgumentError(f"expression is {expression!r}; expected one that names a tensor: a, b or c")
        if self.tensors != list(TENSORS[: len(self.tensors)]):
            raise ArgumentError(f"expression names {', '.join(self.tensors)}; expected tensors from a on, without gaps")
        self.kinds = _kinds(promotion, len(texts))

    def gradients(self, backward: Any) -> dict[str, Expression]:
        """Return the expression of the gradient of each tensor; none for no backward."""
        if backward is None:
            return {}
        grads = ["g"] if self.single else [f"g{i}" for i in range(len(self.results))]
        given = {"a": backward} if isinstance(backward, str) else backward
        if not isinstance(given, Mapping) or set(given) != set(self.tensors):
            wanted = ", ".join(self.tensors)
            raise ArgumentError(f"backward is {backward!r}; expected an expression for each of {wanted}")
        found = {}
        for tensor in self.tensors:
            every = [*grads, *TENSORS]
            found[tensor] = gradient = Expression(f"backward[{tensor!r}]", given[tensor], every)
            if len(gradient.tensors) > 3:
                expected = "g and at most two tensors" if self.single else "at most three gradients and tensors"
                raise ArgumentError(f"backward[{tensor!r}] is {gradient.text!r}; expected {expected}")
            if not set(gradient.tensors) <= {*grads, *self.tensors} or not set(gradient.scalars) <= set(self.scalars):
                raise ArgumentError(f"backward[{tensor!r}] is {gradient.text!r}, which names what expression does not")
            if not set(grads) & set(gradient.tensors):
                wanted = "the gradient g" if self.single else f"a gradient: {', '.join(grads)}"
                raise ArgumentError(f"backward[{tensor!r}] is {gradient.text!r}; expected one that names {wanted}")
        return found

    def dtypes(self, promoted: torch.dtype) -> list[torch.dtype]:
        """Return the dtypes of the results for operands that torch promotes to a dtype."""
        found = []
        for kind in self.kinds:
            how, result, _ = PROMOTIONS[kind]
            if result is None:
                result = promoted
                if how == "float" and not promoted.is_floating_point:
                    result = torch.get_default_dtype()
                elif how == "long" and promoted == torch.bool:
                    result = torch.int64
            found.append(result)
        return found


def _kinds(promotion: Any, count: int) -> list[str]:
    given = [promotion] * count if isinstance(promotion, str) else promotion
    if not isinstance(given, Sequence) or len(given) != count or not all(isinstance(kind, str) for kind in given):
        raise ArgumentError(f"promotion is {promotion!r}; expected a kind, or a list of {count}")
    for kind in given:
        if kind.lower() == "complex_to_float":
            raise ArgumentError("promotion is 'complex_to_float'; kernels of pointwise take no complex tensors")
        if kind.lower() not in PROMOTIONS:
            known = ", ".join(PROMOTIONS)
            raise ArgumentError(f"promotion is {kind!r}; expected one of {known}{did_you_mean(kind, PROMOTIONS)}")
    return [kind.lower() for kind in given]
