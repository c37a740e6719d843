"""The report of ``patch``: which modules were replaced, why others were left alone, and what that gained elsewhere."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch

from rtkernels.models import expected


class Site(NamedTuple):
    """A module that ``patch`` examined. `reason` says why it was left alone; None if it was replaced."""

    kind: str
    name: str
    module: str
    reason: str | None


class Gain(NamedTuple):
    """A recorded measurement of the same replacements: `factor` times as fast as `baseline`, doing `what`.

    `memory` is the peak memory relative to the baseline's, None if unknown. `options` are those of ``patch`` that the
    measured model had and this one has not; then it is no expectation, but what they could bring.
    """

    factor: float
    baseline: str
    what: str
    gpu: str
    date: str
    memory: float | None = None
    options: tuple[str, ...] = ()


_OPTIONS = {"fused": "fused_layers"}
_WIDTH = 9  # of the longest kind


class PatchReport:
    """The result of :func:`patch`; prints as a table. `sites` lists examined modules, `asked` the requested kinds.

    On a machine with a GPU, the table has a column with the measured gain of each kind, and the gain of a whole model
    with these kinds replaced, each with the day of its record (`gains`, `expected`). Your model, sizes and GPU differ.

    With ``attention=True``, `captures` is the number of CUDA graphs that ``generate()`` captured, and `not_captured`
    says why, and how often, it ran transformers' own loop or steps without a graph. `in_steps` maps each decoder layer
    of those steps that could run with norms and sums inside of its products to the reason why it did not, None if so.
    """

    def __init__(self, sites: list[Site], asked: tuple[str, ...], options: dict[str, Any]) -> None:
        self.sites, self.asked, self.options = sites, asked, options
        self.captures, self.not_captured = 0, Counter[str]()
        self.in_steps: dict[str, str | None] = {}

    @property
    def replaced(self) -> Counter[str]:
        """Number of replaced modules of each kind."""
        return Counter(site.kind for site in self.sites if site.reason is None)

    @property
    def left_alone(self) -> list[Site]:
        """The modules that were not replaced."""
        return [site for site in self.sites if site.reason is not None]

    @property
    def gains(self) -> dict[str, Gain]:
        """The measured gain of each kind that was replaced, where there is a record."""
        return {kind: Gain(*expected.OPS[kind]) for kind in self.asked if self.replaced[kind] and kind in expected.OPS}

    @property
    def expected(self) -> Gain | None:
        """The measured gain of a whole model with the same kinds replaced; None if there is no record.

        If there is only one with more of the options, it is that one, and `options` names them.
        """
        mine, asked = set(self.replaced), set(self.asked)
        for model, kinds, work, factor, memory, gpu, date in expected.MODELS:
            missing = [kind for kind in kinds if kind not in mine]
            same = all((kind in kinds) == (kind in mine) for kind in ("experts", "fp8"))
            if same and ("loss" in kinds) == ("loss" in asked) and {*missing} <= {"attention", "fused"} - asked:
                more = tuple(_OPTIONS.get(kind, kind) for kind in missing)
                return Gain(factor, "transformers", f"{work}, {model}", gpu, date, memory, more)
        return None

    def __str__(self) -> str:
        shows_gains = torch.cuda.is_available()
        gains, whole = (self.gains, self.expected) if shows_gains else ({}, None)
        left = Counter(site.kind for site in self.left_alone)
        lines = [f"{'kind':{_WIDTH}} replaced  left alone" + ("  measured gain" if shows_gains else "")]
        for kind in self.asked:
            gain = f"  {_line(gains[kind])}" if kind in gains else ""
            lines.append(f"{kind:{_WIDTH}} {self.replaced[kind]:8}  {left[kind]:10}{gain}")
        if whole is not None:
            more = ", ".join(f"{name}=True" for name in whole.options)
            how = f"with {more}, too" if more else "with the same options"
            gain = f"{whole.factor:.2f} x as fast as transformers, {whole.memory:.2f} of its peak memory"
            lines.append(f"measured {how}: {gain}")
            lines.append(f"  ({whole.what}; {whole.gpu}, {whole.date})")
        reasons = Counter((site.kind, site.module, site.reason) for site in self.left_alone)
        for (kind, module, reason), count in reasons.items():
            lines.append(f"  {kind}: {count} x {module}: {reason}")
        lines += [f"  generate: {count} x not captured: {reason}" for reason, count in self.not_captured.items()]
        for reason, count in Counter(self.in_steps.values()).items():
            what = "with norms and sums inside of products" if reason is None else f"not fused further: {reason}"
            lines.append(f"  generate: {count} x decoder layer {what}")
        return "\n".join(lines)

    __repr__ = __str__


def _line(gain: Gain) -> str:
    return f"{gain.factor:5.2f} x {gain.baseline}: {gain.what} ({gain.gpu.removeprefix('NVIDIA ')}, {gain.date})"
