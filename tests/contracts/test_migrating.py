"""Every call of docs/how_to/migrate.md, executed; the wrappers of ``rtkernels.compat`` against plain calls."""

from __future__ import annotations

import re

import pytest
import torch
from support.catalogues import FLAGGEMS, FLASHRT, LINGHE
from support.migrating import DOCUMENT, K, M, N, calls, names

import rtkernels
from rtkernels.compat import aten, gn


@pytest.mark.parametrize(("there", "here"), [pytest.param(*call, id=f"{i}") for i, call in enumerate(calls())])
def test_call(there: str, here: str) -> None:
    result = eval(here, names())
    if isinstance(result, torch.Tensor):
        assert result.dim() > 2 or result.float().isfinite().all(), there


def test_the_document_has_many_calls() -> None:
    rows = [
        line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| ") and "`rtk." in line
    ]
    assert len(calls()) == len(rows) > 50


def test_gn() -> None:
    t = names()
    b4, b8 = t["j4"].t(), t["w8"].t()
    same = {
        "int4_mm": (gn.int4_mm(t["i4"], b4), rtkernels.scaled_mm(t["i4"], t["j4"], packed="int4")),
        "row_scaled_int4_mm": (
            gn.row_scaled_int4_mm(t["i4"], b4, t["sa"][:, None], t["sw"][None]),
            rtkernels.scaled_mm(t["i4"], t["j4"], t["sa"], t["sw"], packed="int4"),
        ),
        "fp8_mm": (gn.fp8_mm(t["a8"], b8), rtkernels.scaled_mm(t["a8"], t["w8"])),
        "row_scaled_fp8_mm": (
            gn.row_scaled_fp8_mm(t["a8"], b8, t["sa"][:, None], t["sw"][None]),
            rtkernels.scaled_mm(t["a8"], t["w8"], t["sa"], t["sw"]),
        ),
        "mxfp4_mm": (
            gn.mxfp4_mm(t["a4"], t["w4"].t(), t["sa_32_t"], t["sw_32_t"], t["bias"]),
            rtkernels.scaled_mm(t["a4"], t["w4"], t["sa_32"], t["sw_32"], bias=t["bias"]),
        ),
        "nvfp4_mm": (
            gn.nvfp4_mm(t["a4"], t["w4"].t(), t["sa_16_t"], t["sw_16_t"], t["g"]),
            rtkernels.scaled_mm(t["a4"], t["w4"], t["sa_16"], t["sw_16"], global_scale=t["g"]),
        ),
        "mm": (gn.mm(t["a16"], t["w16_kn"]), rtkernels.scaled_mm(t["a16"], t["w16"])),
        "mm, fp16 sums": (
            gn.mm(t["h16"], t["v16"].t(), acc_dtype=torch.float16),
            rtkernels.scaled_mm(t["h16"], t["v16"], acc="fp16"),
        ),
        "mm, int8": (gn.mm(t["i8"], t["j8"].t()), rtkernels.scaled_mm(t["i8"], t["j8"])),
        "block2d_scaled_mm": (
            gn.block2d_scaled_mm(t["a8"], b8, t["sa_128"], t["sw_block"].t()),
            rtkernels.scaled_mm(t["a8"], t["w8"], t["sa_128"], t["sw_block"]),
        ),
    }  # fmt: skip
    for name, (got, wanted) in same.items():
        assert torch.equal(got, wanted), name


def test_gn_attention() -> None:
    t = names()
    exact = rtkernels.attention(t["q"], t["k"], t["v"]).float()
    near = gn.attn_int8_qk(t["q8"], t["k8"], t["v"], t["sq"], t["sk"])
    torch.testing.assert_close(near.float(), exact, rtol=0.05, atol=0.05)
    near = gn.attn_int8(t["q8"].transpose(1, 2), t["k8"].transpose(1, 2), t["v8"], t["sq"], t["sk"], t["sv"])
    torch.testing.assert_close(near.transpose(1, 2).float(), exact, rtol=0.05, atol=0.05)
    assert torch.equal(gn.attn(t["q8"], t["k8"], t["v"], t["sq"], t["sk"]), gn.attn_int8_qk(*map(t.get, _INT8)))
    assert torch.equal(gn.attn(t["q"], t["k"], t["v"]).float(), exact)
    scales = torch.full((1, 2, M, 2), 128, dtype=torch.uint8)
    got = gn.attn_mxfp8_qk(t["f8"], t["f8"], t["v_t"], scales, t["e8"])
    twice = t["f8"].bfloat16()
    assert torch.equal(got, rtkernels.attention(2 * twice, twice, t["v_t"], layout="bhld"))
    packed = t["pq"], t["pk"], t["pv"], t["ends"], t["ends"], M, M
    assert torch.equal(gn.varlen_attn(*packed), rtkernels.attention_varlen(*packed))


_INT8 = ("q8", "k8", "v", "sq", "sk")


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 multiplies fp8 with scales of rows on a GPU only")
def test_torch_order() -> None:
    t = names()
    pairs = ((t["one_a"], t["one_w"]), (t["sa"][:, None], t["sw"][None]))
    for sa, sw in pairs:
        wanted = torch._scaled_mm(t["a8"], t["w8"].t(), sa, sw, out_dtype=torch.bfloat16)
        torch.testing.assert_close(aten.scaled_mm(t["a8"], t["w8"].t(), sa, sw), wanted, rtol=1e-2, atol=1e-2)
    assert torch.equal(aten.int_mm(t["i8"], t["j8"].t()), torch._int_mm(t["i8"], t["j8"].t()))
    b = t["w16"].expand(3, -1, -1).contiguous()
    wanted = torch._grouped_mm(t["a16"], b.transpose(1, 2), offs=t["offs"])
    torch.testing.assert_close(aten.grouped_mm(t["a16"], b.transpose(1, 2), t["offs"]), wanted, rtol=1e-2, atol=1e-2)
    got = aten.grouped_mm(t["dy"].t(), t["x"], t["offs"])
    assert got.shape == (3, N, K) and got.dtype == torch.bfloat16


def test_flaggems_forms() -> None:
    """Forms whose names say little: the latent cache, the softmax that is not renormalised, heads of length 1."""
    latent, position = torch.randn(1, 3, 1, 64).bfloat16(), torch.randn(1, 3, 1, 32).bfloat16()
    cache = torch.zeros(2, 4, 1, 96).bfloat16()
    rtkernels.append_kv_cache(
        latent, position, *cache.split((64, 32), -1), slots=torch.tensor([[6, -1, 0]], dtype=torch.int32)
    )
    assert torch.equal(cache.view(8, 96)[[6, 0]], torch.cat((latent, position), -1)[0, [0, 2], 0])
    assert not cache.view(8, 96)[[1, 2, 3, 4, 5, 7]].any()
    logits = torch.randn(5, 8)
    wanted = logits.softmax(1).topk(3)
    routing = rtkernels.topk_router(logits, 3)
    torch.testing.assert_close(routing.probs, wanted.values)
    assert torch.equal(routing.indices.long(), wanted.indices)
    t = torch.randn(5, 2, 64)
    wanted = t / (t.square().sum(-1, keepdim=True) + 1e-12).sqrt()
    torch.testing.assert_close(rtkernels.rms_norm(t, eps=1e-12 / 64) * 64**-0.5, wanted)


@pytest.mark.parametrize(
    ("library", "names", "without"), [("linghe", LINGHE, 4), ("FlashRT", FLASHRT, 2), ("FlagGems", FLAGGEMS, 4)]
)
def test_every_function_of_a_library_has_a_call(library: str, names: list[str], without: int) -> None:
    """All but those that the document says have no counterpart."""
    text = DOCUMENT.read_text(encoding="utf-8")
    named = {word for there, _ in calls() for word in re.findall(r"\w+(?:::\w+)?", there)}
    named |= {word for there, _ in calls() for word in re.findall(r"\w+\.\w+", there)}
    absent = [name for name in names if name not in named]
    assert len(absent) <= without, f"{library}: no call for {', '.join(absent)}"
    assert all(re.search(rf"`{re.escape(name)}`", text) for name in absent), f"{library}: not mentioned: {absent}"
