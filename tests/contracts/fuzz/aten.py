"""The fuzzer for aten overloads that ``rtkernels.enable`` takes: samples of torch's OpInfos, varied like our own calls.

A varied call is compared with the same call on contiguous clones, both on our kernels; where one of them raises, and
where memory is shared, torch's own kernel says whether that is right. ``tests/conformance`` compares values with
torch's.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from conformance import harness
from torch import Tensor

import rtkernels
from contracts.fuzz.calls import Call, leaves, rebuilt
from contracts.fuzz.check import Failure, Wrong, _largest, compare, contiguous
from contracts.fuzz.memory import Arena, dense, fill, layouts, placed
from contracts.fuzz.variations import SHIFTS, Variation, is_index, resized
from rtkernels.aten import table
from rtkernels.emulator import EmulatorError

# OpInfo sizes (5, 10, 3) are not aligned; these allow 16-byte accesses.
GROWN = (None, (5, 16), (3, 8), (10, 24))
_RANDOM = ("rng",)  # results depend on the layout
_NEIGHBOURS = ("win",)  # results depend on neighbours, although shapes may be the same
_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float16, torch.uint8)


@contextlib.contextmanager
def taken(op: Any, place: str) -> Iterator[Callable[[], contextlib.AbstractContextManager]]:
    """Register our kernels for the overloads of an OpInfo; give a context in which they run."""
    limits = dict(table.MIN_ELEMENTS)
    table.MIN_ELEMENTS.update(dict.fromkeys(limits, 0))
    names = [name for name, row in table.table().items() if op.name in row.opinfo or row.operator == op.name]
    with contextlib.ExitStack() as stack:
        stack.callback(table.MIN_ELEMENTS.update, limits)
        if place == "cuda":
            yield lambda: rtkernels.use(names)
            return
        with rtkernels.emulate(place):  # only inside of it CPU tensors are taken
            stack.enter_context(rtkernels.use(names))
        yield lambda: rtkernels.emulate(place)


def family_of(op: Any) -> str:
    """Return the family of an OpInfo's first row."""
    return next(row.family for row in table.table().values() if op.name in row.opinfo)


def calls(op: Any, rng: random.Random, device: str, samples: int) -> Iterator[Call]:
    """Yield an OpInfo with some of its samples: dtypes, forms and sizes at random."""
    supported = op.supported_dtypes(device)
    dtypes = [dtype for dtype in _DTYPES if dtype in supported] or sorted(supported, key=str)
    if not dtypes:  # as torch's OpInfos say of some operators on devices they have none for
        return
    forms = [op.op] + [op.inplace_variant] * (op.inplace_variant is not None)
    for _ in range(samples):
        dtype = rng.choice(dtypes)
        given = [s for s in op.sample_inputs("cpu", dtype) if _is_small((s.input, s.args, s.kwargs))]
        if not given:
            continue
        number = rng.randrange(len(given))
        sample, grown, form = given[number], rng.choice(GROWN), rng.choice(forms)
        arguments = (sample.input, *sample.args), dict(sample.kwargs)
        named = [(name, value) for name, value in leaves(arguments, "arg") if isinstance(value, Tensor)]
        tensors = [t.detach() for _, t in named]
        if grown is not None and all(t.dim() for t in tensors):
            tensors = [resized(t, *grown) for t in tensors]

        def run(some: list[Tensor], form: Any = form, arguments: Any = arguments, **more: Any) -> Any:
            torch.manual_seed(0)
            args, kwargs = rebuilt(arguments, iter(some))
            return form(*args, **kwargs, **more)

        kind = "_" if form is not op.op else ""
        label = f"aten {op.name}{kind} {op.variant_test_name} {str(dtype)[6:]} #{number} {grown or ''}"
        yield Call(
            " ".join(label.split()), family_of(op), [name for name, _ in named], tensors, run,
            written={0} if form is not op.op else set(), has_out=form is op.op and op.supports_out,
        )  # fmt: skip


def _is_small(tree: Any) -> bool:
    found = [value for _, value in leaves(tree, "") if isinstance(value, Tensor)]
    return bool(found) and max(t.numel() for t in found) <= 4096 and not any(t.is_complex() for t in found)


def variations(call: Call, rng: random.Random, count: int) -> list[Variation]:
    """Return some variations of a call, chosen at random."""
    found: list[Variation] = []
    names = {i: [how.name for how in layouts(t, shared=not is_index(t))] for i, t in enumerate(call.tensors)}
    for i, known in names.items():
        found += [Variation(((i, name),)) for name in known]
    found += [
        Variation(tuple((i, rng.choice(known)) for i, known in names.items() if known)) for _ in range(3)
    ]  # fmt: skip
    targets = ["out[0]"] * call.has_out + [call.names[0]] * bool(call.written)
    found += [
        Variation(alias=(target, name, shift)) for target in targets for name in call.names if name != target
        for shift in SHIFTS
    ]  # fmt: skip
    return rng.sample(found, min(count, len(found)))


class AtenFuzzer:
    """Runs variations of calls of aten.

    Args:
        place: ``sm_80``, ``sm_90`` or ``cuda``.
        ours: Gives the context in which our kernels run.
    """

    def __init__(self, place: str, ours: Callable[[], contextlib.AbstractContextManager]) -> None:
        self.place, self._ours = place, ours
        self.device = "cuda" if place == "cuda" else "cpu"
        self.passed = self.refused = 0

    def check(self, call: Call, variation: Variation) -> Failure | None:
        """Return what is wrong with a variation of a call, or None."""
        try:
            done = (self._aliased if variation.alias else self._varied)(call, variation)
        except (Wrong, EmulatorError) as wrong:
            return Failure(call.name, variation.named(call), " ".join(str(wrong).split())[:240])
        self.passed += done
        self.refused += not done
        return None

    def _run(self, call: Call, tensors: list[Tensor], ours: bool, **more: Any) -> Any:
        """Return results and what was overwritten, or the exception that torch raises."""
        try:
            with self._ours() if ours else contextlib.nullcontext(), torch.no_grad():
                result = call.run(tensors, **more)
        except EmulatorError:
            raise
        except Exception as error:
            if "CUDA error" in str(error) or "misaligned" in str(error):
                raise
            return error
        found = [t for _, t in leaves(result, "") if isinstance(t, Tensor)]
        return [*found, *(tensors[i] for i in call.written)]

    def _varied(self, call: Call, variation: Variation) -> bool:
        chosen = dict(variation.layouts)
        tensors, arenas = [], []
        for i, value in enumerate(call.tensors):
            how = next((how for how in layouts(value) if how.name == chosen.get(i)), None)
            if i in call.written and how is not None and (how.shared or how.negated):
                return False  # torch decides what that is
            t, arena = placed(value, how, self.device)
            tensors.append(t)
            arenas.append(arena)
        clones = [contiguous(t) for t in tensors]
        for i, (arena, t) in enumerate(zip(arenas, tensors, strict=True)):
            arena.watch(*[t] if i in call.written else [])
        natives = [contiguous(t) for t in tensors] if call.written else tensors
        native = self._run(call, natives, False)
        if isinstance(native, Exception) and not call.written:
            return False
        if any(arena.damage() for arena in arenas):
            return False  # torch itself changes an input that its schema does not name: embedding with max_norm
        for repeat in range(1 if call.written else 2):  # the second call is a replay
            got = self._run(call, tensors, True)
            if isinstance(got, Exception):
                if isinstance(native, Exception):
                    return False
                raise Wrong(f"{type(got).__name__}: {got}")
            wanted = self._run(call, clones, True)
            if isinstance(wanted, Exception):
                raise Wrong(f"contiguous tensors are refused: {wanted}")
            if call.family not in _RANDOM:
                what = "in the second call" if repeat else ""
                try:
                    compare(_values(got), _values(wanted), what, _largest(clones))
                except Wrong:
                    # If torch's kernel took this layout, ours and torch's kernel were compared: sums in 16 bits differ.
                    if _same_bits(got, native) or not self._is_defined(call, native, clones):
                        return False
                    raise
            if any(arena.damage() for arena in arenas):
                raise Wrong("bytes changed that belong to an input or to nobody")
        return True

    def _is_defined(self, call: Call, native: Any, clones: list[Tensor]) -> bool:
        """Return whether torch's own kernel gives a layout the values of contiguous tensors.

        Not where it writes to a result with the strides of an input whose elements share memory (``select_scatter``).
        """
        if call.written or isinstance(native, Exception):
            return True
        try:
            compare(_values(native), _values(self._run(call, clones, False)), "", _largest(clones))
        except Wrong:
            return False
        return True

    def _aliased(self, call: Call, variation: Variation) -> bool:
        target, name, shift = variation.alias
        j = call.names.index(name)
        plain = [contiguous(t.to(self.device)) for t in call.tensors]
        wanted = self._run(call, plain, True)
        if isinstance(wanted, Exception):
            return False
        like = call.tensors[0] if target in call.names else wanted[0]
        if target not in call.names and len(wanted) != 1:
            return False
        size_a, size_b = like.numel() * like.itemsize, call.tensors[j].numel() * call.tensors[j].itemsize
        if shift % like.itemsize or shift % call.tensors[j].itemsize or shift >= size_a or -shift >= size_b:
            return False
        outcomes = []
        for ours in (False, True, True):
            arena = Arena(max(size_a, size_b) + 2 * abs(shift), self.device)
            begin = max(0, -shift)
            first = arena.at(begin, like.shape, dense(like.shape), like.dtype)
            second = arena.at(begin + shift, call.tensors[j].shape, dense(call.tensors[j].shape), call.tensors[j].dtype)
            tensors = [contiguous(t.to(self.device)) for t in call.tensors]
            if target in call.names:
                fill(first, like, shared=False)
                tensors[0] = first
            fill(second, call.tensors[j], shared=False)
            tensors[j] = second
            arena.watch(first)
            more = {} if target in call.names else {"out": first}
            outcomes.append(self._run(call, tensors, ours, **more))
            if arena.damage():
                raise Wrong(f"bytes changed that do not belong to what is written, by {'us' if ours else 'torch'}")
        native, *both = outcomes
        for got in both:
            if isinstance(native, Exception) != isinstance(got, Exception):
                raise Wrong(f"torch: {_short(native)}, ours: {_short(got)}")
        if isinstance(native, Exception) or not _is_elementwise(call, target, name, shift, like):
            return False
        for got in both if call.family not in _RANDOM else ():
            compare(_values(got), _values(native), "than torch's", _largest(plain))
        return True


def _is_elementwise(call: Call, target: str, name: str, shift: int, like: Tensor) -> bool:
    """Return whether every written element overlaps exactly the element it is computed from.

    All else torch refuses or leaves undefined: where its operators do not look (``avg_pool2d``, ``masked_select`` of
    an expanded tensor), a thread of its kernels reads what another one has overwritten, or has not yet.
    """
    other = call.tensors[call.names.index(name)]
    return shift == 0 and (other.shape, other.dtype) == (like.shape, like.dtype) and call.family not in _NEIGHBOURS


def _values(results: list[Tensor]) -> list[Any]:
    return [t.detach().resolve_conj() if not t.is_complex() else None for t in results]


def _same_bits(got: list[Tensor], native: Any) -> bool:
    return not isinstance(native, Exception) and all(map(torch.equal, got, native))


def _short(outcome: Any) -> str:
    return f"{type(outcome).__name__} {str(outcome)[:80]}" if isinstance(outcome, Exception) else "a result"


def cases(
    place: str, seed: int, operators: list[Any] | None = None, *, samples: int = 1, count: int = 8
) -> Iterator[tuple[Call, Variation, Callable[[Call, Variation], Failure | None]]]:
    """Yield calls of OpInfos with variations, and what checks them while our kernels are registered.

    Args:
        place: ``sm_80``, ``sm_90`` or ``cuda``.
        seed: Decides samples and variations.
        operators: OpInfos; None: all of the table.
        samples: Of each OpInfo.
        count: Variations of each sample.
    """
    device = "cuda" if place == "cuda" else "cpu"
    for op in harness.operators() if operators is None else operators:
        rng = random.Random(f"{seed} {op.name} {op.variant_test_name}")
        with taken(op, place) as ours:
            fuzzer = AtenFuzzer(place, ours)
            for call in calls(op, rng, device, samples):
                for variation in variations(call, rng, count):
                    yield call, variation, fuzzer.check
