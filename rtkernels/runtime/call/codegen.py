"""The one writer of replays: what a trace does (``writer.py``), behind a guard that compares what a call depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rtkernels.runtime.call.trace import Arguments, Trace, View
from rtkernels.runtime.call.writer import Writer, words_of
from rtkernels.runtime.env import ENCODED, ENVIRON
from rtkernels.runtime.invariance import IS_INVARIANT, LEVEL_CODE, LEVEL_SCOPE, level
from rtkernels.runtime.layout import sharing
from rtkernels.runtime.torch_private import deterministic, same_tensors

_MAX_APART = 1000  # addresses of calls that are kept for a replay


def _sharing(writer: Writer) -> list[str]:
    """Return expressions of whether views of arguments that were apart share memory."""
    return [*dict.fromkeys(_shares(writer, i, a, b) for i, (a, b) in enumerate(dict.fromkeys(writer.trace.apart)))]


def _shares(writer: Writer, i: int, a: View, b: View) -> str:
    found = sharing(*((v.shape, v.strides, v.dtype.itemsize) for v in (a, b)))
    if found is None:
        return "False"
    low, high, writer.scope[f"share_{i}"] = found
    distance, further = f"p_{b.root.name} - p_{a.root.name}", b.first - a.first
    return f"({low - further} < {distance} < {high - further} and share_{i}({distance} + {further}))"


class GuardedWriter(Writer):
    """Writes replays that compare all that a call depends on, and return MISS for others.

    Args:
        name: The public function's, for tracebacks.
        arguments: Those of the recorded call.
        trace: The recorded call.
    """

    def __init__(self, name: str, arguments: Arguments, trace: Trace) -> None:
        super().__init__(name, arguments.names, trace)
        self.arguments = arguments

    def comparison(self) -> list[str]:
        tensors, lines = self.trace.arguments, []
        for name, (kind, parts) in self.arguments.parts.items():
            self.scope[f"kind_of_{name}"] = kind
            lines.append(f"if type({name}) is not kind_of_{name} or len({name}) != {len(parts)}:\n        return MISS")
            lines += [f"{''.join(f'{part}, ' for part in parts)}= {name}"] if parts else []
        # Calls that autograd records come here first, too, and are told apart by the first comparisons.
        same = ["not is_grad_enabled()"] if any(t.requires_grad for t in tensors.values()) else []
        distinct: dict[int, str] = {}
        for name, tensor in tensors.items():
            distinct.setdefault(id(tensor), name)
        self.scope["matches"] = same_tensors([tensors[name] for name in distinct.values()])
        same.append(f"matches({', '.join(distinct.values())})")
        same += [self.same(name, value) for name, value in self.arguments.values.items()]
        same += [f"{name} is {distinct[id(t)]}" for name, t in tensors.items() if distinct[id(t)] != name]
        if torch.is_autocast_enabled(self.trace.device.type):  # ``matches`` sees whether it is
            self.scope["autocast_dtype"] = torch.get_autocast_dtype
            kind = self.trace.device.type
            same.append(f"autocast_dtype({kind!r}) is {self.constant(torch.get_autocast_dtype(kind))}")
        if any(record.function is not None for record in self.trace.records):
            self.scope["default_dtype"] = torch.get_default_dtype
            self.scope["deterministic"] = deterministic
            same.append(f"default_dtype() is {self.constant(torch.get_default_dtype())}")
            same.append(f"deterministic() is {torch.are_deterministic_algorithms_enabled()}")
        self.scope |= LEVEL_SCOPE
        same.append(f"{LEVEL_CODE} == {level()}" if level() else f"not {IS_INVARIANT}")
        if self.trace.debug:
            self.scope["environ"] = ENVIRON
            same.append(f"not environ.get({self.constant(ENCODED('RTKERNELS_DEBUG'))})")
        lines.append(f"if not ({' and '.join(same)}):\n        return MISS")
        others = _sharing(self)
        used = words_of([*self.body, *others])
        misaligned = {name: tensor.data_ptr() & 15 for name, tensor in tensors.items() if f"p_{name}" in used}
        others += [f"p_{name} & 15 != {rest}" for name, rest in misaligned.items() if rest]
        if aligned := [f"p_{name}" for name, rest in misaligned.items() if not rest]:
            others.append(f"({' | '.join(aligned)}) & 15")
        lines += [f"p_{name} = {name}.data_ptr()" for name in misaligned]
        if len(self.trace.apart) > 2:  # addresses that were found apart once need not be compared again
            found = ", ".join(sorted(word for word in words_of(others) if word.startswith("p_")))
            self.scope["apart"] = set()
            lines.append(f"if ({found}) not in apart:\n        if {' or '.join(others)}:\n            return MISS")
            lines.append(f"    len(apart) < {_MAX_APART} or apart.clear()\n        apart.add(({found}))")
        elif others:
            lines.append(f"if {' or '.join(others)}:\n        return MISS")
        return lines

    def same(self, name: str, value: Any) -> str:
        """Return the comparison of an argument that is not a tensor; types and signs of zeros count."""
        if value is None or type(value) is bool or isinstance(value, (torch.dtype, torch.layout)):
            return f"{name} is {self.constant(value)}"
        kind = type(value)
        self.scope[f"kind_of_{name}"], self.scope[f"given_as_{name}"] = kind, value
        equal = f"type({name}) is kind_of_{name} and {name} == given_as_{name}"
        if kind is float and value == 0:
            equal += f" and str({name}) == {str(value)!r}"
        return f"({name} is given_as_{name} or ({equal}))"


class UnguardedWriter(Writer):
    """Writes replays of aten overrides, found by key: they compare addresses, and return MISS if numbers do not fit.

    Args:
        name: The overload's, for tracebacks.
        parameters: What a replay takes: tensors and numbers by name, and ``p_<name>`` for the addresses of all tensors.
        trace: The recorded call.
        promotes: The default dtype may have decided that of the result.
    """

    def __init__(self, name: str, parameters: Sequence[str], trace: Trace, *, promotes: bool) -> None:
        super().__init__(name, parameters, trace)
        self.promotes = promotes

    def comparison(self) -> list[str]:
        lines, others = [], _sharing(self)
        if self.promotes:
            self.scope["default_dtype"] = torch.get_default_dtype
            others.insert(0, f"default_dtype() is not {self.constant(torch.get_default_dtype())}")
        for i, number in enumerate(self.numbers):
            self.scope |= {f"encode_{i}": number.encode, f"kept_{i}": number.encode.kept.get}
            lines.append(f"n_{i} = kept_{i}({number.name}) or encode_{i}({number.name})")
            others.append(f"n_{i} is None")
        return [*lines, f"if {' or '.join(others)}:\n        return MISS"] if others else lines
