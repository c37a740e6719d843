"""Log-probabilities from hidden states: every result and gradient against float64, special values, bad input."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.compare import assert_same_bits, running_on
from support.places import DTYPES, at
from torch import Tensor

import rtkernels
from rtkernels.errors import ArgumentError
from rtkernels.ops.loss import linear_logprob_head as linear
from rtkernels.ops.loss import linear_logprob_tiles as tiles

linear_logprob = rtkernels.linear_logprob
ALL = {f"return_{name}": True for name in ("entropy", "lse", "log_sum_sq", "mean_logit", "top1")}
IGNORED = -100


def exact(hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, options: dict[str, Any]) -> list[Tensor]:
    """Log-probabilities, entropy, lse, log-sum of squares, mean and top-1, in the dtype of the inputs."""
    a = options.get("logit_scale", 1.0) * torch.nn.functional.linear(hidden, weight, bias)
    if cap := options.get("softcap"):
        a = cap * torch.tanh(a / cap)
    warm = options.get("temperature", 1.0)
    z = a / (warm.to(a.dtype).unsqueeze(-1) if isinstance(warm, Tensor) else warm)
    candidates = ids if ids.dim() == hidden.dim() else ids.unsqueeze(-1)
    ignored = candidates == IGNORED
    dropped = ignored.all(-1)
    lse = z.logsumexp(-1)
    logp = z - lse.unsqueeze(-1)
    logprob = logp.gather(-1, candidates.long().clamp(min=0)).masked_fill(ignored, 0.0).reshape(ids.shape)
    entropy = -(logp.exp() * torch.where(logp == -torch.inf, 0.0, logp)).sum(-1)
    of_rows = (entropy, lse, logp.exp().square().sum(-1).log(), z.mean(-1))
    top1 = (z.argmax(-1) == candidates[..., 0]) & ~ignored[..., 0]
    return [logprob, *(t.masked_fill(dropped, 0.0) for t in of_rows), top1]


def make(
    dtype: torch.dtype, device: str, k: int = 0, vocabulary: int = 1003, size: int = 16, rows: tuple[int, ...] = (2, 5)
) -> tuple[Tensor, ...]:
    """Hidden states, weight, bias and ids; one row is ignored, one id of another row, and two ids are equal."""
    g = torch.Generator().manual_seed(vocabulary + k)
    shapes = ((*rows, size), (vocabulary, size), (vocabulary,))
    hidden, weight, bias = ((torch.randn(*s, generator=g) * 0.5).to(dtype).to(device) for s in shapes)
    ids = torch.randint(0, vocabulary, (*rows, k) if k else rows, generator=g)
    flat = ids.view(-1, max(k, 1))
    flat[1] = IGNORED
    if k > 1:
        flat[2, 0] = IGNORED
        flat[3, 1] = flat[3, 0]
    return hidden, weight, bias, ids.to(device)


def check(tensors: tuple[Tensor, ...], with_bias: bool = True, results: int = 5, **options: Any) -> None:
    """Compare results and gradients with fp64, from the same rounded inputs."""
    *values, ids = tensors
    values = values if with_bias else [*values[:2], None]
    frozen = options.get("save") == "projected"
    leaves = [
        None if v is None else v.detach().clone().requires_grad_(i == 0 or not frozen) for i, v in enumerate(values)
    ]
    wanted = ALL if results == 5 else {"return_entropy": True, "return_lse": True}
    found = linear_logprob(leaves[0], leaves[1], ids, bias=leaves[2], **wanted, **options)
    dtype = leaves[0].dtype
    wide = [None if v is None else v.detach().double().requires_grad_() for v in values]
    numbers = exact(*wide, ids, options)
    if results == 5:
        rounded = exact(*(None if v is None else v.float() for v in values), ids, options)[5]
        assert found[5].dtype == torch.bool and (dtype != torch.float32 or torch.equal(found[5], rounded))
    g = torch.Generator().manual_seed(1)
    incoming = [torch.randn(t.shape, generator=g).to(t.device) for t in found[:results]]
    torch.autograd.backward(found[:results], incoming)
    torch.autograd.backward(numbers[:results], [t.double() for t in incoming])
    # 16-bit logits are rounded before any statistic.
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 0.02, torch.float16: 3e-3}[dtype]
    if options.get("fp32_logits"):
        tolerance = 2e-6
    for got, one in zip(found[:results], numbers, strict=False):
        assert got.dtype == torch.float32 and got.shape == one.shape
        assert (got.double() - one).abs().max() <= tolerance * one.abs().max()
    tolerance = {torch.float32: 4e-6, torch.bfloat16: 0.025, torch.float16: 4e-3}[dtype]
    for leaf, other in zip(leaves, wide, strict=True):
        if leaf is not None and leaf.requires_grad:
            assert leaf.grad.dtype == dtype and leaf.grad.shape == leaf.shape
            assert (leaf.grad.double() - other.grad).norm() <= tolerance * other.grad.norm()


@pytest.mark.parametrize("k", (0, 3))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@at()
def test_agrees_with_float64(place: str, dtype: torch.dtype, k: int) -> None:
    with running_on(place) as device:
        tensors = make(dtype, device, k)
        warm = torch.linspace(0.5, 2.0, 10, device=device).view(2, 5)
        slabs = {"chunk_bytes": 10 * dtype.itemsize * 300}
        check(tensors, with_bias=False)
        check(tensors, logit_scale=0.7, softcap=5.0, temperature=warm, **slabs)
        check(tensors, logit_scale=-0.5, temperature=1.3, save="logits", **slabs)
        check(tensors, temperature=warm, fp32_logits=True, **slabs)
        check(tensors, softcap=3.0, fp32_logits=True, save="logits", **slabs)
        check(tensors, results=3, softcap=5.0, temperature=warm, save="projected", **slabs)
        check(tensors, results=3, fp32_logits=True, save="projected")


@at()
def test_odd_shapes(place: str) -> None:
    with running_on(place) as device:
        check(make(torch.bfloat16, device, 0, 1000, 129, (77,)), chunk_bytes=77 * 2 * 256)
        check(make(torch.float32, device, 2, 3, 1, (5,)), chunk_bytes=1)
        check(make(torch.float16, device, 70, 200, 8, (4,)))  # more candidates than threads of a row
        hidden, weight, bias, ids = make(torch.float32, device, 2)
        check((hidden.mT.contiguous().mT, weight.t().contiguous().t(), bias, ids.int().mT.contiguous().mT))
        check((hidden[0, 2], weight, bias, ids[0, 3]))
        wide = torch.full((1003, 33), torch.nan, device=device)
        wide[:, :32:2] = weight
        warm = torch.tensor(0.7, device=device).expand(2, 5)
        check((hidden[:1].expand(2, -1, -1), wide[:, :32:2], bias, ids), temperature=warm, chunk_bytes=1)


@at()
def test_no_rows(place: str) -> None:
    with running_on(place) as device:
        hidden, weight, _, ids = make(torch.bfloat16, device)
        states = hidden[:0].clone().requires_grad_()
        found = linear_logprob(states, weight, ids[:0], save="projected", return_entropy=True)
        found[0].sum().backward()
        assert [t.shape for t in found] == [(0, 5)] * 2 and states.grad.shape == (0, 5, 16)
        for save in ("stats", "logits"):
            states, head = hidden[:0].clone().requires_grad_(), weight.clone().requires_grad_()
            found = linear_logprob(states, head, ids[:0], save=save, **ALL)
            assert [t.shape for t in found] == [(0, 5)] * 6
            found[0].sum().backward()
            assert states.grad.shape == (0, 5, 16) and head.grad.shape == weight.shape and not head.grad.any()
        ignored = torch.full_like(ids, IGNORED)
        states, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        found = linear_logprob(states, head, ignored, **ALL)
        assert not any(t.any() for t in found)
        sum(t.sum() for t in found[:5]).backward()
        assert not states.grad.any() and not head.grad.any()


@at()
def test_ties_and_infinities(place: str) -> None:
    with running_on(place) as device:
        weight = torch.eye(6, device=device)
        hidden = torch.tensor(
            [[3.0, 3, 1, 0, 0, 0], [3, 3, 1, 0, 0, 0], [-torch.inf, 2, 1, 0, -torch.inf, 0], [torch.nan, 0, 0, 0, 0, 0],
             [0, 0, 0, 0, 0, 9], [1e4, 1e4 + 1, 0, 0, 0, 0]], device=device,
        )  # fmt: skip
        ids = torch.tensor([0, 1, 1, 0, 5, 1], device=device)
        finite = torch.where(hidden.isfinite(), hidden, 0.0)
        for row, chunk in itertools.product(range(len(ids)), (None, 1)):
            some = slice(row, row + 1)
            bias = torch.where(hidden[row].isfinite(), 0.0, hidden[row])  # a product would make NaN of infinity
            found = linear_logprob(finite[some], weight, ids[some], bias=bias, chunk_bytes=chunk, **ALL)
            if row == 3:
                assert all(bool(t.isnan()) for t in found[:5])
                continue
            wanted = exact(finite[some].double(), weight.double(), bias.double(), ids[some], {})
            for got, one in zip(found, wanted, strict=True):
                torch.testing.assert_close(got.double(), one.double(), rtol=1e-6, atol=1e-6)


@at()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("save", ("stats", "logits", "projected"))
def test_logits_of_ignored_rows_do_not_matter(save: str, dtype: torch.dtype, place: str) -> None:
    """Their gradient is 0, even where e to the power of a logit is infinite; NaN and infinity do not pass either."""
    with running_on(place) as device:
        *values, ids = make(dtype, device, 2, 203)
        results = {}
        for scale in (1.0, 300.0, torch.inf, torch.nan):
            hidden = values[0].clone()
            hidden[0, 1] *= scale  # row 1 is the ignored one
            leaves = [t.clone() for t in (hidden, *values[1:])]
            for leaf in leaves[: 1 if save == "projected" else 3]:
                leaf.requires_grad_()
            options = {"bias": leaves[2], "save": save, "return_entropy": True, "chunk_bytes": 1}
            logprob, entropy = linear_logprob(*leaves[:2], ids, **options)
            (logprob.sum() + entropy.sum()).backward()
            assert not logprob[0, 1].any() and not entropy[0, 1] and not leaves[0].grad[0, 1].any()
            results[scale] = [leaves[0].grad, *(t.grad for t in leaves[1:] if t.grad is not None)]
        for got, one in zip(results[300.0], results[1.0], strict=True):
            assert_same_bits(got, one)
        for scale in (torch.inf, torch.nan):
            assert_same_bits(results[scale][0], results[1.0][0])


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize("save", ("stats", "logits", "projected"))
def test_slabs_without_finite_scores(save: str, place: str) -> None:
    """The first slabs have no finite score, and e to the power of what follows is 0 in fp32."""
    with running_on(place) as device:
        hidden, weight, bias, ids = make(torch.float32, device, 2)
        bias = torch.where(torch.arange(1003, device=device) < 256, -torch.inf, bias - 200.0)
        ids = torch.where(ids < 0, ids, 256 + ids % (1003 - 256))
        check((hidden, weight, bias, ids), results=3, save=save, chunk_bytes=1)


@at("cpu", "sm_90", "cuda")
def test_every_run_gives_the_same_bits(place: str) -> None:
    with running_on(place) as device:
        hidden, weight, bias, ids = make(torch.bfloat16, device, 2)
        for save in ("stats", "logits"):
            runs = []
            for _ in range(2):
                leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
                found = linear_logprob(*leaves[:2], ids, bias=leaves[2], save=save, **ALL)
                sum(t.sum() for t in found[:5]).backward()
                runs.append((*found, *(leaf.grad for leaf in leaves)))
            for first, second in zip(*runs, strict=True):
                assert_same_bits(first.detach(), second.detach())


def test_results_without_gradients_are_the_same() -> None:
    hidden, weight, bias, ids = make(torch.float32, "cpu")
    first = linear_logprob(hidden, weight, ids, bias=bias, **ALL)
    for save in ("stats", "logits"):
        second = linear_logprob(hidden.clone().requires_grad_(), weight, ids, bias=bias, save=save, **ALL)
        for got, one in zip(first, second, strict=True):
            assert_same_bits(got, one.detach())
    assert isinstance(linear_logprob(hidden, weight, ids), Tensor)
    assert len(linear_logprob(hidden, weight, ids, return_lse=True, return_top1=True)) == 3


def test_only_needed_gradients_and_one_backward_of_logits() -> None:
    hidden, weight, _, ids = make(torch.float32, "cpu")
    states, head = hidden.clone().requires_grad_(), weight.clone()
    linear_logprob(states, head, ids).sum().backward()
    assert states.grad is not None and head.grad is None
    found = linear_logprob(states, head, ids, save="logits").sum()
    found.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="save='logits'"):
        found.backward()
    with pytest.raises(RuntimeError, match="differentiable once"):
        (grad,) = torch.autograd.grad(linear_logprob(states, head, ids).sum(), states, create_graph=True)
        grad.sum().backward()


def test_autocast() -> None:
    hidden, weight, bias, ids = make(torch.float32, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_logprob(hidden, weight, ids, bias=bias)
    wanted = linear_logprob(hidden.bfloat16(), weight.bfloat16(), ids, bias=bias.bfloat16())
    assert_same_bits(found, wanted)


@pytest.mark.parametrize("save", ("stats", "logits", "projected"))
def test_compiles_whole(save: str) -> None:
    hidden, weight, _, ids = make(torch.float32, "cpu", 2)
    frozen = save == "projected"

    def step(states: Tensor, head: Tensor, warm: Tensor) -> tuple[Tensor, ...]:
        return linear_logprob(states, head, ids, temperature=warm, save=save, return_entropy=True, return_top1=True)

    warm, runs = torch.linspace(0.5, 2.0, 10).view(2, 5), []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        states, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
        logprob, entropy, top1 = function(states, head, warm)
        (logprob.sum() + 2 * entropy.sum()).backward()
        runs.append([logprob.detach(), entropy.detach(), top1, states.grad, *([] if frozen else [head.grad])])
    for first, second in zip(*runs, strict=True):
        assert_same_bits(first, second)


@at("cpu", "sm_90", "cuda")
def test_bad_ids(place: str) -> None:
    with running_on(place) as device:
        hidden, weight, _, ids = make(torch.float32, device, 2)
        ids[1, 1, 1] = 1003
        with pytest.raises(ArgumentError, match="ids has 1003 in place 13"):
            linear_logprob(hidden, weight, ids)
            if device == "cuda":
                torch.cuda.synchronize()
                rtkernels.check_labels()


def test_bad_arguments() -> None:
    hidden, weight, bias, ids = make(torch.float32, "cpu", 2)
    warm = torch.ones(2, 5)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("weight has shape", {"weight": weight[0]}), ("hidden has shape", {"hidden": hidden[..., :3]}),
        ("weight has dtype", {"weight": weight.half()}), ("bias has shape", {"bias": bias[:4]}),
        ("bias has dtype", {"bias": bias.half()}), ("ids has dtype", {"ids": ids.float()}),
        ("ids has shape", {"ids": ids[:, :3]}), ("ids has shape", {"ids": ids[..., :0]}),
        ("ids has shape", {"ids": ids[0, :, 0]}), ("temperature has dtype", {"temperature": warm.double()}),
        ("temperature has shape", {"temperature": warm[0]}), ("temperature is 0", {"temperature": 0.0}),
        ("temperature requires", {"temperature": warm.clone().requires_grad_()}), ("softcap is", {"softcap": -1.0}),
        ("logit_scale is", {"logit_scale": float("inf")}), ("chunk_bytes is", {"chunk_bytes": 0}),
        ("save is", {"save": "all"}), ("without a group", {"vocab_start": 0}),
        ("frozen", {"save": "projected", "weight": weight.clone().requires_grad_()}),
        ("log_sum_sq", {"save": "projected", "return_log_sum_sq": True, "hidden": hidden.clone().requires_grad_()}),
    ]  # fmt: skip
    for message, given in cases:
        arguments = {"hidden": hidden, "weight": weight, "ids": ids} | given
        with pytest.raises(ArgumentError, match=message):
            linear_logprob(**arguments)


def test_slabs() -> None:
    columns = linear.columns_of_slab
    assert columns(8192, 151936, 2, 64 << 20, -1) == 4096
    assert columns(8192, 151936, 2, 1, -1) == 128
    assert columns(16, 1000, 2, 0, -1) == 1000
    head = linear.Head(
        torch.ones(8192, 2), torch.ones(1000, 2), None, linear.Options(-100, 1.0, 0.0, 1.0, False, 1, 0, 0)
    )
    assert list(itertools.chain(*head.slabs()))[-2:] == [896, 1000]


def test_small_products_are_rounded_once() -> None:
    """cuBLAS rounds the parts of a split k; it splits products that have fewer tiles than there are SMs."""
    assert linear.may_split(77, 256, 132) and linear.may_split(256, 4096, 132)
    assert not linear.may_split(8192, 16896, 132) and not linear.may_split(1, 151936, 132)


def emulated_coverage() -> None:
    hidden, weight, bias, ids = make(torch.bfloat16, "cpu")
    with rtkernels.emulate("sm_90"):
        linear_logprob(hidden.clone().requires_grad_(), weight, ids, bias=bias).sum().backward()
        tiles.PARTS_OF_TILES(hidden.view(10, 16), weight, ids.view(10, 1), IGNORED, 1003, 0, False, 1.0, 0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("save", ["stats", "logits"])
def test_graph_capture_and_replay(save: str) -> None:
    hidden, weight = (torch.randn(rows, 256, device="cuda").bfloat16() for rows in (300, 2000))
    ids = torch.randint(0, 2000, (300,), device="cuda")

    def both() -> tuple[Tensor, ...]:
        leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        logprob = linear_logprob(*leaves, ids, save=save)
        return logprob.detach(), *torch.autograd.grad(logprob.sum(), leaves)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which writes the ids
    with torch.cuda.stream(side):
        both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both()
    hidden.copy_(torch.randn_like(hidden))
    graph.replay()
    for one, other in zip(found, both(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_peak_memory() -> None:
    """Gradients, sums of hidden's gradient in fp32, and a slab: no logits of all rows."""
    rows, size, vocabulary = 4096, 1024, 65536
    hidden, weight = (torch.randn(n, size, device="cuda").bfloat16().requires_grad_() for n in (rows, vocabulary))
    ids = torch.randint(0, vocabulary, (rows,), device="cuda")

    def both() -> None:
        hidden.grad = weight.grad = None
        linear_logprob(hidden, weight, ids, return_entropy=True, chunk_bytes=64 << 20)[0].sum().backward()

    both()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    taken = torch.cuda.max_memory_allocated() - before
    gradients = 2 * size * (rows + vocabulary) + 4 * rows * size
    assert taken <= 1.1 * (gradients + (64 << 20)) < 2 * rows * vocabulary
