"""Whether a call after a change does what it does where nothing is known of calls before."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from contracts.depends.calls import Call
from contracts.depends.changes import Change, Given, Way
from contracts.fuzz.calls import leaves
from rtkernels.runtime.call.recent import Recent
from rtkernels.runtime.launch.plans import Plans

WARM = 3  # the second call is recorded, the third one replayed


def outcome(call: Call, way: Way) -> tuple[Any, ...]:
    """Return all that one sees of a call: its results, what it wrote, or its error; and what was seen around it."""
    given, seen = way.make(), []
    versions = [None if t.is_inference() else t._version for t in _tensors(given)]
    try:
        results = way.run(lambda: call.call(given), seen)
    except Exception as error:
        return (("error", type(error).__name__), *seen)  # which of two wrong arguments it names may depend
    described = [_described(value, given) for _, value in leaves(results, "")]
    written = [
        (version is not None and t._version > version, _bits(t))
        for t, version in zip(_tensors(given), versions, strict=True)
    ]
    return ((type(results).__name__, *described), tuple(written), *seen)


def _tensors(given: Given) -> list[Tensor]:
    return [value for _, value in leaves(given, "") if isinstance(value, Tensor)]


def _described(value: Any, given: Given) -> Any:
    if not isinstance(value, Tensor):
        return type(value).__name__, str(value)
    storage = value.untyped_storage()._cdata
    over = [
        (i, t is value, value.storage_offset() - t.storage_offset())
        for i, t in enumerate(_tensors(given)) if t.untyped_storage()._cdata == storage
    ]  # fmt: skip
    kind = type(value).__name__, value.dtype, tuple(value.shape), value.stride(), str(value.device)
    return *kind, value.requires_grad, value.is_inference(), value.is_neg(), tuple(over), _bits(value)


def _bits(t: Tensor) -> str:
    with torch.no_grad():
        plain = t.detach().resolve_neg().resolve_conj().cpu().contiguous()
        flat = plain.new_empty(plain.numel()).copy_(plain.reshape(-1))  # one element may have any stride
        return hashlib.sha1(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def fresh(call: Call, way: Way) -> tuple[Any, ...]:
    """Return the outcome of a call that nothing is known of."""
    Plans.forget_all()
    return outcome(call, way)


class Checker:
    """Makes calls before and after changes.

    Args:
        repeats: How often a call is made after a change; the second is recorded, the third replayed.
    """

    def __init__(self, repeats: int = 3) -> None:
        self.repeats = repeats
        self.changes = self.replayed = 0
        self.new_plans = True
        self.items: set[str] = set()
        self._before: tuple[Call, Way, tuple[Any, ...]] | None = None

    def check(self, call: Call, change: Change) -> str | None:
        """Return what is wrong after a change, or None."""
        name = f"{call.name} | {change.item}: {change.name}"
        wanted_after, wanted_before = fresh(call, change.after), self._fresh_before(call, change.before)
        for kind, text in filter(_is_wrong, wanted_after):
            return f"{name} | {kind}: {text}"
        Plans.forget_all()
        for number in range(WARM):
            if wrong := self._differs(call, change.before, wanted_before):
                return f"{name} | call {number + 1} before it: {wrong}"
        before = call.replays()
        self.changes += 1
        self.replayed += bool(before)
        self.items.add(change.item)
        known = _known(call)
        for number in range(self.repeats):
            self._clear_plans(change)
            if wrong := self._differs(call, change.after, wanted_after):
                return f"{name} | call {number + 1} after it: {wrong}"
            if not number and self._is_replayed(call, change, wanted_after, before, known):
                return f"{name} | the call after it is a replay of one before"
        for what, way, wanted in (("back", change.before, wanted_before), ("again", change.after, wanted_after)):
            self._clear_plans(change)
            if wrong := self._differs(call, way, wanted):
                return f"{name} | {what}: {wrong}"
        return _shared(name, call, change)

    def _fresh_before(self, call: Call, way: Way) -> tuple[Any, ...]:
        """Return what ``fresh`` does, once for all changes of the same call."""
        if self._before is None or self._before[0] is not call or self._before[1] is not way:
            self._before = call, way, fresh(call, way)
        return self._before[2]

    def _clear_plans(self, change: Change) -> None:
        """Clear plans and last calls of operators, but not the replays of functions that are made of them."""
        if change.new_plans and self.new_plans:
            for plans in Plans._all:
                plans.clear()
            for forget in Plans.replays:
                if (
                    type(getattr(forget, "__self__", None)) is not Recent
                    and forget.__module__ != "rtkernels.aten.replay"
                ):
                    forget()

    @staticmethod
    def _is_replayed(call: Call, change: Change, wanted: tuple[Any, ...], before: list[Any], known: int) -> bool:
        """Return whether a call that is another one was not even looked up as another one."""
        if not before or not change.other or wanted[0][0] == "error" or _known(call) > known:
            return False
        return change.other == "always" or any(map(_computes, before))

    def _differs(self, call: Call, way: Way, wanted: tuple[Any, ...]) -> str | None:
        got = outcome(call, way)
        if got == wanted:
            return None
        pairs = [(a, b) for a, b in zip(got, wanted, strict=False) if a != b] or [(got, wanted)]
        return f"{str(pairs[0][0])[:300]} instead of {str(pairs[0][1])[:300]}"


def _is_wrong(seen: Any) -> bool:
    return isinstance(seen, tuple) and seen[:1] == ("wrong",)


def _known(call: Call) -> int:
    if call.aten:
        from rtkernels.aten.replay import known_calls

        return len(known_calls(call.name.removeprefix("aten "), "CUDA"))
    recent = getattr(call.function, "recent", None)
    return 0 if recent is None else len(recent.known)


def _computes(replay: Any) -> bool:
    """Return True if a replay calls a function of torch."""
    return any(name.startswith("call_") for name in replay.__globals__)


def _shared(name: str, call: Call, change: Change) -> str | None:
    """Return that scratch is kept for several threads or streams, or for a graph."""
    if change.item not in ("threads", "stream", "capture"):
        return None
    for replay in call.replays():
        kept = replay.__globals__.get("kept")
        if kept is None:
            continue
        own, addresses = kept(), []
        change.after.run(lambda kept=kept, addresses=addresses: addresses.append(kept().data_ptr()), [])
        if own.data_ptr() in addresses:
            return f"{name} | the same scratch is used"
    return None
