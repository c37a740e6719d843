"""What ``tests/runtime/test_stand_in.py`` runs in a process with the stand-in device: ``python checks.py MODE``.

``count`` demands that repeated calls take the short way: they build no plan, and run few Python functions of ours.
``emulate`` compares repeated calls, with other values each time and with alternating shapes, with plain emulated ones.
``sizes`` makes every public function's calls at the fuzzer's sizes: dtypes, shapes and strides of the results are those
that the reference gives, in the first call, in the second one, which is recorded, and in replays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from torch.utils import _pytree  # noqa: E402

from support import stand_in  # noqa: E402

CALLS = 6
_FILE = "rtkernels"

Arguments = dict[str, Any]


class Case:
    """A public function and its arguments.

    Args:
        call: Of the package and `make`'s tensors by name; returns what is compared.
        make: Makes CPU tensors for a size.
        most: Python functions of ours that a repeated call may run; it is what one runs today. Where shapes
            alternate it may run three more, which find the call and keep the recent ones in order.
        in_place: Calls are known by addresses, as those of lists are: repeat them with the same tensors.
    """

    sizes = 4, 6  # given to `make`; calls alternate between them

    def __init__(
        self, call: Callable[..., Any], make: Callable[[int], Arguments], most: int, *, in_place: bool = False
    ) -> None:
        self.call, self.make, self.most, self.in_place = call, make, most, in_place


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def _heads(n: int) -> Arguments:
    return {name: _randn(1, 4 * n, heads, 64) for name, heads in (("q", 2), ("k", 1), ("v", 1))}


def _angles(n: int) -> Arguments:
    angles = torch.randn(4 * n, 32)
    return {"q": _randn(1, 4 * n, 2, 64), "cos": angles.cos(), "sin": angles.sin()}


def _tokens(n: int) -> Arguments:
    return {"x": _randn(n, 64), "choices": torch.stack([torch.randperm(4)[:2] for _ in range(n)])}


def _added(rtk: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rtk.add_(x, y)
    return x


def _scaled(rtk: Any, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    rtk.multi_scale_([a, b], 0.5)
    return [a, b]


CASES = {
    "rms_norm": Case(lambda rtk, x, w: rtk.rms_norm(x, w), lambda n: {"x": _randn(n, 64), "w": _randn(64)}, 5),
    "glu": Case(lambda rtk, x: rtk.glu(x), lambda n: {"x": _randn(n, 128)}, 5),
    "scaled_mm": Case(
        lambda rtk, a, b: rtk.scaled_mm(a, b), lambda n: {"a": _randn(16 * n, 64), "b": _randn(64, 64)}, 5
    ),
    "attention": Case(lambda rtk, q, k, v: rtk.attention(q, k, v, causal=True), _heads, 4),
    "quantize_fp8": Case(lambda rtk, x: rtk.quantize_fp8(x), lambda n: {"x": _randn(n, 64)}, 5),
    "rope": Case(lambda rtk, q, cos, sin: rtk.rope(q, cos, sin), _angles, 5),
    "cross_entropy": Case(
        lambda rtk, x, labels: rtk.cross_entropy(x, labels),
        lambda n: {"x": _randn(n, 64), "labels": torch.randint(64, (n,))},
        14,
    ),
    "moe_permute": Case(
        lambda rtk, x, choices: rtk.moe_permute(x, rtk.moe_index(choices, 4)), _tokens, 15
    ),
    "add_": Case(_added, lambda n: {"x": _randn(n, 64), "y": _randn(n, 64)}, 10),
    "multi_scale_": Case(_scaled, lambda n: {"a": torch.randn(8 * n), "b": torch.randn(n)}, 11, in_place=True),
    "act out": Case(
        lambda rtk, x, out: rtk.act(x, "silu", out=out), lambda n: {"x": _randn(n, 64), "out": _randn(n, 64)}, 4
    ),
    "softmax out": Case(
        lambda rtk, x, out: rtk.softmax(x, out=out), lambda n: {"x": _randn(n, 64), "out": _randn(n, 64)}, 83
    ),
}  # fmt: skip


def _on_cuda(given: Arguments) -> Arguments:
    return {name: t.cuda() for name, t in given.items()}


def _bytes(result: Any) -> list[torch.Tensor]:
    return [t.cpu().contiguous().view(-1).view(torch.uint8) for t in _pytree.tree_leaves(result) if t is not None]


def check_results(name: str, case: Case, rtk: Any, device: stand_in.StandIn) -> None:
    """Compare calls on the stand-in with plain emulated calls, bit by bit."""
    first, second = case.sizes
    for n in [first] * CALLS + [second, first] * (CALLS // 2):
        given = case.make(n)
        before = device.launches
        got = _bytes(case.call(rtk, **_on_cuda(given)))
        assert device.launches > before, f"{name}: nothing was launched"
        with rtk.emulate("sm_90"):
            wanted = _bytes(case.call(rtk, **given))
        assert len(got) == len(wanted), name
        assert all(map(torch.equal, got, wanted)), f"{name}: another result than that of an emulated call"


def check_replays(name: str, case: Case, rtk: Any, device: stand_in.StandIn) -> None:
    """Demand that repeated calls launch, build no plan, and run at most so many Python functions of ours."""
    from rtkernels.runtime.launch.kernel import Kernel
    from rtkernels.runtime.launch.plans import Plans

    slow = {Plans.__missing__.__code__, Kernel.bind.__code__}
    seen: list[Any] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and _FILE in frame.f_code.co_filename and frame.f_code.co_filename != __file__:
            seen.append(frame.f_code)

    # Tensors elsewhere in every other call of a shape, as allocators give the same few addresses by turns.
    made = [[_on_cuda(case.make(n)) for _ in range(1 if case.in_place else 2)] for n in case.sizes]
    for i in range(3 * CALLS):
        alike = made[i % 2 if i >= CALLS else 0]
        given = alike[i // 2 % len(alike)]
        seen.clear()
        before = device.launches
        sys.setprofile(profile)
        try:
            case.call(rtk, **given)
        finally:
            sys.setprofile(None)
        assert device.launches > before, f"{name}: nothing was launched"
        if i in (CALLS - 1, 3 * CALLS - 1):
            names = [f"{Path(code.co_filename).name}:{code.co_name}" for code in seen]
            assert not slow & set(seen), f"{name}: call {i} built a plan: {names}"
            most = case.most + (3 if i >= CALLS else 0)
            assert len(seen) <= most, f"{name}: call {i} ran {len(seen)} functions: {names}"


def check_sizes() -> tuple[int, int]:
    """Compare the metadata of results with those of the reference; return how many calls there were, and how many ran.

    Calls that the reference refuses at a size are left out.
    """
    from contracts.fuzz.calls import functions, results_of
    from contracts.fuzz.variations import resized, sizes_of

    found, tried, ran = [], 0, 0
    for call in functions():
        for sizes in sizes_of(call):
            tensors = [resized(t, *sizes) for t in call.tensors]
            with torch.no_grad():
                try:
                    wanted = results_of(call.run([t.clone() for t in tensors]))
                except Exception:  # the fuzzer checks what may be refused, and how
                    continue
                tried += 1
                given = [t.cuda() for t in tensors]
                for number in range(4):
                    try:
                        got = results_of(call.run(given))
                    except Exception as error:
                        if number:
                            found.append(f"{call.name} {sizes}, call {number + 1}: {type(error).__name__}: {error}")
                        break
                    ran += number == 3
                    for i, (a, b) in enumerate(zip(map(_meta, got), map(_meta, wanted), strict=True)):
                        if a != b:
                            found.append(f"{call.name} {sizes}, call {number + 1}, result {i}: {a}; expected {b}")
    assert not found, "\n".join(found)
    return tried, ran


def _meta(t: torch.Tensor | None) -> tuple[Any, ...] | None:
    if t is None:
        return None
    strides = [step for size, step in zip(t.shape, t.stride(), strict=True) if size > 1] if t.numel() else []
    return t.dtype, tuple(t.shape), strides


def main(mode: str) -> None:
    device = stand_in.install("count" if mode == "sizes" else mode, sm_count=4)  # of the emulated device: equal grids
    import rtkernels

    torch.manual_seed(0)
    if mode == "sizes":
        print("{} calls, {} of them ran".format(*check_sizes()))
        return
    check = {"count": check_replays, "emulate": check_results}[mode]
    for name, case in CASES.items():
        check(name, case, rtkernels, device)
    print(f"{len(CASES)} functions, {device.launches} launches")


if __name__ == "__main__":
    main(sys.argv[1])
