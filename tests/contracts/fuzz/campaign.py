"""All cases of a seed in one order, for processes that share them among themselves."""

from __future__ import annotations

import functools
import random
import time
import zlib
from collections.abc import Callable, Iterator

from contracts.fuzz import calls
from contracts.fuzz.check import Failure, Fuzzer, rng_of
from contracts.fuzz.variations import Variation, variations


def own_calls(only: str = "") -> list[calls.Call]:
    """Return operators and public functions whose name or family is named; all of them if none is."""
    return [call for call in _all_calls() if not only or only in call.name or only == call.family]


@functools.cache
def _all_calls() -> tuple[calls.Call, ...]:
    return (*calls.operators(), *calls.functions())


def cases(found: list[calls.Call], seed: int) -> list[tuple[calls.Call, Variation]]:
    """Return all variations of calls, in an order that the seed decides: any part of it has something of everything."""
    pairs = [(call, variation) for call in found for variation in variations(call, rng_of(seed, call))]
    random.Random(seed).shuffle(pairs)
    return pairs


def run(
    place: str, seed: int, seconds: float, *, part: int = 0, parts: int = 1, start: int = 0, only: str = "",
    variation: str = "", part_of_variation: str = "", repeat: int = 1, kinds: str = "own aten",
    begun: Callable[[int, str], None] | None = None,
) -> Iterator[Failure | None]:  # fmt: skip
    """Yield what is wrong with each case, or None.

    Args:
        place: ``cpu``, ``sm_80``, ``sm_90`` or ``cuda``.
        seed: Decides the cases.
        seconds: When to stop; half of it is for aten.
        part: Which calls: those whose name has this number.
        parts: Of so many.
        start: Cases before this one were run already.
        only: Calls whose name has this in it.
        variation: Those with this name.
        part_of_variation: Those whose name has this in it.
        repeat: How often each call is repeated.
        kinds: ``own``, ``aten`` or both.
        begun: Is told the number and the name of each case before it runs.
    """
    number = 0
    if "own" in kinds:
        limit = time.monotonic() + seconds * (0.6 if "aten" in kinds else 1.0)
        mine = [call for call in own_calls(only) if _is_mine(call.name, part, parts)]
        fuzzer = Fuzzer(place, repeat)
        for call, varied in cases(mine, seed):
            number += 1
            if number <= start or not _is_wanted(varied.named(call), variation, part_of_variation):
                continue
            if time.monotonic() > limit:
                break
            if begun:
                begun(number, f"{call.name} | {varied.named(call)}")
            yield fuzzer.check(call, varied)
        number = 1 << 20  # aten's cases begin here, however many there were
    if "aten" not in kinds or place == "cpu":
        return
    from conformance import harness  # torch's OpInfos need a package that calls of ours do not need

    from contracts.fuzz import aten

    limit = time.monotonic() + seconds * (0.4 if "own" in kinds else 1.0)
    operators = [op for op in harness.operators() if _is_mine(op.name, part, parts)]
    named = only.removeprefix("aten ").split()[0].rstrip("_") if only else ""
    operators = [op for op in operators if named in ("", op.name)]
    random.Random(seed).shuffle(operators)
    for more in range(64):  # rounds: one sample of each operator at a time
        for call, varied, check in aten.cases(place, seed + 1000 * more, operators):
            number += 1
            if number <= start or not _is_wanted(varied.named(call), variation, part_of_variation):
                continue
            if variation and call.name != only:
                continue
            if time.monotonic() > limit:
                return
            if begun:
                begun(number, f"{call.name} | {varied.named(call)}")
            yield check(call, varied)


def _is_wanted(name: str, variation: str, part: str) -> bool:
    return (not variation or name == variation) and part in name


def _is_mine(name: str, part: int, parts: int) -> bool:
    return zlib.crc32(name.encode()) % parts == part
