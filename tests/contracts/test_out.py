"""``out=`` of every public function, and what it promises: after two calls with all results given there is no
allocation, no copy and no host synchronisation, and the launches are the same."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import pieces
from support.compare import assert_same_bits
from support.places import at, emulated
from torch import Tensor
from torch.overrides import TorchFunctionMode

import rtkernels
from contracts import test_dynamic_rows
from contracts.test_dynamic_rows import CALLS, OWNERS, _inputs
from rtkernels.emulator import _launch
from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.plans import Plans

ROWS = 6
# Functions that torch does a part of: what they still allocate or copy, and why.
COPIED = {
    "attention_quantized": "in this call scales are not dense",
    "cross_entropy": "the loss is one of several numbers that a kernel writes together",
    "dequantize_fp8_smooth": "the result is converted to its dtype",
    "fp8_linear": "codes are padded to what products want",
    "gated_delta_rule": "matrices of chunks are allocated for each call",
    "indexer_logits": "in this call weights are converted to float32",
    "indexer_topk": "in this call weights are converted to float32",
    "jsd": "the loss is one of several numbers that a kernel writes together",
    "kl_div": "the loss is one of several numbers that a kernel writes together",
    "linear_cross_entropy": "it is a loop over chunks of rows, with products of torch",
    "linear_divergence": "it is a loop over slabs of the vocabulary, with products of torch",
    "linear_logprob": "it is a loop over slabs of the vocabulary, with products of torch",
    "merge_attention": "in this call lse is not dense",
    "moe_permute_fp8": "offsets of experts are worked out by torch",
    "moe_permute_smooth_t": "offsets of experts are worked out by torch",
    "multi_count_zeros": "numbers of all tensors are added up by torch",
    "multi_norm": "numbers of all tensors are added up by torch",
    "nonzero_mv": "sums of parts of the rows are allocated for each call",
    "sage_attention": "what smoothing took from lse is added by torch",
    "smooth_factors": "it is a formula of torch on one vector",
    "sparse_mla": "the log-sum-exp is computed with the result, and allocated if it is not asked for",
    "ssd": "time steps and decays are computed by torch first",
}
# In the emulator; the others with --full, and all of them on a GPU.
QUICK = {
    *("row_dot", "softmax", "quantize_fp8", "glu_fp8", "rope", "topk_router", "moe_permute", "transpose", "embedding"),
    *("group_rms_norm_gate", "cross_entropy", "rms_norm_fp8"),
}
# Functions with an operator that writes into `out`; tests of their families try that.
HAVE_THEIR_OWN = {
    *("rms_norm", "layer_norm", "index_select", "scatter_add", "scaled_mm", "grouped_mm", "grouped_mm_masked"),
    *("grouped_wgrad", "attention", "attention_varlen", "quantize_nvfp4", "quantize_mxfp8", "quantize_mxfp4"),
}

# They write to memory of the caller, return no tensor, or are for when a model is loaded.
WITHOUT_OUT = {"append_kv_cache", "moe_index", "moe_rows", "check_labels", "tensor_list", "fp8_weight"}
WITHOUT_OUT |= {"rope_table", "nvfp4_scale_bytes"}
OTHER_KERNEL = {"glu"}  # which has one for the options of inference
CHANGES_ITS_STATE = {"lightning_attention_step", "gated_delta_rule_step", "causal_conv1d_step", "ssd_step"}

NAMES = sorted(
    name
    for name in {call.partition(",")[0] for call in CALLS}
    if "out" in inspect.signature(getattr(rtkernels, name)).parameters
    and name not in HAVE_THEIR_OWN | CHANGES_ITS_STATE
)


def _captured(name: str, monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> Callable[..., Any]:
    """Return the call that ``CALLS[name]`` makes, as a function of `out` alone."""
    function, seen = getattr(rtkernels, name), []

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return function(*args, **kwargs)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(rtkernels, name, spy)
        patch.setattr(test_dynamic_rows, "COUNTS", torch.tensor([1, 0, 3, 2]))  # all rows belong to an expert
        CALLS[name](*_inputs(ROWS))
    args, kwargs = _moved(seen[0], device)

    @torch.no_grad()
    def call(out: Any = None) -> Any:
        return function(*args, **kwargs) if out is None else function(*args, **kwargs, out=out)

    return call


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device).copy_(value)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_moved(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if hasattr(value, "__dataclass_fields__"):
        return type(value)(**{f: _moved(getattr(value, f), device) for f in value.__dataclass_fields__})
    return value


def _as_list(result: Any) -> list[Any]:
    return [result] if isinstance(result, Tensor) else list(result)


def _memory_for(result: Any) -> Any:
    def like(t: Any) -> Any:
        return (
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) if isinstance(t, Tensor) else None
        )

    return like(result) if isinstance(result, Tensor) else tuple(map(like, result))


class _Watch(TorchFunctionMode):
    """Notes what torch is asked for that makes memory, copies, or waits for the device."""

    WAITS = (Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.nonzero)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        if func in self.WAITS or func is Tensor.copy_:
            self.found.append(name)
        elif isinstance(result, Tensor) and result.numel() and name not in ("__get__", "tensor"):  # a tensor map
            given = [t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)]
            if result.untyped_storage().data_ptr() not in given:
                self.found.append(name)
        return result


@pytest.mark.parametrize("name", sorted(set(OWNERS) - WITHOUT_OUT))
def test_every_function_that_returns_tensors_has_out(name: str) -> None:
    function = getattr(rtkernels, name)
    problem = "" if isinstance(function, type) else pieces.out_parameter(name, function)
    assert not problem, problem


@pytest.mark.parametrize("name", NAMES)
def test_references_write_into_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = _captured(name, monkeypatch)
    wanted = call()
    out = _memory_for(wanted)
    _check_results(call(out), wanted, out)


@emulated
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_promise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = _captured(name, monkeypatch)
    launches: list[Any] = []
    run = _launch.Bound.__call__

    def noted(bound: Any, *args: Any) -> None:
        launches.append((bound.kernel.name, bound.expression, bound.grid, bound.block))
        run(bound, *args)

    monkeypatch.setattr(_launch.Bound, "__call__", noted)
    with rtkernels.emulate("sm_90"):
        wanted = call()
        plain, sequences = list(launches), []
        out = _memory_for(wanted)
        for _ in range(2):
            call(out)  # the second call is recorded
        for _ in range(2):
            for t in _as_list(out):
                if t is not None:
                    t.view(torch.int8).fill_(0x55) if t.dtype.itemsize == 1 else t.fill_(85)
            launches.clear()
            with _Watch() as watch:
                got = call(out)
            sequences.append(list(launches))
            _check_results(got, wanted, out)
            if name not in COPIED:
                assert watch.found == []
    assert sequences[0] == sequences[1]
    assert sequences[0] == plain or name in OTHER_KERNEL


def _check_results(got: Any, wanted: Any, out: Any) -> None:
    assert type(got) is type(wanted)
    for mine, right, given in zip(_as_list(got), _as_list(wanted), _as_list(out), strict=True):
        if isinstance(right, Tensor):
            assert mine is given
            assert_same_bits(mine, right)
        else:
            assert given is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_promise_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = _captured(name, monkeypatch, "cuda")
    wanted = call()
    out = _memory_for(wanted)
    for _ in range(3):
        call(out)
    torch.cuda.synchronize()
    count = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = call(out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if name not in COPIED:
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == count
    _check_results(got, wanted, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(out)
    for t in _as_list(out):
        if t is not None:
            t.zero_()
    graph.replay()
    torch.cuda.synchronize()
    _check_results(got, wanted, out)


# ---- bad outputs ----------------------------------------------------------------------------------------------------


def test_outputs_that_will_not_do_are_refused_by_name() -> None:
    x = torch.randn(4, 128)
    for warm in (False, True):
        for out, message in {
            (torch.empty(5),): r"out has shape \(5,\); expected \(4,\)",
            (torch.empty(4, dtype=torch.float64),): "out has dtype float64; expected float32",
            (torch.empty(1).expand(4),): r"out has strides \(0,\); expected memory of its own",
            (x[0, :4],): "out shares memory with x; expected its own",
            (torch.empty(4, device="meta"),): "out is on meta; expected cpu",
            (3,): "out is a int; expected a torch.Tensor or None",
        }.items():
            with rtkernels.emulate("sm_80"), pytest.raises(ArgumentError, match=message):
                rtkernels.row_dot(x, x, out=out[0])
        rtkernels.row_dot(x, x, out=torch.empty(4)) if not warm else None
    codes, scale = torch.empty(4, 128, dtype=torch.float8_e4m3fn), torch.empty(4, 1)
    with pytest.raises(ArgumentError, match=r"out\[1\] has shape"):
        rtkernels.quantize_fp8(x, granularity="group", out=(codes, scale[0]))
    with pytest.raises(ArgumentError, match="out has 3 tensors; expected 2"):
        rtkernels.quantize_fp8(x, granularity="group", out=(codes, scale, scale.clone()))
    with pytest.raises(ArgumentError, match=r"out\[1\] shares memory with out\[0\]"):
        rtkernels.quantize_fp8(x, granularity="group", out=(codes, codes.view(torch.float32)[:, :1]))
    with pytest.raises(ArgumentError, match=r"row_dot with out= is not differentiable"):
        rtkernels.row_dot(x.clone().requires_grad_(), x, out=torch.empty(4))
    codes.view(torch.uint8).fill_(7)
    with pytest.raises(ArgumentError, match=r"out\[2\] is a tensor; expected None"):
        rtkernels.rms_norm_fp8(x, out=(codes, scale, scale.clone()))
    assert codes.view(torch.uint8).eq(7).all(), "changed although it was refused"


@at("cpu", "sm_80")
def test_out_may_be_the_input_where_rows_allow_it(place: str) -> None:
    x = torch.randn(5, 40)
    wanted = rtkernels.softmax(x)
    with rtkernels.emulate(place) if place != "cpu" else torch.no_grad():
        for _ in range(2):
            y = x.clone()
            assert rtkernels.softmax(y, out=y) is y
            torch.testing.assert_close(y, wanted)
        with pytest.raises(ArgumentError, match="out shares memory with x; expected its own, or x itself"):
            rtkernels.softmax(y[1:], out=y[:-1])


def test_some_results_may_be_left_to_the_function() -> None:
    x = torch.randn(4, 128)
    scale = torch.empty(4, 1)
    with rtkernels.emulate("sm_80"):
        for _ in range(3):
            codes, got = rtkernels.quantize_fp8(x, granularity="group", out=(None, scale))
            assert got is scale and codes.dtype == torch.float8_e4m3fn
            assert torch.equal(scale, rtkernels.quantize_fp8(x, granularity="group")[1])


def test_memory_that_is_not_aligned_gets_a_copy() -> None:
    x, buffer = torch.randn(4, 128), torch.zeros(4 * 128 + 1)
    out = buffer[1:].view(4, 128)
    with rtkernels.emulate("sm_80"):
        for _ in range(2):
            assert rtkernels.softmax(x, out=out) is out
            assert torch.equal(out, rtkernels.softmax(x)) and buffer[0] == 0


def test_versions_are_counted() -> None:
    x, out = torch.randn(4, 8), torch.empty(4, 8)
    with rtkernels.emulate("sm_80"):
        for _ in range(2):
            before = out._version
            rtkernels.softmax(x, out=out)
            assert out._version > before


def test_compiled_calls_write_into_out() -> None:
    x, out = torch.randn(4, 8), torch.empty(4)
    torch.compile(lambda a, b: rtkernels.row_dot(a, a, out=b), backend="eager", fullgraph=True)(x, out)
    assert torch.equal(out, rtkernels.row_dot(x, x))


def test_threads_have_scratch_of_their_own() -> None:
    x = torch.randn(64, 256)
    wanted = rtkernels.column_absmax(x)
    failed = []

    def work() -> None:
        with rtkernels.emulate("sm_80"):
            out = torch.empty_like(wanted)
            for _ in range(3):
                if not torch.equal(rtkernels.column_absmax(x, out=out), wanted):
                    failed.append(1)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# ---- the same bits as without out -----------------------------------------------------------------------------------

ALSO = ("rms_norm", "layer_norm", "index_select", "scatter_add")
IN_EMULATOR = sorted(QUICK | {*ALSO, "column_absmax", "glu"})


def _shifted(result: Any) -> Any:
    """Return memory like the results' that begins one element off an address that kernels like."""
    if not isinstance(result, Tensor):
        return tuple(map(_shifted, result)) if isinstance(result, (tuple, list)) else None
    span = 1 + sum((n - 1) * s for n, s in zip(result.shape, result.stride(), strict=True)) if result.numel() else 0
    memory = torch.empty(span + 1, dtype=result.dtype)
    memory.view(torch.uint8).fill_(0x55)
    return memory.as_strided(result.shape, result.stride(), 1)


@emulated
@pytest.mark.parametrize(
    "name", [n if n in IN_EMULATOR else pytest.param(n, marks=pytest.mark.slow) for n in sorted({*NAMES, *ALSO})]
)
def test_bits_depend_neither_on_where_out_is_nor_on_calls_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = _captured(name, monkeypatch)
    with rtkernels.emulate("sm_90"):
        Plans.forget_all()
        wanted = call()
        for fresh in (True, False):
            for place in (_shifted, _memory_for, _shifted, _memory_for):
                if fresh:
                    Plans.forget_all()
                out = place(wanted)
                _check_results(call(out), wanted, out)


@at("cpu", "sm_80")
def test_index_select_writes_into_both_results(place: str) -> None:
    x, indices, scale = torch.randn(6, 8), torch.tensor([3, -1, 0]), torch.rand(6)
    with rtkernels.emulate(place) if place != "cpu" else torch.no_grad():
        wanted = rtkernels.index_select(x, indices, scale=scale)
        for _ in range(2):
            out = torch.empty(3, 8), torch.empty(3)
            got = rtkernels.index_select(x, indices, scale=scale, out=out)
            assert got[0] is out[0] and got[1] is out[1]
            assert torch.equal(out[0], wanted[0]) and torch.equal(out[1], wanted[1])
            rows, made = rtkernels.index_select(x, indices, scale=scale, out=(None, out[1]))
            assert made is out[1] and torch.equal(rows, wanted[0])
        with pytest.raises(ArgumentError, match="out has 2 tensors; expected 1"):
            rtkernels.index_select(x, indices, out=(torch.empty(3, 8), torch.empty(3)))
        for wrong in (3, "a", torch.float32, ()):
            with pytest.raises(ArgumentError, match="out is"):
                rtkernels.index_select(x, indices, scale=scale, out=wrong)
