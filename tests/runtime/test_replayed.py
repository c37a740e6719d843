"""Public functions whose repeated calls are replayed: with their own tensors, and only if they are like that one."""

from __future__ import annotations

import linecache

import pytest
import torch
from support.compare import running_on
from support.places import at, emulated
from support.ways import assert_equal_bits
from torch import Tensor

import rtkernels
from bench.measure import host_calls
from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm.symmetric_mm import SYMMETRIC_MM
from rtkernels.runtime import env, layout
from rtkernels.runtime.call import trace as tracing
from rtkernels.runtime.call.public import public

COLS = 64
channel_mul, add_residual, repeat_heads = rtkernels.channel_mul, rtkernels.add_residual, rtkernels.repeat_heads


@pytest.fixture(autouse=True)
def _nothing_known():
    for function in (channel_mul, add_residual, repeat_heads):
        function.recent.forget()


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape) for shape in shapes]


def replays(function) -> list:
    return [known.replay for known in function.recent.known.values() if known.replay is not None]


def noted(function, *args, **kwargs) -> None:
    """Call a function two times: the second call is noted."""
    for _ in range(2):
        function(*args, **kwargs)
    assert len(replays(function)) == 1


@at("sm_80", "cuda")
def test_the_third_call_is_replayed_with_its_own_tensors(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_on(place) as device:
        pairs = [[t.to(device) for t in tensors((3, COLS), (COLS,))] for _ in range(4)]
        noted(channel_mul, *pairs[0])
        monkeypatch.setitem(channel_mul.recent._scope, "_call", None)  # which nothing comes to any more
        monkeypatch.setitem(channel_mul.recent._scope, "_function", None)
        for x, s in pairs[1:]:
            assert_equal_bits(channel_mul(x, s), x * s)


@at("sm_80", "cuda")
def test_other_calls_are_not_replayed(place: str) -> None:
    with running_on(place) as device:
        x, s, more, row = (t.to(device) for t in tensors((3, COLS), (COLS,), (4, COLS), (COLS + 1,)))
        noted(channel_mul, x, s)
        assert_equal_bits(channel_mul(more, s), more * s)
        assert_equal_bits(channel_mul(x.bfloat16(), s), (x.bfloat16().float() * s).bfloat16())
        assert_equal_bits(channel_mul(x.t().contiguous().t(), s), x * s)
        assert_equal_bits(channel_mul(x, row[1:]), x * row[1:])  # not aligned
        assert_equal_bits(channel_mul(x[:1], x[0]), x[:1] * x[0])
        with pytest.raises(ArgumentError, match="s has shape"):
            channel_mul(x, s[:3])
        with pytest.raises(ArgumentError, match="n is a float"):
            noted(repeat_heads, x, 2)
            repeat_heads(x, 2.0)


@at("sm_80", "cuda")
def test_gradients_are_not_lost(place: str) -> None:
    with running_on(place) as device:
        x, s = (t.to(device) for t in tensors((3, COLS), (COLS,)))
        noted(channel_mul, x, s)
        leaf = s.clone().requires_grad_()
        channel_mul(x, leaf).sum().backward()
        torch.testing.assert_close(leaf.grad, x.sum(0))
        with torch.no_grad():
            for _ in range(3):
                assert_equal_bits(channel_mul(x, leaf), x * s)
        assert channel_mul(x, leaf).requires_grad


@at("sm_80", "cuda")
def test_memory_that_is_given_is_checked_each_time(place: str) -> None:
    with running_on(place) as device:
        both, x = (t.to(device) for t in tensors((4, COLS), (3, COLS)))
        out = torch.empty_like(x)
        noted(add_residual, both[:3], x, out=out)
        version = out._version
        assert add_residual(both[:3], x, out=out) is out
        assert out._version == version + 1
        with pytest.raises(ArgumentError, match="out shares memory with residual"):
            add_residual(both[:3], x, out=both[1:])


@at("sm_80", "cuda")
def test_shapes_that_alternate_are_found(place: str) -> None:
    with running_on(place) as device:
        pairs = [[t.to(device) for t in tensors((rows, COLS), (COLS,))] for rows in (1, 3, 5)]
        for _ in range(4):
            for x, s in pairs:
                assert_equal_bits(channel_mul(x, s), x * s)
        assert len(replays(channel_mul)) == 3


def test_what_cannot_be_repeated_is_not_noted() -> None:
    @public
    def reads_values(x: Tensor) -> Tensor:
        return x * x.sum().item()

    @public
    def knows_a_tensor(x: Tensor) -> Tensor:
        return x + kept

    @public
    def asks_for_overlap(x: Tensor) -> Tensor:
        return x + 1 if layout.may_overlap(x, x) else x

    kept = torch.ones(4)
    with rtkernels.emulate():
        for function in (reads_values, knows_a_tensor, asks_for_overlap):
            for x in tensors(*[(4,)] * 4):
                assert_equal_bits(function(x), function.__wrapped__(x))
            (known,) = function.recent.known.values()
            assert known.replay is None and known.why_not


def test_tensors_without_memory_go_to_the_function() -> None:
    @public
    def doubled(x: Tensor) -> Tensor:
        return x + x

    with rtkernels.emulate():
        x = torch.randn(3, 4)
        for _ in range(3):
            assert_equal_bits(torch.vmap(doubled)(x), x + x)
            assert doubled(x.to("meta")).is_meta
            assert_equal_bits(doubled(x.to_sparse()).to_dense(), x + x)
    assert not doubled.recent.known


def test_a_call_that_is_to_look_at_values_does(monkeypatch: pytest.MonkeyPatch) -> None:
    @public
    def checked(x: Tensor) -> Tensor:
        if env.get("DEBUG") and x.min() < 0:
            raise ArgumentError("x is negative")
        return x + 1

    with rtkernels.emulate():
        noted(checked, torch.ones(4))
        assert_equal_bits(checked(-torch.ones(4)), torch.zeros(4))
        monkeypatch.setenv("RTKERNELS_DEBUG", "1")
        with pytest.raises(ArgumentError, match="negative"):
            checked(-torch.ones(4))


def test_views_and_results_of_torch_are_made_anew() -> None:
    @public
    def mixed(x: Tensor, parts: list[Tensor], flat: bool = False) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        half = x[:, ::2]
        total = (half + parts[0]).bfloat16()
        result = torch.empty(x.shape[0], 4, dtype=x.dtype)
        result.view(-1).copy_(half.reshape(-1))
        return half, total.view(torch.int16).view(-1), [result.t(), None, parts[1]]

    with rtkernels.emulate():
        for _ in range(4):
            x, y, z = tensors((2, 8), (2, 4), (3,))
            half, total, (result, nothing, third) = mixed(x, [y, z])
            assert half.data_ptr() == x.data_ptr() and half.stride() == (8, 2)
            assert_equal_bits(total.view(torch.bfloat16), (x[:, ::2] + y).bfloat16().view(-1))
            assert_equal_bits(result.t(), x[:, ::2].contiguous())
            assert nothing is None and third is z
        assert len(replays(mixed)) == 1


def test_memory_is_freed_when_it_is_used_no_more() -> None:
    @public
    def several(x: Tensor) -> Tensor:
        for _ in range(4):
            x = x + 1
        return x

    x = torch.zeros(4)
    with rtkernels.emulate():
        noted(several, x)
    lines = linecache.getlines("<rtkernels replay of several>")
    assert sum("del t_" in line for line in lines) == 2
    assert_equal_bits(replays(several)[0](x), x + 4)


def test_a_launch_that_the_dispatcher_does_not_see_is_noted() -> None:
    from rtkernels.ops.act.combine import COMBINE

    x, s = tensors((3, COLS), (1, COLS))
    out = torch.empty_like(x)
    operands = x, None, None, s, None, None, None, None, None, out, None, None, None
    with rtkernels.emulate("sm_80"), tracing.DispatchTrace({"x": x, "s": s, "out": out}) as notes:
        COMBINE.launch(*operands, "none", False, False, "plain", "", "none", False, 0.0, 0.0, 1.0)
    assert_equal_bits(out, x * s)
    (line,) = notes.records
    assert line.plan is not None and notes.refused is None


def test_what_nobody_uses_is_left_out() -> None:
    @public
    def more(x: Tensor, both: bool) -> Tensor | tuple[Tensor, Tensor]:
        first, second = x + 1, x.exp() * 2
        return (first, second) if both else first

    with rtkernels.emulate():
        x = torch.zeros(4)
        noted(more, x, False)
        assert_equal_bits(more(x, False), x + 1)
        assert sum("call_" in line for line in linecache.getlines("<rtkernels replay of more>")) == 1


@at("sm_80", "cuda")
def test_memory_between_launches_is_allocated_as_one(place: str) -> None:
    @public
    def three_times(x: Tensor, s: Tensor) -> Tensor:
        return channel_mul(channel_mul(channel_mul(x, s), s), s)

    with running_on(place) as device:
        for _ in range(4):
            x, s = (t.to(device) for t in tensors((3, COLS), (COLS,)))
            assert_equal_bits(three_times(x, s), x * s * s * s)
    lines = linecache.getlines("<rtkernels replay of three_times>")
    assert sum("allocate(" in line for line in lines) == 2


@at("sm_80", "cuda")
def test_every_call_counts_the_version_of_what_it_writes_back(place: str) -> None:
    with running_on(place) as device:
        x, memory = torch.randn(4, COLS).to(device), torch.empty(4 * COLS // 2 + 1, dtype=torch.uint8, device=device)
        out = memory[1:].view(4, COLS // 2)  # misaligned: a copy is written
        for _ in range(4):  # the second call is recorded
            version = out._version
            assert rtkernels.quantize_nvfp4(x, global_scale=1.0, out=out)[0] is out
            assert out._version > version


@at("sm_80", "cuda")
def test_results_are_written_where_a_copy_would_bring_them(place: str) -> None:
    @public
    def put(y: Tensor, x: Tensor, s: Tensor) -> Tensor:
        y[1:3].copy_(channel_mul(x, s))
        return y

    with running_on(place) as device:
        for _ in range(4):
            y, x, s = (t.to(device) for t in tensors((4, COLS), (2, COLS), (COLS,)))
            before, version = y.clone(), y._version
            assert put(y, x, s) is y and y._version > version
            assert_equal_bits(y, torch.cat([before[:1], x * s, before[3:]]))
        assert not any("call_" in line for line in linecache.getlines("<rtkernels replay of put>"))
        before = y.clone()
        put(y, y[:2], s)  # which is read and overwritten
        assert_equal_bits(y, torch.cat([before[:1], before[:2] * s, before[3:]]))


ALL = [name for name in host_calls.calls(rtkernels, "cpu") if hasattr(getattr(rtkernels, name.split()[0]), "recent")]
IN_PLACE = ("embedding_grad_", "lightning_attention_step", "gated_delta_rule_step", "causal_conv1d_step", "ssd_step")
TORCH_TAKES_PART = ("ssd",)  # whose calls are not recorded


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_replays_of_all_functions_give_the_same_bits(name: str) -> None:
    function = getattr(rtkernels, name.split()[0])
    case = host_calls.calls(rtkernels, "cuda")[name][1]()
    function.recent.forget()
    results = [_bits(case()) for _ in range(4)]
    replayed = 0 if name in TORCH_TAKES_PART else 1
    assert len(replays(function)) == replayed, [known.why_not for known in function.recent.known.values()]
    if name not in IN_PLACE:
        for result in results[1:]:
            for a, b in zip(results[0], result, strict=True):
                assert_equal_bits(a, b)


def _bits(result) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result.clone()]
    return [t for part in result or () for t in _bits(part)] if isinstance(result, (tuple, list)) else []


@at("sm_90", "cuda")
@pytest.mark.parametrize(("dtype", "cols"), [(torch.float32, 65), (torch.bfloat16, 65), (torch.float16, 64)], ids=str)
def test_a_noted_call_runs_the_plan_of_its_own_arguments(place: str, dtype: torch.dtype, cols: int) -> None:
    """A plan that converts its arguments, here to whole 16 bytes, is not the plan of what it converts to."""
    with running_on(place) as device:
        x, factors = torch.randn(6, cols).to(device, dtype), torch.rand(cols).to(device)
        first = rtkernels.quantize_fp8_smooth(x, factors)
        for _ in range(3):
            for got, wanted in zip(rtkernels.quantize_fp8_smooth(x, factors), first, strict=True):
                assert wanted is None or (got.dtype, got.shape, got.stride()) == (
                    wanted.dtype, wanted.shape, wanted.stride()
                )  # fmt: skip
                assert wanted is None or torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


@public
def _products(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A plan that torch's own product takes the place of, and torch's own product itself."""
    return SYMMETRIC_MM.call(a, None, None, 1.0, 0.0, 0.0), rtkernels.scaled_mm(b, b, backend="torch")


@emulated
def test_autocast_rounds_nothing_in_our_calls_of_torch() -> None:
    """Neither in the first call, nor while it is recorded, nor in replays."""
    a, b = torch.randn(1, 12, 20).bfloat16(), torch.randn(12, 20)
    with rtkernels.emulate("sm_90"):
        wanted = _products(a, b)
        _products.recent.forget()
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                for number in range(4):
                    assert_equal_bits(_products(a, b), wanted, f"call {number} under {dtype}")
    assert len(replays(_products)) == 2
