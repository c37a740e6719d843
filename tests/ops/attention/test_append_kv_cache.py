"""append_kv_cache: destinations of tokens, rotation, codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compare import running_on
from support.places import at, error_tests
from torch import Tensor

from rtkernels import append_kv_cache, attention, attention_decode, emulate, mla_decode
from rtkernels.errors import ArgumentError

BF16, FP16, E4M3, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    x, angles = x.double().clone(), cos.shape[1]
    for i in range(angles):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + angles)
        c, s = (t[positions, i].double().unsqueeze(-1) for t in (cos, sin))
        x[..., a], x[..., b] = x[..., a] * c - x[..., b] * s, x[..., b] * c + x[..., a] * s
    return x


# Type, cache, whether pages, slots, rotation (None, False: halves, True: neighbours).
CASES = {
    "contiguous": (BF16, BF16, False, False, None),
    "pages": (FP16, FP16, True, False, None),
    "slots": (BF16, BF16, False, True, None),
    "rotation": (BF16, BF16, True, False, False),
    "rotation of neighbours": (FP16, FP16, True, True, True),
    "e4m3": (BF16, E4M3, True, False, False),
    "int8": (BF16, INT8, True, False, None),
}


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("name", CASES)
def test_tokens_arrive(name: str, place: str) -> None:
    dtype, cache, paged, slotted, interleaved = CASES[name]
    page, lengths = 4, (2, 7)
    k, v = random(2, 3, 2, 32).to(dtype), random(2, 3, 2, 48, seed=1).to(dtype)
    shape = (7, page) if paged or slotted else (2, 8)
    options: dict[str, Tensor] = {"page_table": integers([3, 1], [6, 0])} if paged and not slotted else {}
    positions = torch.tensor([[n + i for i in range(3)] for n in lengths])
    places = {}  # of tokens that fit
    for b in range(2):
        for i in range(3):
            if slotted:
                slot = ((5, -1, 27), (900, 0, 13))[b][i]
                if 0 <= slot < 28:
                    places[b, i] = divmod(slot, page)
            elif positions[b, i] < 8:
                p = int(positions[b, i])
                places[b, i] = (int(options["page_table"][b, p // page]), p % page) if paged else (b, p)
    if slotted:
        options |= {"slots": integers((5, -1, 27), (900, 0, 13)), "positions": positions.int()}
    else:
        options["seqlens"] = integers(*lengths)
    scale = {"k": torch.tensor([0.02, 0.05]), "v": torch.tensor(0.03)} if cache in (E4M3, INT8) else {}
    options |= {f"{name}_scale": t for name, t in scale.items()}
    keys = k.double()
    if interleaved is not None:
        angles = random(12, 8, seed=4)
        options |= {"cos": angles.cos(), "sin": angles.sin()}
        keys = rotated(k, options["cos"], options["sin"], positions, interleaved)
    with running_on(place) as device:
        caches = [torch.zeros(*shape, 2, width).to(cache).to(device) for width in (32, 48)]
        flag = {} if interleaved is None else {"interleaved": interleaved}
        append_kv_cache(k.to(device), v.to(device), *caches, **{n: t.to(device) for n, t in options.items()}, **flag)
    for which, values, filled in (("k", keys, caches[0].cpu()), ("v", v.double(), caches[1].cpu())):
        step = scale[which].double().expand(2).view(2, 1) if scale else torch.ones(2, 1, dtype=torch.float64)
        expected = torch.zeros(filled.shape, dtype=torch.float64)
        for (b, i), where in places.items():
            expected[where] = values[b, i]
        got = filled.double() * step
        if cache == INT8:
            limit = 0.5001 * step
            expected = expected.clamp(-127 * step, 127 * step)
        else:
            limit = expected.abs() * (2.0**-4 if cache == E4M3 else 2.0**-8) + step * 2.0**-9
        assert ((got - expected).abs() <= limit).all()


@at("cpu", "sm_80", "cuda")
def test_positions_are_those_of_the_rotation_alone(place: str) -> None:
    k, v = random(2, 3, 2, 16).to(BF16), random(2, 3, 2, 16, seed=1).to(BF16)
    angles, positions = random(12, 4, seed=4), integers((9, 0, 4), (11, 30, -2))  # the last two: not in the table
    cos, sin = angles.cos(), angles.sin()
    with running_on(place) as device:
        caches = [torch.zeros(2, 8, 2, 16, dtype=BF16, device=device) for _ in range(2)]
        rest = {"seqlens": integers(1, 4), "positions": positions, "cos": cos, "sin": sin}
        append_kv_cache(k.to(device), v.to(device), *caches, **{n: t.to(device) for n, t in rest.items()})
    keys, values = (torch.zeros(2, 8, 2, 16, dtype=torch.float64) for _ in range(2))
    turned = rotated(k, cos, sin, positions.long().clamp(0, 11), False)
    for b, first in enumerate((1, 4)):
        keys[b, first : first + 3], values[b, first : first + 3] = turned[b], v[b].double()
    assert (caches[0].cpu().double() - keys).abs().max() <= 2.0**-7 and torch.equal(caches[1].cpu().double(), values)


@at("cpu", "sm_80", "cuda")
@pytest.mark.parametrize("page", (-1, 4, 2**31 - 1))
def test_pages_that_the_cache_does_not_have(page: int, place: str) -> None:
    with running_on(place) as device:
        memory = torch.zeros(2, 6, 16, 2, 16, dtype=BF16, device=device)  # pages of others before and behind
        table, ones = integers([1, page], [page, page]).to(device), torch.ones(2, 3, 2, 16, dtype=BF16, device=device)
        append_kv_cache(ones, ones, memory[0, 1:5], memory[1, 1:5], integers(15, 3).to(device), page_table=table)
        written = memory.flatten(3).any(3).nonzero().tolist()
    assert written == [[0, 2, 15], [1, 2, 15]]


def emulated_coverage() -> None:
    """Run every kernel in the emulator."""
    with emulate("sm_90"):
        cache = torch.zeros(1, 4, 1, 8, dtype=BF16)
        append_kv_cache(random(1, 1, 8).to(BF16), random(1, 1, 8).to(BF16), cache, cache.clone(), integers(2))
        assert cache[0, 2].any()


@at("cpu", "sm_80", "cuda")
def test_a_cache_that_grows_gives_what_attention_gives(place: str) -> None:
    with running_on(place) as device:
        q, k, v = (random(2, 6, h, 64, seed=i).to(BF16).to(device) for i, h in enumerate((4, 2, 2)))
        caches = [torch.full((4, 4, 2, 64), float("nan"), dtype=BF16, device=device) for _ in range(2)]
        table = integers([2, 0], [1, 3]).to(device)
        lengths = torch.zeros(2, dtype=torch.int32, device=device)
        whole = attention(q, k, v, causal=True)
        for i in range(6):
            append_kv_cache(k[:, i], v[:, i], *caches, lengths, page_table=table)
            lengths += 1
            out = attention_decode(q[:, i], *caches, lengths, page_table=table)
            assert (out - whole[:, i]).abs().max() <= 2.0**-6


def bad(message: str, **changes: Any) -> tuple[Any, str]:
    def call() -> None:
        k = torch.zeros(2, 3, 2, 16, dtype=BF16)
        cache = torch.zeros(2, 8, 2, 16, dtype=BF16)
        given = {"k": k, "v": k, "k_cache": cache, "v_cache": cache.clone(), "seqlens": integers(0, 0)}
        append_kv_cache(**(given | changes))

    return call, message


BAD = {
    "no place": bad("seqlens and slots are both given, or neither", seqlens=None),
    "heads": bad(
        "caches have 1 heads",
        k_cache=torch.zeros(2, 8, 1, 16, dtype=BF16),
        v_cache=torch.zeros(2, 8, 1, 16, dtype=BF16),
    ),
    "scale": bad(
        "k_scale is None; expected scales", **{n: torch.zeros(2, 8, 2, 16, dtype=INT8) for n in ("k_cache", "v_cache")}
    ),
    "no scale": bad("k_scale is given; expected None", k_scale=torch.ones(())),
    "half of the angles": bad("cos and sin go together", cos=torch.ones(4, 4)),
    "angles": bad("cos has shape", cos=torch.ones(4, 32), sin=torch.ones(4, 32)),
    "no positions": bad(
        r"cos has shape \(0, 4\); expected one position or more", cos=torch.ones(0, 4), sin=torch.ones(0, 4)
    ),
    "gradient": bad(
        "append_kv_cache is not differentiable", k=torch.zeros(2, 3, 2, 16, dtype=BF16, requires_grad=True)
    ),
}
test_bad_arguments, test_bad_arguments_in_the_launchers = error_tests(BAD)


def test_places_beyond_a_cache_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    k, cache = torch.ones(2, 3, 1, 16).bfloat16(), torch.zeros(2, 8, 1, 16).bfloat16()
    pages, table = torch.zeros(4, 4, 1, 16).bfloat16(), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    places = torch.arange(6, dtype=torch.int32).view(2, 3)
    cos = torch.ones(8, 4)
    calls = {
        "seqlens puts 3 tokens at positions 0 to 8; expected 0 to 7": lambda n: append_kv_cache(
            k, k, cache, cache.clone(), torch.tensor([0, 5 + n], dtype=torch.int32)
        ),
        "seqlens puts 3 tokens at positions 5 to 8; expected 0 to 7": lambda n: append_kv_cache(
            k, k, pages, pages.clone(), torch.tensor([5, 5 + n], dtype=torch.int32), page_table=table
        ),
        "slots has 11 to 16; expected": lambda n: append_kv_cache(k, k, pages, pages.clone(), slots=places + (10 + n)),
        "positions has 3 to 8; expected 0 to 7, rows of cos": lambda n: append_kv_cache(
            k, k, pages, pages.clone(), slots=places, positions=places + (2 + n), cos=cos, sin=cos
        ),
        "seqlens has 9 to 9; expected 0 to 8, keys of the cache": lambda n: attention_decode(
            k[:, :1], cache, cache, torch.tensor([8 + n, 8 + n], dtype=torch.int32)
        ),
        "seqlens has 9 to 9; expected 0 to 8, keys of the cache ": lambda n: mla_decode(
            k[:, :1], cache, torch.tensor([8 + n, 8 + n], dtype=torch.int32), value_width=16
        ),
    }
    monkeypatch.setenv("RTKERNELS_DEBUG", "1")
    for expected, call in calls.items():
        call(0)
        with pytest.raises(ArgumentError, match=expected.strip()):
            call(1)
