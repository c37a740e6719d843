"""Functions over lists of tensors: bad input, process groups, torch.compile, graphs, streams, size."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from support.compare import assert_close, running_on
from support.interpreter import Program
from support.multi_tensor_cases import exact_norms
from support.places import at
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels.errors import ArgumentError
from rtkernels.ops.multi import multi_tensor as module

# ---- bad input ------------------------------------------------------------------------------------------------------


_meta = torch.device("meta")


@at("cpu", "sm_80", "cuda")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: [x, torch.ones(4, device=_meta)], r"tensors\[1\] is on meta; expected .*, that of the first tensor"),
        (
            lambda x: [x, x[:, ::2]],
            r"tensors\[1\] has shape \(4, 4\) and strides \(8, 2\), which leave gaps or overlap",
        ),
        (lambda x: [x, x[:1].expand(4, 8)], r"tensors\[1\] has .* strides \(0, 1\), which leave gaps or overlap"),
        (lambda x: [x, x.double()], r"tensors\[1\] has dtype float64; expected one of bfloat16, float16, float32"),
        (lambda x: [x, x.to_sparse()], r"tensors\[1\] has layout torch.sparse_coo; expected a dense tensor"),
        (lambda x: [x, 3.0], r"tensors\[1\] is a float; expected a torch.Tensor"),
        (lambda x: x, "tensors is a torch.Tensor; expected a list"),
    ],
)
def test_lists_that_cannot_be_walked(place: str, make, message: str) -> None:
    with running_on(place) as device:
        tensors = make(torch.ones(4, 8, device=device))
        for call in (
            lambda: rtkernels.multi_norm(tensors),
            lambda: rtkernels.multi_count_zeros(tensors),
            lambda: rtkernels.multi_scale_(tensors, 2.0),
            lambda: rtkernels.multi_clip_norm_(tensors, 2.0),
        ):
            with pytest.raises(ArgumentError, match=message):
                call()


@pytest.mark.gpu
def test_lists_on_two_devices() -> None:
    x, y = torch.ones(4), torch.ones(4, device="cuda")
    for tensors in ([x, y], [y, x]):
        with pytest.raises(ArgumentError, match=r"tensors\[1\] is on c.*; expected c.*, that of the first tensor"):
            rtkernels.multi_norm(tensors)
        with pytest.raises(ArgumentError, match="expected"):
            rtkernels.multi_copy_([tensors[0]], [tensors[1]])


@at("cpu", "sm_80", "cuda")
def test_bad_arguments(place: str) -> None:
    with running_on(place) as device:
        x = torch.ones(4, 8, device=device)
        cases = [
            (lambda: rtkernels.multi_norm([x], 3), "ord is 3; expected 1, 2 or math.inf"),
            (lambda: rtkernels.multi_clip_norm_([x], -1.0), "max_norm is -1.0; expected a number of at least 0"),
            (lambda: rtkernels.multi_clip_norm_([x], math.nan), "max_norm is nan"),
            (lambda: rtkernels.multi_scale_([x], torch.ones(2, device=device)), "expected a single float32 number"),
            (lambda: rtkernels.multi_scale_([x], torch.ones((), device=_meta)), "scale is on meta; expected"),
            (lambda: rtkernels.multi_copy_([x], [x, x]), "inputs has 2 tensors; expected 1, as many as outputs"),
            (lambda: rtkernels.multi_copy_([x], [x[:2]]), r"inputs\[0\] has shape \(2, 8\); expected \(4, 8\)"),
            (
                lambda: rtkernels.multi_copy_([torch.empty(4, 8, device=device)], [x.t().contiguous().t()]),
                r"inputs\[0\] has strides \(1, 4\); expected \(8, 1\), as outputs\[0\]",
            ),
            (lambda: rtkernels.tensor_list([x, x[:, 1:]]), "leave gaps or overlap"),
        ]
        for call, message in cases:
            with pytest.raises(ArgumentError, match=message):
                call()
        assert (x == 1).all()


# ---- process groups -------------------------------------------------------------------------------------------------


_MEMBER = """
import math, sys, torch, torch.distributed as dist, rtkernels
rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
world = dist.group.WORLD
whole = [torch.randn(40, 9, generator=torch.Generator().manual_seed(s)) for s in range(3)]
whole[1][5] = 0.0
shards = [t.chunk(size)[rank].clone() for t in whole]
for ord in (2.0, 1.0, math.inf):
    want, want_each = rtkernels.multi_norm(whole, ord, per_tensor=True)
    got, each = rtkernels.multi_norm(shards, ord, per_tensor=True, group=world)
    torch.testing.assert_close((got, each), (want, want_each), rtol=2e-7, atol=0)
    torch.testing.assert_close(rtkernels.multi_norm(shards if rank else [], ord, group=world),
                               rtkernels.multi_norm([t.chunk(size)[1] for t in whole], ord), rtol=2e-7, atol=0)
count, each = rtkernels.multi_count_zeros(shards, per_tensor=True, group=world)
assert count == 9 and each.tolist() == [0, 9, 0], (count, each)
for ord in (2.0, math.inf):
    odd = [torch.full((3,), math.nan if rank == 1 else math.inf)]
    assert rtkernels.multi_norm(odd, ord, group=world).isnan()
    odd = [torch.full((3,), math.inf if rank == 1 else 1.0)]
    assert rtkernels.multi_norm(odd, ord, group=world) == math.inf

from rtkernels.optim import clip_grad_norm_
together, mine = ([torch.nn.Parameter(torch.zeros_like(t)) for t in ts] for ts in (whole, shards))
for ps, ts in ((together, whole), (mine, shards)):
    for p, t in zip(ps, ts):
        p.grad = t.clone()
want, got = torch.nn.utils.clip_grad_norm_(together, 0.1), clip_grad_norm_(mine, 0.1, group=world)
torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
for p, q in zip(mine, together):
    torch.testing.assert_close(p.grad, q.grad.chunk(size)[rank], rtol=1e-6, atol=0)
dist.destroy_process_group()
print("done")
"""


@pytest.mark.one_in(3)
def test_shards_of_a_process_group(tmp_path: Path) -> None:
    root = Path(rtkernels.__file__).parent.parent
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    members = [Program("-c", _MEMBER, str(rank), "2", str(tmp_path / "store"), env=env) for rank in range(2)]
    for member in members:
        out, err = member.communicate(timeout=300)
        assert member.returncode == 0 and out.strip().endswith("done"), err


# ---- torch.compile, graphs, streams, size ---------------------------------------------------------------------------


def _everything(tensors: list[Tensor], copies: list[Tensor]) -> Tensor:
    rtkernels.multi_copy_(copies, tensors, 2.0)
    norm = rtkernels.multi_clip_norm_(copies, 1.0)
    return norm + rtkernels.multi_count_zeros(copies) + rtkernels.multi_norm(copies, 1)


def _lists(device: str) -> tuple[list[Tensor], list[Tensor]]:
    tensors = [
        torch.randn(40, device=device),
        torch.randn(5000, device=device).bfloat16(),
        torch.zeros(3, device=device),
    ]
    return tensors, [torch.zeros_like(t, dtype=torch.float32) for t in tensors]


@at("cpu", "cuda")
def test_compiles_without_a_graph_break(place: str) -> None:
    tensors, copies = _lists(place)
    other = [t.clone() for t in copies]
    compiled = torch.compile(_everything, fullgraph=True, backend="aot_eager" if place == "cpu" else "inductor")
    torch.testing.assert_close(compiled(tensors, copies), _everything(tensors, other))
    for a, b in zip(copies, other, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("warm", (True, False))
def test_graph_capture(warm: bool) -> None:
    warm_lists, lists = _lists("cuda"), _lists("cuda")
    _everything(*(lists if warm else warm_lists))  # kernels must be loaded; the table need not be there
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = _everything(*lists)
    for seed in range(3):
        for i, t in enumerate(lists[0]):
            t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(seed + i)))
        want = _everything(lists[0], [torch.zeros_like(t) for t in lists[1]])
        graph.replay()
        torch.testing.assert_close(result, want)


@pytest.mark.gpu
def test_two_streams() -> None:
    lists = [[torch.randn(300_000, device="cuda") for _ in range(20)] for _ in range(2)]
    wants = [exact_norms(tensors, 2.0)[0] for tensors in lists]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in lists]
    for _ in range(20):
        gots = []
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                gots += [(rtkernels.multi_norm(lists[i]), wants[i]), (rtkernels.multi_norm(lists[1 - i]), wants[1 - i])]
        torch.cuda.synchronize()
        for got, want in gots:
            assert_close(got.cpu(), want, c=1.01)


@pytest.mark.gpu
def test_no_host_sync() -> None:
    lists = _lists("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        _everything(*lists)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    x = torch.zeros(2**31 + 4099, dtype=torch.bfloat16, device="cuda")
    y = torch.full((5,), 2.0, device="cuda")
    x[-1], x[-4098], x[2**31] = 3.0, 4.0, 12.0
    total, each = rtkernels.multi_norm([y, x], per_tensor=True)
    assert each.tolist()[1] == 13.0 and math.isclose(float(total), math.sqrt(169 + 20), rel_tol=1e-6)
    assert rtkernels.multi_count_zeros([y, x]) == 2**31 + 4096
    rtkernels.multi_scale_([x, y], 2.0)
    assert float(x[-1]) == 6.0 and float(x[-4098]) == 8.0 and rtkernels.multi_norm([x], math.inf) == 24.0


def test_rows_agree_with_themselves() -> None:
    """Rows at a size the CPU can hold: the same functions on shrunken inputs."""
    g = torch.Generator().manual_seed(0)
    for row in rows_of(module.OP.name):
        if row.name.startswith(("adamw", "lion")):
            continue
        tensors = [torch.randn(50, generator=g) for _ in range(3)]
        tensors[0][::2] = 0.0
        torch.testing.assert_close(row.ours(tensors=tensors).double(), row.exact(tensors=tensors).double())
        torch.testing.assert_close(row.torch(tensors=tensors).double(), row.exact(tensors=tensors).double())
