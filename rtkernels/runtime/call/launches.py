"""What the handler of an aten override launches, recorded while it runs.

Operators and pointwise launches report themselves (``declared.own_trace``), and memory is known by their arguments:
what a launch overwrites that nobody has computed before was allocated by the handler. A dispatch mode sees what torch's
own kernels do in between, zeros and copies included: a replay would leave it out, so such a call is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rtkernels.runtime.call.trace import ALLOCATIONS, Encoded, NotRepeatable, Number, Record, Trace, View
from rtkernels.runtime.operator.declaration import Declared, active_traces, own_trace
from rtkernels.runtime.operator.plan import StepPlan

_NO_KERNEL = {f"aten::{name}" for name in (*ALLOCATIONS, "set_")}


class _TorchKernels(TorchDispatchMode):
    """Refuses a trace when torch itself computes: views and uninitialised memory need no kernel."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if not self._trace.inside and not func.is_view and func._schema.name not in _NO_KERNEL:
            used = tree_leaves((args, kwargs, result))
            if any(isinstance(leaf, Tensor) and not leaf.is_meta for leaf in used):
                self._trace.refuse(f"torch's own {func} computes in between")
        return result


class LaunchTrace(Trace):
    """While active, records the launches of this thread.

    Args:
        arguments: Tensors among the arguments of the call, by name.
        numbers: Floats among them that launches take whatever their values are, by name; no two are one object.
    """

    counts_versions = False

    def __init__(self, arguments: dict[str, Tensor], numbers: dict[str, float]) -> None:
        super().__init__(arguments)
        self.has_out = False  # its scratch is not kept: an override may be called with very many shapes
        self._numbers, self._taken = numbers, set()
        self._torch_kernels = _TorchKernels(self)

    def __enter__(self) -> LaunchTrace:
        super().__enter__()
        self._torch_kernels.__enter__()
        return self

    def __exit__(self, *exc: Any) -> Any:
        self._torch_kernels.__exit__(*exc)
        super().__exit__(*exc)

    def launched(self, operator: Declared, args: tuple[Any, ...]) -> Any:
        """Launch an operator, and record it."""
        result = self._as_a_whole(operator.launch, *args)
        if self.refused is not None:
            return result
        try:
            plan = operator._find(*args) if operator._prepare is None else None
            if type(plan) is not StepPlan or plan.converted:
                raise NotRepeatable(f"{operator.name} has no plan for these arguments as they are")
            for i in operator.written_places:
                if args[i] is not None:
                    self._allocate(args[i])
            if operator._written:
                operator._refuse_shared(args)  # asks which tensors must be apart
            self._record_plan(operator, plan, args, result)
        except NotRepeatable as error:
            self.refuse(str(error))
        return result

    def record(
        self, plan: StepPlan, given: Sequence[Any], result: Tensor | None, written: Tensor | None, memory: Tensor | None
    ) -> None:
        """Record a launch.

        Args:
            plan: What is launched.
            given: Tensors and numbers that it takes.
            result: What it allocated.
            written: What it overwrote instead.
            memory: The tensor that `written` views, if it is not that itself.
        """
        if self.refused is not None:
            return
        try:
            if written is not None:
                self._allocate(written if memory is None else memory)
            views = [self.view_of(v) if isinstance(v, Tensor) else v for v in given]
            overwritten = [] if written is None else [self.view_of(written)]
            for out in overwritten:
                read = [v for v in views if isinstance(v, View) and v.root is not out.root and v.root.argument]
                self.apart += [(out, view) for view in read if out.root.argument]
            self._add_record(Record(plan, None, views, {}, overwritten, changes=bool(overwritten)), result)
        except NotRepeatable as error:
            self.refuse(str(error))

    def number(self, value: Any, encode: Callable[[Any], Any] | None = None) -> Number | None:
        """Return the argument that a number is, if launches take it whatever its value is."""
        name = next((name for name, number in self._numbers.items() if number is value), None)
        if name is None:
            return None
        self._taken.add(name)
        return Number(name, None if encode is None else Encoded(encode))

    def close(self) -> None:
        """Refuse the call if a number was lost on its way to the launches: the handler may have computed with it."""
        if lost := self._numbers.keys() - self._taken:
            self.refuse(f"no launch takes {', '.join(sorted(lost))}")

    def _number(self, value: Any) -> Any:
        return self.number(value) or value

    def _allocate(self, tensor: Tensor) -> None:
        """Record the allocation of a tensor, unless it is known."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._roots:
            return
        if tensor.storage_offset() or storage.nbytes() != tensor.numel() * tensor.element_size():
            raise NotRepeatable("a launch overwrites a part of memory that is neither an argument nor a result")
        self._add_record(Record(None, None, (), {}), tensor)


def launch_trace() -> LaunchTrace | None:
    """Return the active trace of launches of this thread."""
    trace = own_trace() if active_traces else None
    return trace if type(trace) is LaunchTrace else None
