"""Random numbers on our kernels: Philox's own numbers, the same for the same seed, moments, limits, dropout."""

from __future__ import annotations

import pytest
import torch
from support.overrides import device_of, taken
from support.places import at, emulated

import rtkernels
from rtkernels.ops.random import philox

PLACES = ("sm_90", "cuda")
DTYPES = [torch.float32, *(pytest.param(t, marks=pytest.mark.slow) for t in (torch.bfloat16, torch.float16))]


@emulated
def test_known_answers() -> None:
    """The first words of Philox 4x32-10 for counter 0 and key 0, as its authors publish them."""
    out, seed = torch.empty(4), torch.zeros(1, dtype=torch.int64)
    with rtkernels.emulate("sm_90"):
        philox._DRAWN(out, seed, "uniform", 0.0, 1.0, 0, 0)
    words = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert out.tolist() == [(word >> 8) / 2**24 for word in words] == philox_units(4, 0, 0)


def philox_units(n: int, key: int, offset: int) -> list[float]:
    """Return numbers of Philox 4x32-10 in [0, 1), computed in Python."""
    found, low = [], 2**32 - 1
    for counter in range(-(-n // 4)):
        c = [counter & low, counter >> 32, offset & low, offset >> 32 & low]
        k = [key & low, key >> 32 & low]
        for _ in range(10):
            left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [right >> 32 ^ c[1] ^ k[0], right & low, left >> 32 ^ c[3] ^ k[1], left & low]
            k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
        found += [(word >> 8) / 2**24 for word in c]
    return found[:n]


@emulated
@pytest.mark.parametrize(("key", "offset"), [(0, 4), (-3, 0), (0x123456789ABCDEF, 1 << 33), (-(1 << 63), 2**40 + 12)])
def test_keys_and_offsets_of_the_host(key: int, offset: int) -> None:
    """The numbers and the mask follow from the generator's state; at odd addresses, too."""
    want = torch.tensor(philox_units(37, key, offset))
    with rtkernels.emulate("sm_90"):
        for first in (0, 1):
            out = torch.empty(38)[first : first + 37]
            philox._DRAWN(out, None, "uniform", 0.0, 1.0, key, offset)
            assert torch.equal(out, want)
            x = torch.randn(38)[first : first + 37]
            y, mask = philox._DROPPED(x, None, 0.25, 4.0, key, offset)
            assert torch.equal(mask, want < 0.25) and torch.equal(y, x * mask * 4.0)
            assert mask.view(torch.uint8).max() == 1  # a bool has no other bits


@emulated
def test_numbers_behind_16_bits_of_the_counter() -> None:
    """A counter has four numbers: 65,536 of them are 14 bits of it."""
    n = 65_536 + 3 * 4 + 1
    want = torch.tensor(philox_units(n, 5, 0))
    assert (want[: n - 65_536] != want[65_536:]).all()
    with rtkernels.emulate("sm_90"):
        out = torch.empty(n)
        philox._DRAWN(out, None, "uniform", 0.0, 1.0, 5, 0)
        assert torch.equal(out, want)
        _, mask = philox._DROPPED(out, None, 0.25, 4.0, 5, 0)
        assert torch.equal(mask, want < 0.25)


@emulated
def test_numbers_of_every_kind() -> None:
    """Computed in float64 from Philox's own numbers; small exponentials reveal the uniform numbers behind them."""
    n = 4000
    units = torch.tensor(philox_units(n, 7, 0), dtype=torch.float64)
    opened = ((units * 2**23).floor() + 0.5) / 2**23
    radius, angle = (-2 * opened[0::2].log()).sqrt(), 2 * torch.pi * units[1::2]
    want = {
        ("bernoulli", 0.3, 0.0): (units < torch.tensor(0.3)).double(),
        ("exponential", 2.0, 0.0): -opened.log() / 2,
        ("normal", 1.0, 0.5): 1 + 0.5 * torch.stack((radius * angle.cos(), radius * angle.sin()), 1).flatten(),
    }
    with rtkernels.emulate("sm_90"):
        for (kind, a, b), numbers in want.items():
            out = torch.empty(n)
            philox._DRAWN(out, None, kind, a, b, 7, 0)
            atol = 2e-6 if kind == "normal" else 0
            torch.testing.assert_close(out.double(), numbers, rtol=1e-5, atol=atol, msg=lambda m, k=kind: f"{k}: {m}")


def test_calls_have_offsets_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other call draws the same numbers, nor do torch's own kernels, which use the seed as key."""

    class Generator:
        offset, seed = 8, 2**64 - 5

        def get_offset(self) -> int:
            return self.offset

        def set_offset(self, offset: int) -> None:
            assert offset % 4 == 0 and offset > self.offset
            self.offset = offset

        def initial_seed(self) -> int:
            return self.seed

    class OnCuda:
        is_cuda = True

    monkeypatch.setattr(philox, "is_capturing", lambda: False)
    generator = Generator()
    states = [philox._state(OnCuda(), generator) for _ in range(3)]
    assert len(set(states)) == 3 and all(seed is None for seed, *_ in states)
    assert {key for _, key, _ in states} != {-5} and all(-(2**63) <= key < 2**63 for _, key, _ in states)
    generator.offset = 8  # as set_state does
    assert philox._state(OnCuda(), generator) == states[0]


@emulated
@at(*PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_seed_same_numbers(place: str, dtype: torch.dtype) -> None:
    device = device_of(place)

    def numbers() -> list[torch.Tensor]:
        results = [torch.randn(501, dtype=dtype, device=device), torch.rand(33, 7, dtype=dtype, device=device)]
        results += [torch.rand_like(results[1].t()), torch.randn_like(results[1])]
        results += [torch.empty(9, dtype=dtype, device=device).exponential_(2.0)]
        results += torch.native_dropout(results[0], 0.3, True)
        return results

    with taken(place, "rng"):
        torch.manual_seed(3)
        first, other = numbers(), numbers()
        torch.manual_seed(3)
        for a, b, c in zip(first, numbers(), other, strict=True):
            assert torch.equal(a, b)
            assert not torch.equal(a, c)
        generator = torch.Generator(device).manual_seed(5)
        x = torch.empty(9, device=device).normal_(generator=generator)
        assert torch.equal(x, torch.empty(9, device=device).normal_(generator=generator.manual_seed(5)))


@emulated
@at(*PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_distributions(place: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    n, device = 4999, device_of(place)
    with taken(place, "rng"):
        u = torch.empty(n, dtype=dtype, device=device).uniform_(-2, 3)
        z = torch.empty(n, dtype=dtype, device=device).normal_(1, 2)
        e = torch.empty(n, dtype=dtype, device=device).exponential_(0.5)
        b = torch.empty(n, dtype=dtype, device=device).bernoulli_(0.25)
    assert (u >= -2).all() and (u < 3).all()
    assert (e > 0).all() and e.isfinite().all() and z.isfinite().all()
    assert set(b.unique().tolist()) == {0.0, 1.0}
    for x, mean, deviation in ((u, 0.5, 5 / 12**0.5), (z, 1.0, 2.0), (e, 2.0, 2.0), (b, 0.25, 0.1875**0.5)):
        x = x.double()
        assert abs(x.mean().item() - mean) < 5 * deviation / n**0.5
        assert abs(x.std().item() / deviation - 1) < 0.1


@emulated
@at(*PLACES)
def test_normal_of_tensors(place: str) -> None:
    device = device_of(place)
    with taken(place, "rng"):
        result = torch.normal(torch.full((3000, 1), 2.0, device=device), torch.tensor([0.0, 3.0], device=device))
        other = torch.normal(torch.zeros(9, device=device), 0.0), torch.normal(1.0, torch.zeros(9, device=device))
    assert (
        (result[:, 0] == 2).all()
        and abs(result[:, 1].mean().item() - 2) < 0.3
        and abs(result[:, 1].std().item() - 3) < 0.3
    )
    assert (other[0] == 0).all() and (other[1] == 1).all()


@emulated
@at(*PLACES)
def test_dropout(place: str) -> None:
    x = torch.randn(60, 83, device=device_of(place)).t()
    with taken(place, "rng"):
        y, mask = torch.native_dropout(x, 0.25, True)
    assert (y.stride(), mask.stride(), mask.dtype) == (x.stride(), x.stride(), torch.bool)
    torch.testing.assert_close(y, x * mask / 0.75)
    assert abs(mask.double().mean().item() - 0.75) < 0.04


@pytest.mark.gpu
def test_a_replayed_graph_draws_new_numbers() -> None:
    x = torch.empty(1000, device="cuda")
    with taken("cuda", "rng"):
        x.normal_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.normal_()
        graph.replay()
        first = x.clone()
        graph.replay()
    assert not torch.equal(first, x)


@pytest.mark.gpu
def test_normal_numbers_next_to_a_logarithm_of_0() -> None:
    """One in 2^23 uniform numbers is next to 1, where the fast logarithm of 16-bit types may be 0."""
    for dtype in (torch.bfloat16, torch.float16):
        with rtkernels.use("normal_"):
            assert torch.empty(1 << 27, dtype=dtype, device="cuda").normal_().isfinite().all()
