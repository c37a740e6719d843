"""Plain torch of every benchmark row has the shapes of our results: other peers would be no comparison."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import peers
from bench.measure import run
from bench.measure.values import relative_error, tensors
from bench.rows import all_rows
from bench.rows.attention.attention import head_by_head
from bench.rows.row import Row, by_sequence, gradients_of
from rtkernels.ops.attention import gated_delta_rule_reference

FIRST = {row.name: row for row in reversed(list(all_rows()))}  # of each name, the first shape
# Their results depend on values, which fake tensors do not have.
DEPENDS_ON_NUMBERS = ("grouped_mm", "grouped_wgrad", "moe_index")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FIRST if name not in DEPENDS_ON_NUMBERS])
def test_shapes_agree(name: str) -> None:
    row, shapes = FIRST[name], []
    for function in (row.ours, row.torch):
        with FakeTensorMode(allow_non_fake_inputs=True):
            shapes.append([t.shape for t in tensors(function(**row.make("cpu", torch.Generator())))])
    ours, wanted = shapes
    assert wanted and ours[: len(wanted)] == wanted


LOOPS = ("attention_bwd", "mla_attention_bwd")  # over heads, in seconds
BACKWARD = {name: row for name, row in FIRST.items() if name.endswith("_bwd") and name not in LOOPS}


@pytest.fixture
def one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch of linear attention loops over chunks of the sequence; tensors without memory need only one."""
    monkeypatch.setattr(gated_delta_rule_reference, "_CHUNK", 1 << 20)


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_that_torch_times_are_those_of_the_row(name: str, one_chunk: None) -> None:
    """The row's formula takes the row's inputs, and autograd's backward of the forward row gives the same first one."""
    row = BACKWARD[name]
    peer = peers.torch_peers(row, run.forward_of(row, FIRST.values()))["torch"]
    with FakeTensorMode(allow_non_fake_inputs=True):
        wanted = [t.shape for t in tensors(row.torch(**row.make("cpu", torch.Generator())))]
        inputs = row.make("cpu", torch.Generator())
        if row.no_graph:
            with pytest.raises(peers.Absent, match=row.no_graph):
                peer(**inputs)
            return
        assert wanted and next(t.shape for t in tensors(peer(**inputs)())) == wanted[0]


@pytest.mark.parametrize("options", [{}, {"causal": True}])
def test_peers_differentiate_attention_head_by_head(options: dict[str, bool]) -> None:
    """Inputs that only other peers read (the result and its lse) are not differentiated."""

    def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
        return (q * k).sum(-1, keepdim=True) * v

    given = {name: torch.randn(2, 3, 2, 4, generator=torch.Generator().manual_seed(0)) for name in "qkv"}
    forward = Row("a_fwd", "s", lambda *_: given, plain, head_by_head(plain), 1)
    backward = Row("a_bwd", "s", lambda *_: given, plain, plain, 1)
    inputs = {"dy": torch.ones(2, 3, 2, 4), **given, "out": torch.ones(3), "lse": torch.ones(3), **options}
    found = peers.torch_peers(backward, forward)["torch"](**inputs)()
    assert len(found) == 3
    torch.testing.assert_close(found[2], (given["q"] * given["k"]).sum(-1, keepdim=True).expand(2, 3, 2, 4))


def test_sequences_apart_give_the_gradients_of_a_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(3, 5, generator=generator) for name in ("dy", "x", "y")}
    gradients = gradients_of(lambda x, y: x.sin() * y)
    for got, want in zip(by_sequence(gradients)(**inputs), gradients(**inputs), strict=True):
        torch.testing.assert_close(got, want)


def test_gradients_of_the_ssd_row_are_ours() -> None:
    """Every gradient of the row, in the order of autograd's."""
    row, heads = FIRST["ssd_bwd"], 2
    generator = torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(1, 70, heads, 8, generator=generator) for name in ("dy", "x", "B", "C")}
    inputs |= {"dt": torch.rand(1, 70, heads, generator=generator), "A": -torch.rand(heads, generator=generator)}
    inputs |= {"D": torch.randn(heads, generator=generator), "g": inputs["A"] * inputs["dt"]}
    inputs = {name: t.bfloat16() if name in ("dy", "x", "B", "C") else t for name, t in inputs.items()}
    exact = row.torch(**{name: t.double() for name, t in inputs.items()})
    assert relative_error(row.ours(**inputs), exact) < 0.01
