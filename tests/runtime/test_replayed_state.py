"""Replays and what a call has around it: alignment, autocast, parameters, other threads, kernels that cannot run."""

from __future__ import annotations

import linecache
from collections.abc import Iterator

import pytest
import torch
from support.compare import running_on
from support.places import at
from support.ways import assert_equal_bits
from torch import Tensor

import rtkernels
from rtkernels.errors import ToolkitError
from rtkernels.ops.act.combine import COMBINE
from rtkernels.runtime import env, layout
from rtkernels.runtime.call import trace as tracing
from rtkernels.runtime.call.public import public
from rtkernels.runtime.operator import declaration

COLS = 64
channel_mul = rtkernels.channel_mul


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    for function in (channel_mul, rtkernels.linear_cross_entropy, rtkernels.topk_router):
        function.recent.forget()
    yield


def replays(function) -> list:
    return [known.replay for known in function.recent.known.values() if known.replay is not None]


@at("sm_80", "cuda")
@pytest.mark.parametrize("first", [1, 4])
def test_results_are_not_written_where_kernels_cannot(place: str, first: int) -> None:
    """A kernel writes 16 bytes at a time to memory that a plan made; the copy's target may lie anywhere."""

    @public
    def put_aside(y: Tensor, x: Tensor, s: Tensor) -> Tensor:
        y.copy_(channel_mul(x, s))
        return y

    with running_on(place) as device:
        for _ in range(4):
            y = torch.empty(2 * COLS + first, device=device)[first:].view(2, COLS)
            x, s = torch.randn(2, COLS, device=device), torch.randn(COLS, device=device)
            assert_equal_bits(put_aside(y, x, s), x * s)
        assert len(replays(put_aside)) == 1
    lines = linecache.getlines("<rtkernels replay of put_aside>")
    assert any("call_" in line for line in lines) is bool(first % 4)  # the copy


@at("sm_80", "cuda")
def test_autocast_to_another_dtype_is_another_call(place: str) -> None:
    with running_on(place) as device:
        hidden, weight = torch.randn(8, COLS, device=device), torch.randn(32, COLS, device=device)
        labels = torch.randint(0, 32, (8,), device=device)
        for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
            want = rtkernels.linear_cross_entropy(hidden.to(dtype), weight.to(dtype), labels)
            for _ in range(3):
                with torch.autocast(hidden.device.type, dtype=dtype):
                    got = rtkernels.linear_cross_entropy(hidden, weight, labels)
                assert_equal_bits(got, want)


@at("sm_80", "cuda")
def test_parts_of_zeros_that_come_in_batches(place: str) -> None:
    @public
    def some_counts(logits: Tensor) -> Tensor:
        return rtkernels.topk_router(logits, 2).counts[1:4]

    with running_on(place) as device:
        for _ in range(4):
            logits = torch.randn(16, 8, device=device)
            want = torch.zeros(8, dtype=torch.int32, device=device)
            want += torch.stack([(logits.topk(2).indices == expert).sum() for expert in range(8)])
            assert_equal_bits(some_counts(logits), want[1:4])
        assert len(replays(some_counts)) == 1


def test_views_of_parameters_are_not_the_parameters() -> None:
    @public
    def views(x: Tensor) -> tuple[Tensor, ...]:
        return x, x.view(x.shape), x.detach(), x[1:].detach(), x + 1

    parameter = torch.nn.Parameter(torch.randn(4))
    with rtkernels.emulate("sm_80"), torch.no_grad():
        for _ in range(4):
            same, view, alone, part, _ = views(parameter)
            assert same is parameter and type(view) is type(alone) is Tensor
            assert not alone.requires_grad and not part.requires_grad
            assert view.data_ptr() == alone.data_ptr() == parameter.data_ptr()
        assert len(replays(views)) == 1


def test_what_is_copied_to_another_device_is_not_noted() -> None:
    """The host may read it there, which no dispatcher sees."""
    x = torch.randn(4)
    with tracing.DispatchTrace({"x": x}) as notes:
        x.to("meta")
    assert "host" in notes.refused


def test_notes_do_not_miss_calls_while_other_threads_end_theirs() -> None:
    """Another thread's are taken from a list at any time, also while this thread goes through it."""

    class Ending:
        inside = False

        @property
        def thread(self) -> int:
            declaration.active_traces.remove(self)
            return -1

    heard = []

    def ending(*_: object) -> None:
        questions.remove(ending)

    declaration.active_traces.append(Ending())
    with tracing.DispatchTrace({"x": torch.ones(3)}) as notes:
        assert declaration.own_trace() is notes
    for questions, ask in (
        (layout.overlap_questions, lambda: layout.may_overlap(torch.ones(3), torch.ones(3))),
        (env.questions, lambda: env.get("DEBUG")),
    ):
        questions += [ending, heard.append if questions is env.questions else lambda *given: heard.append(given)]
        try:
            ask()
        finally:
            del questions[:]
    assert len(heard) == 2


def test_an_operator_that_falls_back_does_so_while_it_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_plan(*_: object) -> None:
        raise ToolkitError("CuPy is missing")

    monkeypatch.setattr(COMBINE, "_planned", no_plan)
    x, s = torch.randn(3, COLS), torch.randn(COLS)
    with tracing.DispatchTrace({"x": x, "s": s}) as notes:
        made = channel_mul(x, s)
    assert_equal_bits(made, x * s)
    assert notes.refused == "CuPy is missing"
