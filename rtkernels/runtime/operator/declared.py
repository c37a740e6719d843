"""Operators by declaration: what arguments must be and what results look like is said in one place.

From the declaration follow the schema, the key of a plan, copies of tensors whose strides will not do, allocation, the
fake, empty results, replay, and (``differentiable``) the ``autograd.Function``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import FLOAT_DTYPES, check_same, is_dense, row_stride, token
from rtkernels.runtime.operator.autograd import once_differentiable
from rtkernels.runtime.operator.operator import MutatingOp, TorchOp
from rtkernels.runtime.operator.plan import Memory, Plan, StepPlan, Steps


class Meta(NamedTuple):
    """What a plan may know of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: int
    misaligned: int  # its address modulo 16

    def numel(self) -> int:
        """Return how many elements there are."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def dim(self) -> int:
        """Return how many dimensions there are."""
        return len(self.shape)


# ---- arguments ------------------------------------------------------------------------------------------------------


class Argument:
    """A tensor that an operator takes, whatever its strides are.

    Args:
        name: As in the schema and in messages.
        dtypes: Those that are accepted; none if the operator's ``check`` looks at that.
        like: Name of another argument whose dtype this one has; its shape, too, unless `shape` says otherwise.
        shape: The shape it must have, from the metas of all arguments by name.
        of: What messages say that the shape belongs to.
        optional: May be None.
    """

    written = False

    def __init__(
        self, name: str, dtypes: Sequence[torch.dtype] = FLOAT_DTYPES, *, like: str | None = None,
        shape: Callable[..., tuple[int, ...]] | None = None, of: str | None = None, optional: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.dtypes, self.like, self.optional = name, dtypes, like, optional
        self.shape, self.of = shape, of or like

    def fits(self, meta: Meta) -> bool:
        """Return False if the operator must copy the tensor before a plan can be made."""
        return True

    def check(self, given: dict[str, Meta | None]) -> None:
        """Raise an ArgumentError if dtype, shape or device will not do. `given`: all arguments by name."""
        meta = given[self.name]
        if meta is None:
            return
        if self.like is None:
            if self.dtypes:
                token(self.name, meta.dtype, self.dtypes)
        else:
            check_same(self.name, meta.dtype, given[self.like].dtype, "dtype", of=self.like)
        if self.shape is not None:
            check_same(self.name, tuple(meta.shape), tuple(self.shape(given)), "shape", of=self.of)
        elif self.like is not None:
            check_same(self.name, tuple(meta.shape), tuple(given[self.like].shape), "shape", of=self.like)
        first = next(iter(given.values()))
        check_same(self.name, meta.device, first.device, "device index", of=next(iter(given)))


class Rows(Argument):
    """One whose rows (the last dimension) are unit-stride and evenly spaced; others are copied."""

    def fits(self, meta: Meta) -> bool:
        return row_stride(meta.shape, meta.stride) is not None


class Dense(Argument):
    """A contiguous one; others are copied."""

    def fits(self, meta: Meta) -> bool:
        return is_dense(meta)


class Exact(Argument):
    """A contiguous one; others are refused."""

    def check(self, given: dict[str, Meta | None]) -> None:
        super().check(given)
        meta = given[self.name]
        if meta is not None and not is_dense(meta):
            raise ArgumentError(f"{self.name} has strides {tuple(meta.stride)}; expected a contiguous tensor")


class InPlace(Argument):
    """One that the operator overwrites, whatever its strides are."""

    written = True


class InPlaceExact(Exact):
    """One that the operator overwrites, contiguous."""

    written = True


# ---- operators ------------------------------------------------------------------------------------------------------


class _Declared:
    """What ``Operator`` and ``InPlaceOperator`` share."""

    def __init__(
        self, name: str, arguments: Sequence[Argument], *, options: str = "", results: str,
        outputs: Callable[..., tuple[Memory | None, ...]] | None = None, plan: Callable[..., Steps],
        reference: Callable[..., Any], check: Callable[..., None] | None = None,
    ) -> None:  # fmt: skip
        """Declare ``torch.ops.rtkernels.<name>``.

        Args:
            name: The operator's.
            arguments: Its tensors.
            options: Its other arguments, as in a schema: ``"float eps, bool log"``.
            results: Names of the tensors it returns, ``"y rstd"``; empty for an operator that only overwrites.
            outputs: ``(*metas, *options) -> (Memory, ...)``, one for each result, None for one nobody asked for.
            plan: ``(*metas, *options, device) -> Steps``. Called if there is something to compute; it sees only
                tensors that fit, and metas of None for absent ones.
            reference: ``(*tensors, *options)``: the same in plain torch, on any device.
            check: ``(*metas, *options)``: raises an ArgumentError for what the declaration cannot say.
        """
        self.arguments, self.results = tuple(arguments), tuple(results.split())
        self.option_names = tuple(part.split()[-1].split("=")[0] for part in options.split(",") if part.strip())
        self._outputs, self._make_steps, self._check_all = outputs, plan, check
        self._written_reference = reference
        self._count = len(self.arguments)
        self._plans = Plans(self._build)
        letters = iter("abcdefgh")
        kinds = []
        for argument in self.arguments:
            alias = f"({next(letters)}!)" if argument.written else ""
            kinds.append(f"Tensor{alias}{'?' if argument.optional else ''} {argument.name}")
        returned = ["()", "Tensor"][len(self.results)] if len(self.results) < 2 else None
        returned = returned or f"({', '.join(['Tensor'] * len(self.results))})"
        schema = f"{name}({', '.join([*kinds, *([options] if options else [])])}) -> {returned}"
        super().__init__(schema, reference=self._run_reference, fake=self._fake, plan=self._find, copied=self._copied)

    def _metas(self, args: tuple[Any, ...], aligned: bool = False) -> list[Meta | None]:
        return [
            None
            if t is None
            else Meta(t.dtype, t.shape, t.stride(), t.get_device(), 0 if aligned else t.data_ptr() & 15)
            for t in args[: self._count]
        ]

    def check(self, *values: Any) -> None:
        """Raise an ArgumentError for metas and options that do not fit together."""
        given = {argument.name: meta for argument, meta in zip(self.arguments, values, strict=False)}
        for argument in self.arguments:
            argument.check(given)
        if self._check_all is not None:
            self._check_all(*values)

    def _made(self, values: Sequence[Any]) -> tuple[Memory | None, ...]:
        return self._outputs(*values) if self.results else ()

    def _find(self, *args: Any) -> Plan | None:
        values = (*self._metas(args), *args[self._count :])
        return self._plans[values]

    def _build(self, *values: Any) -> Plan | None:
        self.check(*values)
        for argument, meta in zip(self.arguments, values, strict=False):
            if meta is not None and not argument.fits(meta):
                return None
        device = values[0].device
        made = self._made(values)
        nothing_to_do = self.results and all(memory is None or 0 in memory.shape for memory in made)
        steps = Steps() if nothing_to_do else self._make_steps(*values, device)
        names = [argument.name for argument in self.arguments]
        outputs = dict(zip(self.results, made, strict=True))
        return StepPlan(self.name, names, outputs, len(self.results) == 1, steps, device)

    def _copied(self, *args: Any) -> tuple[Any, ...]:
        copied = []
        for argument, meta, t in zip(self.arguments, self._metas(args), args, strict=False):
            copied.append(t if meta is None or argument.fits(meta) else t.contiguous())
        return (*copied, *args[self._count :])

    def _planned(self, args: tuple[Any, ...]) -> tuple[Plan, tuple[Any, ...]]:
        if any(t is not None and t.numel() == 0 for t in args[: self._count]):
            values = (*self._metas(args), *args[self._count :])
            self.check(*values)
            if any(memory is not None and 0 not in memory.shape for memory in self._made(values)) or not self.results:
                return _ReferencePlan(self._written_reference, args), args
        return super()._planned(args)

    def _run_reference(self, *args: Any) -> Any:
        self.check(*self._metas(args, aligned=True), *args[self._count :])
        return self._written_reference(*args)

    def _fake(self, *args: Any) -> Any:
        first = args[0]
        made = []
        for memory in self._made((*self._metas(args, aligned=True), *args[self._count :])):
            if memory is None:
                made.append(first.new_empty(0, dtype=torch.float32))
            elif memory.strides is None:
                made.append(first.new_empty(memory.shape, dtype=memory.dtype))
            else:
                made.append(first.new_empty_strided(memory.shape, memory.strides, dtype=memory.dtype))
        if not self.results:
            return None
        return made[0] if len(made) == 1 else tuple(made)


class _ReferencePlan(Plan):
    """For calls with nothing to sum over: plain torch, which fills the results."""

    __slots__ = ("_args", "_reference")

    def __init__(self, reference: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__()
        self._reference, self._args = reference, args

    def run(self, *addresses: int) -> Any:
        return self._reference(*self._args)


class Operator(_Declared, TorchOp):
    """A declared operator that changes none of its arguments; ``again`` replays the last plan."""

    def _remember(self, scope: dict[str, Any], args: tuple[Any, ...]) -> Any:
        if any(t is not None and t.numel() == 0 for t in args[: self._count]):
            return self._launch_planned(*args)  # its plan may hold these very tensors
        return super()._remember(scope, args)


class InPlaceOperator(_Declared, MutatingOp):
    """A declared operator that overwrites some of its arguments."""

    def _launch_planned(self, *args: Any) -> Any:
        result = super()._launch_planned(*args)
        self._count_versions(args)
        return result

    def _count_versions(self, args: tuple[Any, ...]) -> None:
        """Tell autograd: a backward that saved what was overwritten must raise, not use the new values."""
        for argument, t in zip(self.arguments, args, strict=False):
            if argument.written and t is not None and not t.is_inference():
                torch.autograd.graph.increment_version(t)


# ---- gradients ------------------------------------------------------------------------------------------------------


def differentiable(
    forward: Operator, backward: Operator, *, incoming: dict[str, str] | None = None
) -> Callable[..., Any]:
    """Return ``forward`` as a function with a gradient, once differentiable.

    Names say what goes where. Of the backward operator, a tensor ``d<result>`` is the incoming gradient of that result
    (zeros, or None where it is optional, if there is none); one with the name of an argument or a result of ``forward``
    is saved; an option ``need_<argument>`` says whether its gradient is wanted; other options are those of ``forward``.
    Its results ``d<argument>`` are the gradients. ``incoming`` maps tensors of the backward operator to results of the
    forward one where the name is another.
    """
    names = (*(argument.name for argument in forward.arguments), *forward.option_names)
    place = {name: i for i, name in enumerate(names)}
    tensors = {argument.name for argument in forward.arguments}
    results_of = incoming or {f"d{result}": result for result in forward.results}
    incoming_place = {name: forward.results.index(result) for name, result in results_of.items()}
    optional = {argument.name for argument in backward.arguments if argument.optional}
    wanted = [*(argument.name for argument in backward.arguments), *backward.option_names]
    saved = [name for name in wanted if name in tensors or name in forward.results]
    options = [name for name in wanted if name in place and name not in tensors]
    gradients = {result.removeprefix("d"): i for i, result in enumerate(backward.results)}

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            ctx.set_materialize_grads(False)
            made = forward.call(*args)
            results = made if isinstance(made, tuple) else (made,)
            by_name = dict(zip(forward.results, results, strict=True))
            ctx.save_for_backward(*[by_name[name] if name in by_name else args[place[name]] for name in saved])
            ctx.options = {name: args[place[name]] for name in options}
            ctx.like = [(result.shape, result.dtype, result.device) for result in results]
            return made

        @staticmethod
        @once_differentiable
        def backward(ctx, *grads):
            if all(grad is None for grad in grads):
                return (None,) * len(names)
            tensor_of = dict(zip(saved, ctx.saved_tensors, strict=True))
            args = []
            for name in wanted:
                if name in tensor_of:
                    args.append(tensor_of[name])
                elif name in incoming_place:
                    grad = grads[incoming_place[name]]
                    if grad is None and name not in optional:
                        shape, dtype, device = ctx.like[incoming_place[name]]
                        grad = torch.zeros(shape, dtype=dtype, device=device)
                    args.append(grad)
                elif name.startswith("need_"):
                    args.append(ctx.needs_input_grad[place[name.removeprefix("need_")]])
                else:
                    args.append(ctx.options[name])
            made = backward.call(*args)
            made = made if isinstance(made, tuple) else (made,)
            return tuple(
                made[gradients[name]] if name in gradients and ctx.needs_input_grad[i] else None
                for i, name in enumerate(names)
            )

    Function.__name__ = Function.__qualname__ = forward.name
    return Function.apply
