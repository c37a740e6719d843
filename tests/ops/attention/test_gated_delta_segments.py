"""gated_delta_rule with sequences that are split into segments: against the recurrence, and against whole sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from ops.attention import test_kda
from ops.attention.test_gated_delta_rule import BF16, FP16, check, exact, inputs, random, wgmma_scans
from support.compare import poisoned, running_on
from support.places import at
from support.ways import assert_equal_bits
from torch import Tensor

from rtkernels import batch_invariant, gated_delta_rule
from rtkernels.ops.attention import gated_delta_rule_segments as segments
from rtkernels.ops.attention.gated_delta_rule_plan import Call
from rtkernels.runtime import targets
from rtkernels.runtime.launch.plans import Plans


@contextmanager
def segments_of(rows: int) -> Iterator[None]:
    """Let segments have so many rows; 0: let sequences be whole."""
    with mock.patch.object(segments, "segment_rows", lambda *_: rows):
        Plans.forget_all()
        yield
    Plans.forget_all()


# tokens, key heads, heads, widths of k and v, type, rows of a segment
CASES = {
    "a last chunk of 8 rows": (200, 1, 1, 16, 24, BF16, 64),
    "two segments": (70, 1, 2, 64, 40, FP16, 64),
    "segments of two chunks": (448, 1, 1, 8, 8, BF16, 128),
    "three tiles of v, two of keys": (260, 1, 1, 96, 136, BF16, 64),
    "longer than the sequence": (40, 1, 1, 16, 16, BF16, 64),
    "as models": (320, 1, 2, 128, 128, BF16, 64),
}


@at("sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, place: str) -> None:
    *sizes, dtype, rows = CASES[name]
    with segments_of(rows):
        check(inputs(*sizes, 1, dtype), None, place)


@at("sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("rows", (64, 128))
def test_packed_sequences(rows: int, place: str) -> None:
    """Among them sequences of no and one token, one that begins inside of a chunk, and rows of no sequence."""
    with segments_of(rows):
        check(inputs(480, 1, 2, 16, 16, 6, BF16), [0, 1, 1, 130, 137, 400, 464], place)


@at("sm_90", "cuda")
@pytest.mark.parametrize("d_v", (64, 136))
def test_two_groups_of_columns(d_v: int, place: str) -> None:
    """Blocks with two consumer warpgroups; with 64 columns of v, one of these and one of transitions."""
    with wgmma_scans(2, 1), segments_of(64):
        check(inputs(330, 1, 1, 16, d_v, 2, BF16), [0, 70, 330], place)


@at("sm_80", "sm_90", "cuda")
def test_channels(place: str) -> None:
    with segments_of(64):
        check(test_kda.inputs(260, 2, 96, 40, 2, BF16), [0, 20, 256], place)
        check(test_kda.inputs(200, 1, 16, 16, 1, FP16, decay=5.0), None, place)


def both(rows: int, **given: Tensor) -> list[tuple[Tensor, ...]]:
    """Return results and gradients of whole sequences, and with segments."""
    found = []
    for count in (0, rows):
        with segments_of(count), poisoned():
            leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
            results = gated_delta_rule(**leaves, return_state=True, l2norm=True)
            incoming = [random(*t.shape, seed=30 + i).to(t) for i, t in enumerate(results)]
            gradients = torch.autograd.grad(results, list(leaves.values()), incoming)
            found.append((*(t.detach() for t in results), *gradients))
    return found


@at("sm_80", "sm_90", "cuda")
def test_batches(place: str) -> None:
    """Of two sequences, whose rows are apart in memory."""
    with running_on(place) as device:
        q, k, v, g, beta, _ = inputs(2 * 260, 1, 2, 16, 16, 1, BF16)
        rows = [t.view(260, 2, *t.shape[1:]).transpose(0, 1).to(device) for t in (q, k, v, g, beta)]
        given = dict(zip(("q", "k", "v", "g", "beta"), rows, strict=True))
        whole, split = both(64, **given, initial_state=random(2, 2, 16, 16, seed=6).to(device))
        for one, other in zip(whole, split, strict=True):
            error = (one.float() - other.float()).abs().max().item()
            assert error <= 2.0**-6 * one.float().abs().max().item()


# log decay, beta, equal keys
HARD = {
    "strong decays": (-20.0, 0.5, False),
    "no decay": (0.0, 0.5, False),
    "beta 1": (0.0, 1.0, False),
    "equal keys": (-0.001, 1.0, True),
    "reflections": (-0.001, 2.0, True),
    "reflections of all directions": (0.0, 2.0, False),
}


@at("sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("name", HARD)
def test_errors_are_those_of_whole_sequences(name: str, place: str) -> None:
    decay, factor, equal = HARD[name]
    q, k, v, g, _, state = inputs(448, 1, 1, 32, 16, 1, BF16)
    if equal:
        k = k[:1].expand_as(k).contiguous()
    tensors = [q, k, v, torch.full_like(g, decay), torch.full_like(g, factor), state]
    want = exact(*(t.double() for t in tensors), [0, 448], True)
    with running_on(place) as device:
        q, k, v, g, beta, state = (t.to(device) for t in tensors)
        rows = dict(zip(("q", "k", "v", "g", "beta"), (t.unsqueeze(0) for t in (q, k, v, g, beta)), strict=True))
        errors = []
        for out, final, *_ in both(64, **rows, initial_state=state):
            pairs = ((out[0], want[0]), (final, want[1]))
            errors.append([(got.cpu().double() - of).norm() / of.norm() for got, of in pairs])
    for whole, split in zip(*errors, strict=True):
        assert split <= 1.25 * whole + 2.0**-10, f"{split:.3g}, whole sequences {whole:.3g}"


@at("sm_80", "sm_90", "cuda")
def test_transitions_that_overflow_do_not_meet_states_of_zeros(place: str) -> None:
    with running_on(place) as device:
        q, k, v, g, beta, _ = (t.unsqueeze(0).to(device) for t in inputs(800, 1, 1, 16, 16, 1, BF16))
        k, v, g, beta = k[:, :1].expand_as(k), 0 * v, 0 * g, torch.full_like(beta, 3.0)
        with segments_of(256):
            out, final = gated_delta_rule(q, k, v, g, beta, return_state=True, l2norm=True)
        assert not out.any() and not final.any()


@at("sm_80", "sm_90", "cuda")
def test_values_that_are_not_finite_stay_in_their_column(place: str) -> None:
    """And in later rows."""
    with running_on(place) as device:
        q, k, v, g, beta, _ = (t.unsqueeze(0).to(device) for t in inputs(330, 1, 1, 16, 16, 1, BF16))
        v[0, 70, 0, 3] = torch.inf
        with segments_of(64):
            out = gated_delta_rule(q, k, v, g, beta, l2norm=True)
        assert out[..., :3].isfinite().all() and out[..., 4:].isfinite().all() and out[:, :64].isfinite().all()
        assert not out[:, 128:, :, 3].isfinite().any()


@at("sm_90", "cuda")
def test_equal_bits_twice(place: str) -> None:
    tensors = inputs(260, 1, 2, 16, 16, 1, BF16)
    with segments_of(64):
        assert_equal_bits(check(tensors, None, place), check(tensors, None, place))


# ---- the choice ---------------------------------------------------------------------------------------------------


@contextmanager
def h200() -> Iterator[None]:
    info = SimpleNamespace(sm_count=132, target=targets.parse("sm_90a"))
    with mock.patch.object(segments, "device_info", lambda _: info):
        yield


def rows_of(sequences: int, length: int, heads: int, packed: bool = False, gradients: bool = False) -> int:
    call = Call("bf16", BF16, sequences, length, heads, heads, 128, 128, packed, 1.0, True)
    return segments.split(call, 0, gradients).segment


def test_few_long_sequences_are_split() -> None:
    with h200():
        for gradients in (False, True):
            assert 0 < rows_of(1, 32768, 8, gradients=gradients) <= 32768 // 8
            assert rows_of(1, 32768, 8, True, gradients) == rows_of(1, 32768, 8, False, gradients)
            assert rows_of(1, 8192, 8, gradients=gradients)
        for rows in (rows_of(1, n, h) for n in (4096, 8191, 100000) for h in (1, 2, 5, 16)):
            assert rows > 0 and rows % 64 == 0


def test_others_are_not_split() -> None:
    with h200():
        assert not any(rows_of(*sizes) for sizes in ((1, 8192, 32), (1, 32768, 64), (8, 4096, 32), (1, 512, 8)))
        assert not any(rows_of(n, length, 8, True) for n in (0, 1, 64, 1000) for length in (0, 1, 300))
        assert rows_of(0, 0, 8) == rows_of(1, 0, 8) == rows_of(3, 1, 8) == 0


def test_the_batch_does_not_choose_with_batch_invariance() -> None:
    with h200(), batch_invariant(1):
        assert rows_of(1, 32768, 8) == 0
