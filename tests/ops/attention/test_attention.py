"""attention and attention_varlen: values, gradients, masks, strides, edges, on the CPU, in the emulator and on a "
"GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.attention_exact import assert_near, exact_attention
from support.compare import poisoned, running_on
from support.places import at, emulated, error_tests
from support.ways import assert_equal_bits, captured
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import rtkernels
from rtkernels import attention, attention_varlen, emulate
from rtkernels.ops.attention import reference

BF16, FP16 = torch.bfloat16, torch.float16
TOLERANCE = {BF16: 2.0**-6, FP16: 2.0**-9}  # P and gradients of scores are rounded to the type as well as results


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = BF16, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def integers(*values: int, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def inputs(size: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return q, k and v of (batch, queries, keys, heads, heads of k, width[, width of v])."""
    batch, lq, lkv, heads, heads_kv, width, *rest = size
    shapes = ((batch, lq, heads, width), (batch, lkv, heads_kv, width), (batch, lkv, heads_kv, (rest or [width])[0]))
    return [normal(*shape, seed=i, dtype=dtype, device=device) for i, shape in enumerate(shapes)]


# Sizes, type, options. Tiles are 128 (64) queries by 64 or 32 keys.
CASES: dict[str, tuple[tuple[int, ...], torch.dtype, dict[str, Any]]] = {
    "plain": ((2, 33, 65, 2, 2, 64), BF16, {}),
    "one": ((1, 1, 1, 1, 1, 8), BF16, {}),
    "causal": ((1, 70, 130, 2, 1, 64), FP16, {"causal": True}),
    "more queries than keys": ((1, 70, 9, 1, 1, 64), BF16, {"causal": True}),
    "multi-query": ((1, 5, 64, 16, 1, 64), BF16, {"causal": True}),
    "window": ((1, 70, 90, 1, 1, 64), BF16, {"window": (13, 7)}),
    "window, causal": ((1, 70, 90, 1, 1, 64), BF16, {"window": 17, "causal": True}),
    "softcap": ((1, 20, 40, 2, 1, 64), BF16, {"softcap": 1.5, "causal": True}),
    "sinks": ((1, 20, 40, 2, 1, 64), BF16, {"sinks": torch.tensor([0.5, -1.0]), "window": 3}),
    "bias": ((2, 20, 40, 2, 1, 64), BF16, {"bias": normal(2, 1, 20, 40, seed=9, dtype=torch.float32)}),
    "bias, rows of -inf": (
        (1, 20, 40, 2, 2, 64), BF16,
        {"bias": normal(2, 20, 40, seed=9).masked_fill(normal(2, 20, 1, seed=3) > 0, float("-inf"))},
    ),
    "limits": ((2, 7, 70, 1, 1, 64), BF16, {"kv_limit": integers(3, 70, 0, 64, 65, 1, 70)}),
    "lengths": ((3, 9, 70, 2, 1, 64), BF16, {"seqused_k": integers(0, 65, 4), "causal": True}),
    "large logits": ((1, 9, 70, 1, 1, 64), BF16, {"scale": 40.0}),
}  # fmt: skip
WIDTHS: dict[str, tuple[tuple[int, ...], torch.dtype, dict[str, Any]]] = {
    "72": ((1, 17, 33, 1, 1, 72), BF16, {}),
    "96": ((1, 17, 33, 1, 1, 96), BF16, {}),
    "128": ((1, 130, 70, 2, 1, 128), BF16, {"causal": True}),
    "128, bias": ((1, 17, 33, 1, 1, 128), BF16, {"bias": normal(17, 33, seed=9)}),
    "192 and 128": ((1, 17, 33, 1, 1, 192, 128), BF16, {}),
    "192": ((1, 17, 33, 1, 1, 192), BF16, {}),
    "256": ((1, 17, 33, 1, 1, 256), BF16, {"causal": True}),
    "40 and 24": ((1, 17, 33, 2, 1, 40, 24), FP16, {"causal": True}),
}


def moved(options: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}


def check(size: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any], device: str, **others: Any) -> None:
    """Compare values and all gradients, those through lse included."""
    q, k, v = inputs(size, dtype, device)
    options = moved(options, device)
    leaves = {"q": q, "k": k, "v": v}
    for name in ("sinks", "bias"):
        if name in options:
            leaves[name] = options.pop(name)
    results = []
    for function in (attention, exact_attention):
        given = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}
        with poisoned():
            made = function(**given, **options, **(others | {"return_lse": True} if function is attention else {}))
            grads = [normal(*t.shape, seed=20 + i, dtype=dtype, device=device) for i, t in enumerate(made)]
            grads[1] = grads[1].float().masked_fill(made[1].detach() == float("-inf"), 0.0)
            grads = [g.to(t.dtype) for g, t in zip(grads, made, strict=True)]
            results.append((*made, *torch.autograd.grad(made, list(given.values()), grads)))
    for name, got, exact in zip(("out", "lse", *(f"d{n}" for n in leaves)), *results, strict=True):
        # Of softmaxes that are nearly one-hot, gradients are differences of equal numbers.
        loose = 4.0 if options.get("scale") and name.startswith("d") else 1.0
        assert_near(got, exact, 1e-4 if name == "lse" else loose * TOLERANCE[dtype], name)


@at("cpu", "sm_80", "cuda")
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, place: str) -> None:
    with running_on(place) as device:
        check(*CASES[name], device, backend="mma" if place == "sm_80" else "auto")


@at("sm_80", "cuda")
@pytest.mark.parametrize("name", WIDTHS)
def test_widths(name: str, place: str) -> None:
    with running_on(place) as device:
        check(*WIDTHS[name], device, backend="mma")


@at("cpu", "sm_80", "cuda")
def test_gradients_where_values_hardly_differ_are_as_near_as_those_of_torchs_flash_attention(place: str) -> None:
    """There the gradient of a score is a difference of nearly equal numbers, one of them from the rounded result."""
    size = (2, 33, 65, 2, 2, 64)
    q, k, v = inputs(size, BF16, "cpu")
    dout = normal(2, 33, 2, 64, seed=3)
    v = (v[:, :1].float() + 0.01 * normal(2, 65, 2, 64, seed=4, dtype=torch.float32)).to(BF16)

    def gradients(function: Any, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
        leaves = [t.to(device, dtype).requires_grad_() for t in (q, k, v)]
        return [g.double().cpu() for g in torch.autograd.grad(function(*leaves), leaves, dout.to(device, dtype))]

    def torchs(kind: SDPBackend) -> Any:
        def call(*heads: Tensor) -> Tensor:
            with sdpa_kernel(kind):
                made = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in heads))
            return made.transpose(1, 2)

        return call

    exact = gradients(torchs(SDPBackend.MATH), torch.float64)
    theirs = gradients(torchs(SDPBackend.FLASH_ATTENTION), BF16)
    with running_on(place) as device:
        ours = gradients(lambda *heads: attention(*heads), BF16, device)
    for wanted, other, got in zip(exact, theirs, ours, strict=True):
        assert (got - wanted).norm() <= 1.25 * (other - wanted).norm()


def emulated_coverage() -> None:
    """Run every kernel in the emulator."""
    with emulate("sm_90"):
        for backend in rtkernels.ops.attention.backends.ATTENTION.names:
            q, k, v, sinks = (t.requires_grad_() for t in (*inputs((1, 17, 33, 2, 1, 64), BF16, "cpu"), torch.zeros(2)))
            attention(q, k, v, sinks=sinks, causal=True, backend=backend).float().square().sum().backward()
        bias = torch.zeros(17, 33, requires_grad=True)
        attention(q, k, v, bias=bias).float().square().sum().backward()
        ends = integers(0, 5, 9)
        packed = [t[0, :11].detach() for t in (q, k, v)]
        attention_varlen(*packed, ends, ends, 5, 5)
        q, k, v = (t.requires_grad_() for t in inputs((1, 5, 9, 1, 1, 256), BF16, "cpu"))  # more than 128 wide
        attention(q, k, v).float().square().sum().backward()
        q, k, v = (t.requires_grad_() for t in inputs((1, 17, 33, 4, 1, 64), BF16, "cpu"))  # heads in parts
        attention(q, k, v, backend="sm90").float().square().sum().backward()


@at("cpu", "sm_80", "cuda")
@pytest.mark.parametrize("shape", [(1, 1, 70, 66), (2, 1, 1, 66), (4, 1, 66)], ids=str)
def test_gradient_of_a_broadcast_bias(shape: tuple[int, ...], place: str) -> None:
    """Summed over what it is broadcast over, with lengths, limits, a soft cap and grouped heads."""
    with running_on(place) as device:
        q, k, v = inputs((2, 70, 66, 4, 2, 64), BF16, device)
        options = {"softcap": 2.0, "seqused_k": integers(66, 40, device=device), "window": (40, 9)}
        g, results = normal(2, 70, 4, 64, seed=5, device=device), []
        for function in (attention, exact_attention):
            bias = normal(*shape, seed=9, dtype=torch.float32, device=device).requires_grad_()
            with poisoned():
                out = function(q, k, v, bias=bias, **options)
                out = out if function is attention else out[0]
                results.append(torch.autograd.grad(out, bias, g.to(out.dtype))[0])
        assert results[0].shape == shape
        assert_near(*results, 2.0**-6, "dbias")


@at("cpu", "sm_80", "cuda")
@pytest.mark.parametrize(("lq", "lkv"), [(0, 5), (5, 0), (0, 0)])
def test_empty_lengths(lq: int, lkv: int, place: str) -> None:
    with running_on(place) as device:
        q, k, v = (t.requires_grad_() for t in inputs((2, lq, lkv, 2, 1, 64), BF16, device))
        out, lse = attention(q, k, v, return_lse=True)
        assert out.shape == (2, lq, 2, 64) and not out.any()
        assert (lse == float("-inf")).all()
        for grad in torch.autograd.grad(out, (q, k, v), torch.ones_like(out)):
            assert not grad.any()
        for shape in ((lq,), (2, lq)):
            limit = torch.ones(shape, dtype=torch.int32, device=device)
            assert not attention(q.detach(), k, v, kv_limit=limit).any()


@at("cpu", "sm_80", "cuda")
def test_layouts_and_strides_give_the_same(place: str) -> None:
    with running_on(place) as device:
        qkv = normal(2, 40, 3, 2, 64, device=device)
        q, k, v = qkv.unbind(2)
        dense = attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
        assert torch.equal(attention(q, k, v, causal=True), dense)
        first = attention(*(t.transpose(1, 2) for t in (q, k, v)), causal=True, layout="bhld")
        assert first.is_contiguous() and torch.equal(first.transpose(1, 2), dense)
        odd = normal(2, 40, 2, 65, device=device)[..., 1:]  # strides of 130 bytes: copied
        assert torch.equal(attention(odd, k, v), attention(odd.contiguous(), k, v))
        out = torch.full_like(qkv, float("nan"))
        assert attention(q, k, v, causal=True, out=out[:, :, 1]).data_ptr() == out[:, :, 1].data_ptr()
        assert torch.equal(out[:, :, 1], dense) and out[:, :, 0].isnan().all()


@at("cpu", "sm_80", "cuda")
def test_packed_sequences(place: str) -> None:
    ends_q, ends_k = (0, 5, 5, 75, 80), (0, 9, 20, 90, 91)
    with running_on(place) as device:
        q, k, v = (normal(n, h, 64, seed=h, device=device) for n, h in ((84, 4), (95, 2), (95, 2)))
        sinks = normal(4, seed=5, dtype=torch.float32, device=device)
        leaves = [t.requires_grad_() for t in (q, k, v, sinks)]
        cu = integers(*ends_q, device=device), integers(*ends_k, device=device)
        with poisoned():
            out, lse = attention_varlen(q, k, v, *cu, 70, 70, causal=True, sinks=sinks, return_lse=True)
            g = normal(*out.shape, seed=7, device=device)
            got = torch.autograd.grad(out, leaves, g)
        wanted = [torch.zeros_like(t, dtype=torch.float64) for t in leaves]
        for b in range(4):
            rows, columns = slice(*ends_q[b : b + 2]), slice(*ends_k[b : b + 2])
            parts = [t.detach()[s].unsqueeze(0).requires_grad_() for t, s in ((q, rows), (k, columns), (v, columns))]
            sink = sinks.detach().clone().requires_grad_()
            exact, exact_lse = exact_attention(*parts, causal=True, sinks=sink)
            assert_near(out[rows], exact[0], 2.0**-6, "out")
            assert_near(lse[:, rows], exact_lse[0], 1e-4, "lse")
            grads = torch.autograd.grad(exact, (*parts, sink), g[rows].double().unsqueeze(0), allow_unused=True)
            for total, grad, where in zip(wanted, grads, (rows, columns, columns, slice(None)), strict=True):
                if grad is not None:
                    total[where] += grad.squeeze(0) if grad.dim() == 4 else grad
        for name, grad, exact in zip(("dq", "dk", "dv", "dsinks"), got, wanted, strict=True):
            assert_near(grad, exact, 2.0**-6, name)
        assert not out[80:].any() and not got[0][80:].any() and not got[1][91:].any() and not got[2][91:].any()
        assert (lse[:, 80:] == float("-inf")).all()


def test_what_lies_behind_the_lengths_does_not_matter() -> None:
    q, k, v = inputs((2, 5, 80, 2, 1, 64), BF16, "cpu")
    lengths = integers(7, 66)
    expected = attention(q, k, v, seqused_k=lengths)
    for t in (k, v):
        for b, n in enumerate(lengths.tolist()):
            t[b, n:] = float("nan")
    assert torch.equal(attention(q, k, v, seqused_k=lengths), expected)
    with emulate("sm_80"):
        assert not attention(q, k, v, seqused_k=lengths, backend="mma").isnan().any()


@pytest.mark.parametrize("options", [{}, {"softcap": 1.3}, {"left": 2, "right": 1}], ids=str)
def test_reference_by_finite_differences(options: dict[str, Any]) -> None:
    settings = {"scale": 0.4, "left": -1, "right": 0, "softcap": 0.0} | options
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 3, 2, 8), (1, 4, 1, 8), (1, 4, 1, 8), (2,), (1, 1, 3, 4))
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    g, gl = torch.randn(1, 3, 2, 8, generator=generator).double(), torch.randn(1, 2, 3, generator=generator).double()

    def loss(q, k, v, sinks, bias):
        out, lse = reference.forward(q, k, v, sinks, bias, None, None, None, None, **settings)
        return ((out * g).sum() + (lse * gl).sum()).item()

    out, lse = reference.forward(*tensors, None, None, None, None, **settings)
    grads = reference.backward(g, gl, *tensors[:3], out, lse, *tensors[3:], None, None, None, None, **settings)
    for which, grad in enumerate(grads):
        for place in range(0, tensors[which].numel(), 5):
            ends = []
            for step in (1e-5, -1e-5):
                moved_tensors = [t.clone() for t in tensors]
                moved_tensors[which].view(-1)[place] += step
                ends.append(loss(*moved_tensors))
            assert abs((ends[0] - ends[1]) / 2e-5 - grad.reshape(-1)[place].item()) < 1e-6


@at("sm_80", "cuda")
def test_results_repeat_bit_by_bit(place: str) -> None:
    with running_on(place) as device:
        q, k, v = (t.requires_grad_() for t in inputs((1, 70, 90, 4, 2, 64), BF16, device))

        def run() -> tuple[Tensor, ...]:
            out = attention(q, k, v, causal=True)
            return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

        assert_equal_bits(run(), run())


@emulated
def test_threads_in_any_order_give_the_same_bits() -> None:
    def run() -> tuple[Tensor, ...]:
        q, k, v = (t.requires_grad_() for t in inputs((1, 70, 66, 2, 1, 64), BF16, "cpu"))
        out = attention(q, k, v, causal=True, backend="mma")
        return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    with emulate("sm_80"):
        expected = run()
    for order in ("reverse", 7):
        with emulate("sm_80", order):
            assert_equal_bits(run(), expected, f"order {order}")


def test_compiles_without_graph_breaks() -> None:
    q, k, v = inputs((1, 6, 8, 2, 1, 16), BF16, "cpu")

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = attention(q, k, v, causal=True, softcap=2.0, return_lse=True)
        return out.float().sum() + lse.square().sum()

    leaves = [[t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2)]
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for function, given in zip((block, compiled), leaves, strict=True):
        function(*given).backward()
    for plain, other in zip(*leaves, strict=True):
        torch.testing.assert_close(other.grad, plain.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["mma", "auto"])
def test_one_graph_serves_all_lengths(backend: str) -> None:
    q, k, v = inputs((3, 9, 300, 4, 2, 128), BF16, "cuda")
    lengths = integers(300, 1, 0, device="cuda")
    replay = captured(lambda: attention(q, k, v, causal=True, seqused_k=lengths, backend=backend))
    for values in ((300, 1, 0), (17, 300, 129)):
        lengths.copy_(integers(*values))
        assert torch.equal(replay(), attention(q, k, v, causal=True, seqused_k=lengths, backend=backend))


def test_the_dlpack_way() -> None:
    numpy = pytest.importorskip("numpy")
    q, k, v = (t.half().numpy() for t in inputs((1, 3, 5, 2, 1, 16), FP16, "cpu"))
    out = attention(q, k, v)
    assert isinstance(out, numpy.ndarray) and out.shape == (1, 3, 2, 16)


def bad(message: str, **changes: Any) -> tuple[Any, str]:
    def call() -> None:
        q, k, v = inputs((2, 5, 7, 4, 2, 16), BF16, "cpu")
        attention(**({"q": q, "k": k, "v": v} | changes))

    return call, message


BAD = {
    "dtype": bad("q has dtype float32; expected one of bfloat16, float16", q=torch.zeros(2, 5, 4, 16)),
    "other dtype": bad("k has dtype float16; expected bfloat16", k=normal(2, 7, 2, 16, dtype=FP16)),
    "dimensions": bad("q has shape .*4 dimensions", q=normal(5, 4, 16)),
    "width": bad("multiple of 8 from 8 to 256", q=normal(2, 5, 4, 12), k=normal(2, 7, 2, 12), v=normal(2, 7, 2, 12)),
    "width of k": bad("k has heads of 24 elements; expected 16", k=normal(2, 7, 2, 24)),
    "heads": bad("q has 3 heads; expected a multiple of the 2", q=normal(2, 5, 3, 16)),
    "keys": bad("v has shape but for the last dimension", v=normal(2, 6, 2, 16)),
    "batch": bad("k has 1 sequences; expected 2", k=normal(1, 7, 2, 16), v=normal(1, 7, 2, 16)),
    "scale": bad("scale is -1.0; expected a positive number", scale=-1.0),
    "softcap": bad("softcap is -1.0", softcap=-1.0),
    "window": bad("window is -2; expected numbers from 0 on", window=-2),
    "sinks": bad("sinks has shape", sinks=torch.zeros(2)),
    "bias": bad("bias has shape .*broadcasts", bias=torch.zeros(5, 6)),
    "lengths": bad("seqused_k has dtype int64; expected int32", seqused_k=torch.zeros(2, dtype=torch.int64)),
    "limits": bad("kv_limit has shape", kv_limit=integers(1, 2)),
    "layout": bad("layout is 'lbhd'", layout="lbhd"),
    "backend": bad("backend is 'cutlass'", backend="cutlass"),
    "out": bad("out has shape", out=normal(2, 5, 4, 24)),
}
test_bad_arguments, test_bad_arguments_in_the_launchers = error_tests(BAD)


def test_packed_sequences_take_no_bias_and_both_ends() -> None:
    q, k, v = (t[0] for t in inputs((1, 5, 7, 4, 2, 16), BF16, "cpu"))
    with pytest.raises(rtkernels.ArgumentError, match="cu_seqlens_k is a NoneType; expected a torch"):
        attention_varlen(q, k, v, integers(0, 5), None, 5, 7)
    with pytest.raises(rtkernels.ArgumentError, match="max_seqlen_k is -1"):
        attention_varlen(q, k, v, integers(0, 5), integers(0, 7), 5, -1)
