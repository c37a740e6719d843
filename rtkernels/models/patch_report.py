"""The report of ``patch``: which modules were replaced, and why others were left alone."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple


class Site(NamedTuple):
    """A module that ``patch`` examined. `reason` says why it was left alone; None if it was replaced."""

    kind: str
    name: str
    module: str
    reason: str | None


class PatchReport:
    """The result of :func:`patch`; prints as a table. `sites` lists examined modules, `asked` the requested kinds.

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

    def __str__(self) -> str:
        lines = [f"{'kind':8} {'replaced':>8} {'left':>5}"]
        left = Counter(site.kind for site in self.left_alone)
        lines += [f"{kind:8} {self.replaced[kind]:8} {left[kind]:5}" for kind in self.asked]
        reasons = Counter((site.kind, site.module, site.reason) for site in self.left_alone)
        for (kind, module, reason), count in reasons.items():
            lines.append(f"  {kind}: {count} x {module}: {reason}")
        lines += [f"  generate: {count} x not captured: {reason}" for reason, count in self.not_captured.items()]
        for reason, count in Counter(self.in_steps.values()).items():
            what = "with norms and sums inside of products" if reason is None else f"not fused further: {reason}"
            lines.append(f"  generate: {count} x decoder layer {what}")
        return "\n".join(lines)

    __repr__ = __str__
