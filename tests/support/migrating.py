"""The calls of docs/how_to/migrate.md, and the small tensors that they name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import rtkernels
import rtkernels.integrations.vllm
import rtkernels.nn.symmetric
from rtkernels.ops.quant import pack

DOCUMENT = Path(__file__).parents[2] / "docs" / "how_to" / "migrate.md"
M, N, K = 9, 32, 256


def calls(text: str | None = None) -> list[tuple[str, str]]:
    """Return what is there and here of every row that has a call, in the document or a part of it."""
    if text is None:
        text = DOCUMENT.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| `(rtk\..+)` \|$", text, re.MULTILINE)
    return [(there.replace("`", ""), here) for there, here in rows]


def _norm_row(cols: int) -> torch.Tensor:
    return torch.linspace(0.5, 2.0, cols).half()


def names() -> dict[str, Any]:
    """Return what the calls name, new for each call: some overwrite."""
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
    given |= {"style": torch.randn(M, 3 * K, generator=generator).half(), "s": torch.tensor(0.05), "row": _norm_row(K)}
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
