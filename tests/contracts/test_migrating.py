"""Every call of docs/how_to/migrate.md, executed; the wrappers of ``rtkernels.compat`` against plain calls."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.catalogues import FLASHRT, LINGHE

import rtkernels
from rtkernels.compat import aten, gn
from rtkernels.ops.quant import pack

DOCUMENT = Path(__file__).parents[2] / "docs" / "how_to" / "migrate.md"
M, N, K = 9, 32, 256


def _calls() -> list[tuple[str, str]]:
    """Return what is there and here of every row that has a call."""
    rows = re.findall(r"^\| (.+?) \| `(rtk\..+)` \|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    return [(there.replace("`", ""), here) for there, here in rows]


def norm_row(cols: int) -> torch.Tensor:
    return torch.linspace(0.5, 2.0, cols).half()


def _names() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    x, w, gate, dy = (torch.randn(shape, generator=g) for shape in ((M, K), (N, K), (2 * N, K), (M, N)))
    given: dict[str, Any] = {"torch": torch, "rtk": rtkernels, "g": torch.tensor(1e-6), "x": x, "w": w, "dy": dy}
    given |= {name: given[name].bfloat16() for name in ("x", "w", "dy")}
    given |= {"a16": x.bfloat16(), "w16": w.bfloat16(), "h16": x.half(), "v16": w.half(), "bias": torch.ones(N)}
    given |= {"a8": x.to(torch.float8_e4m3fn), "w8": w.to(torch.float8_e4m3fn), "c": torch.ones(M, N)}
    given |= {"w16_kn": w.bfloat16().t().contiguous(), "w8_kn": given["w8"].t().contiguous()}
    given |= {"i8": (20 * x).to(torch.int8), "j8": (20 * w).to(torch.int8)}
    given |= {"i4": pack.quantize_int4(x)[0], "j4": pack.quantize_int4(w)[0]}
    given |= {"sa": torch.rand(M), "sw": torch.rand(N), "one_a": torch.tensor(0.5), "one_w": torch.tensor(2.0)}
    given |= {"sa_128": torch.rand(M, 2), "sw_128": torch.rand(N, 2), "sa_block": torch.rand(1, 2)}
    given |= {"sw_block": torch.rand(1, 2), "offs": torch.tensor([4, 4, M], dtype=torch.int32)}
    for name, values in (("a", x), ("w", w), ("g", gate)):
        given[f"{name}4"], given[f"s{name}_16"], _ = pack.quantize_nvfp4(values)
        given[f"s{name}_32"] = pack.quantize_mx(values)[1]
        given |= {f"s{name}_{d}_t": pack.swizzle_scales(given[f"s{name}_{d}"]) for d in (16, 32)}
    ids, p = torch.arange(M) * 5 % N, torch.rand(M, generator=g)
    logits = torch.randn(M, 8, generator=g)
    chosen = torch.zeros(M, 8, dtype=torch.bool).scatter_(1, logits.topk(2).indices, True)
    given |= {"smooth": torch.rand(K, generator=g) + 0.5, "smooth_y": torch.ones(K // 2), "row_f": p + 0.5, "p": p}
    given |= {"smooth_e": torch.ones(2, K), "smooth_ye": torch.ones(2, K // 2), "counts": torch.tensor([4, 5])}
    given |= {"ids": ids, "logits": logits, "map": chosen, "ix": rtkernels.moe_index(chosen, multiple_of=32, rows=400)}
    given |= {
        "qkv": torch.randn(M, 1, 4 * 64, generator=g).bfloat16(),
        "cos": torch.ones(M, 16),
        "sin": torch.zeros(M, 16),
    }
    given |= {
        "cu": torch.tensor([0, 4, M], dtype=torch.int32),
        "w32": w.clone(),
        "expert": (torch.arange(M) > 3).long(),
    }
    given["x8"], given["sx"] = rtkernels.quantize_fp8(x.bfloat16(), granularity="row")
    given |= _attention_names(g)
    generator = torch.Generator().manual_seed(1)
    r, gate16, up16 = (torch.randn(M, K, generator=generator).half() for _ in range(3))
    given |= {"y": x.half(), "r": r, "gate16": gate16, "up16": up16, "norm": torch.ones(K).half(), "merged": x.half()}
    given |= {"style": torch.randn(M, 3 * K, generator=generator).half(), "s": torch.tensor(0.05), "row": norm_row(K)}
    given |= {"pos": torch.randn(3, K, generator=generator).half(), "img": torch.randn(3, 28, 28, 3).half()}
    given |= {"angles": torch.rand(M, 32), "qkv16": torch.randn(M, 6 * 32, generator=generator).half()}
    given |= {"cache": torch.zeros(2, 20, 1, 32).half(), "act4": rtkernels.quantize_nvfp4(x.half())}
    given["pair"] = lambda left, right: (left[0], right[0], left[1], right[1])
    return given


def _attention_names(g: torch.Generator) -> dict[str, Any]:
    q, k, v = (torch.randn(1, M, 2, 64, generator=g).bfloat16() for _ in range(3))
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "pq": q[0], "pk": k[0], "pv": v[0]}
    given |= {f"{name}_t": given[name].transpose(1, 2) for name in ("q", "k", "v")}
    given["q8"], given["sq"], given["k8"], given["sk"], _ = rtkernels.quantize_qk(q, k)
    given["v8"], given["sv"] = rtkernels.quantize_v(v)
    given |= {"f8": given["q_t"].to(torch.float8_e4m3fn), "e8": torch.full((1, 2, M, 2), 127, dtype=torch.uint8)}
    cache = torch.randn(2, 16, 2, 64, generator=g).bfloat16()
    given |= {"k_cache": cache, "latents": cache[:, :, 0].contiguous(), "mask": torch.zeros(M, M)}
    integers = {"ends": [0, 4, M], "table": [[1, 0]], "lengths": [M]}
    given |= {name: torch.tensor(values, dtype=torch.int32) for name, values in integers.items()}
    return given | {"decay": torch.ones(2), "state": torch.zeros(1, 2, 64, 64)}


@pytest.mark.parametrize(("there", "here"), [pytest.param(*call, id=f"{i}") for i, call in enumerate(_calls())])
def test_call(there: str, here: str) -> None:
    result = eval(here, _names())
    if isinstance(result, torch.Tensor):
        assert result.dim() > 2 or result.float().isfinite().all(), there


def test_the_document_has_many_calls() -> None:
    rows = [
        line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| ") and "`rtk." in line
    ]
    assert len(_calls()) == len(rows) > 50


def test_gn() -> None:
    t = _names()
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
    t = _names()
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
    t = _names()
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


FLAGGEMS = """silu_and_mul silu_and_mul_out gelu_and_mul skip_layer_norm fused_add_rms_norm instance_norm weight_norm
GemsRMSNorm GemsSiluAndMul cross_entropy_loss outer apply_rotary_pos_emb GemsRope GemsDeepseekYarnRoPE reshape_and_cache
reshape_and_cache_flash concat_and_cache_mla flash_mla flash_attn_varlen_func scaled_dot_product_attention
get_scheduler_metadata moe_align_block_size topk_softmax rwkv_ka_fusion rwkv_mm_sparsity rotary_embedding""".split()


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
    named = {word for there, _ in _calls() for word in re.findall(r"\w+(?:::\w+)?", there)}
    named |= {word for there, _ in _calls() for word in re.findall(r"\w+\.\w+", there)}
    absent = [name for name in names if name not in named]
    assert len(absent) <= without, f"{library}: no call for {', '.join(absent)}"
    assert all(re.search(rf"`{re.escape(name)}`", text) for name in absent), f"{library}: not mentioned: {absent}"
