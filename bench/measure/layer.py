"""A decoder layer like Qwen3's in bf16, forward and backward: step time and peak memory, compared with plain torch.

RMSNorm, qkv projection, normalised and rotated heads, causal attention, output projection, residual sum with RMSNorm,
gate and up projection, SwiGLU, down projection, residual sum. Every way has the same matrix products and the same
attention.

    python -m bench.measure.layer                                # 2 x 4096 tokens, hidden 4096, ffn 12288
    python -m bench.measure.layer --hidden 2048 --ffn 6144 --heads 16 --ways rtkernels,reuse,torch

``python -m bench.layers`` has layers of real models, with errors; here are ours written out by hand.

Peak memory is the most that torch had allocated at once during a step: parameters, their gradients, activations. Steps
begin without gradients.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rtkernels
from bench import meta
from bench.measure.timing import CudaDevice, Timer
from rtkernels.models.fp8 import glu_codes

EPS = 1e-6
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    batch: int = 2
    length: int = 4096
    hidden: int = 4096
    ffn: int = 12288
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def columns(self) -> tuple[int, int, int]:
        """Columns of q, k and v in the projection of all three."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim


class Layer(nn.Module):
    """The parameters, and the tables of the rotation."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.shape = shape

        def matrix(rows: int, cols: int) -> nn.Parameter:
            return nn.Parameter((torch.randn(rows, cols, device=device) * cols**-0.5).to(dtype))

        def gain(size: int) -> nn.Parameter:
            return nn.Parameter(torch.rand(size, device=device).add(0.5).to(dtype))

        hidden, dim = shape.hidden, shape.head_dim
        self.qkv, self.out = matrix(sum(shape.columns), hidden), matrix(hidden, shape.columns[0])
        self.gate_up, self.down = matrix(2 * shape.ffn, hidden), matrix(hidden, shape.ffn)
        self.first, self.second, self.q_gain, self.k_gain = gain(hidden), gain(hidden), gain(dim), gain(dim)
        frequency = 1e6 ** -(torch.arange(0, dim, 2, device=device) / dim)
        angle = torch.arange(shape.length, device=device)[:, None] * frequency
        self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)  # [length, head_dim / 2]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return ``[batch, length, heads * head_dim]`` of q, k and v ``[batch, length, heads, head_dim]``."""
    y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).flatten(2)


# ---- ways to run it -------------------------------------------------------------------------------------------------


def our_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same with this library's attention."""
    return rtkernels.attention(q, k, v, causal=True).flatten(2)


def ours(layer: Layer, x: Tensor, reuse: str | None = None, attention: Attention = attention) -> Tensor:
    """Return the layer's output for x, ``[batch, length, hidden]``, with this library's functions."""
    s = layer.shape
    qkv = F.linear(rtkernels.rms_norm(x, layer.first, eps=EPS, reuse=reuse), layer.qkv)
    q, k, v = rtkernels.qk_norm_rope(
        qkv, layer.q_gain, layer.k_gain, layer.cos, layer.sin, q_heads=s.heads, kv_heads=s.kv_heads,
        head_order="plain", layout="bshd", eps=EPS,
    )  # fmt: skip
    del qkv
    mixed = F.linear(attention(q, k, v), layer.out)
    del q, k, v
    y, h = rtkernels.rms_norm(mixed, layer.second, eps=EPS, residual=x, reuse=reuse)
    del mixed
    return h + F.linear(rtkernels.glu(F.linear(y, layer.gate_up), reuse=reuse), layer.down)


def ours_fp8(layer: Layer, x: Tensor) -> Tensor:
    """The same with fp8 products (block recipe): norms and the activation write codes for the projections."""
    s = layer.shape
    options = {"eps": EPS, "layout": "both", "scale_layout": "column"}
    codes = rtkernels.rms_norm_fp8(x, layer.first, **options)
    qkv = rtkernels.fp8_linear(codes, layer.qkv, scale_layout="column")
    q, k, v = rtkernels.qk_norm_rope(
        qkv, layer.q_gain, layer.k_gain, layer.cos, layer.sin, q_heads=s.heads, kv_heads=s.kv_heads,
        head_order="plain", layout="bshd", eps=EPS,
    )  # fmt: skip
    del qkv
    mixed = rtkernels.fp8_linear(our_attention(q, k, v), layer.out)
    del q, k, v
    codes = rtkernels.rms_norm_fp8(mixed, layer.second, residual=x, **options)
    del mixed
    both = rtkernels.fp8_linear(codes, layer.gate_up, scale_layout="column")
    return codes.sum + rtkernels.fp8_linear(glu_codes(both, None, "silu"), layer.down, scale_layout="column")


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    values = x.float()
    return (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def plain(layer: Layer, x: Tensor) -> Tensor:
    """Return the same in plain torch."""
    s = layer.shape
    parts = F.linear(_norm(x, layer.first), layer.qkv).split(s.columns, -1)
    q, k, v = (t.unflatten(-1, (-1, s.head_dim)) for t in parts)
    q, k = (_rotated(_norm(t, w), layer.cos, layer.sin) for t, w in ((q, layer.q_gain), (k, layer.k_gain)))
    h = x + F.linear(attention(q, k, v), layer.out)
    gate, up = F.linear(_norm(h, layer.second), layer.gate_up).chunk(2, -1)
    return h + F.linear(F.silu(gate) * up, layer.down)


def liger(layer: Layer, x: Tensor) -> Tensor:
    """Return the same with Liger-Kernel's functions, as its patched models call them."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def norm(t: Tensor, weight: Tensor) -> Tensor:
        return LigerRMSNormFunction.apply(t, weight, EPS, 0.0, "llama", True)

    s = layer.shape
    parts = F.linear(norm(x, layer.first), layer.qkv).split(s.columns, -1)
    q, k, v = (t.unflatten(-1, (-1, s.head_dim)) for t in parts)
    q, k = (norm(t, w).transpose(1, 2) for t, w in ((q, layer.q_gain), (k, layer.k_gain)))
    cos, sin = (torch.cat((t, t), -1)[None] for t in (layer.cos, layer.sin))
    q, k = LigerRopeFunction.apply(q, k, cos, sin)
    h = x + F.linear(attention(q.transpose(1, 2), k.transpose(1, 2), v), layer.out)
    y = norm(h, layer.second)
    gate, up = (F.linear(y, w) for w in layer.gate_up.chunk(2))
    return h + F.linear(LigerSiLUMulFunction.apply(gate, up), layer.down)


Run = Callable[[Layer, Tensor], Tensor]
WAYS: dict[str, Callable[[], Run]] = {
    "rtkernels": lambda: ours,
    "reuse": lambda: lambda layer, x: ours(layer, x, reuse="inputs"),
    "attention": lambda: lambda layer, x: ours(layer, x, reuse="inputs", attention=our_attention),
    "fp8": lambda: ours_fp8,
    "torch": lambda: plain,
    "compile": lambda: torch.compile(plain),
    "liger": lambda: liger,
}


# ---- measuring ------------------------------------------------------------------------------------------------------


def step(run: Run, layer: Layer, leaf: Tensor, dy: Tensor) -> Tensor:
    """Run forward and backward, as between two other layers: x is the result of an operation. Return y."""
    leaf.grad = None
    layer.zero_grad(set_to_none=True)
    y = run(layer, leaf.clone())
    y.backward(dy)
    return y.detach()


def gradients(run: Run, layer: Layer, leaf: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Return the result and all gradients."""
    y = step(run, layer, leaf, dy)
    found = {"y": y, "x": leaf.grad} | {name: p.grad for name, p in layer.named_parameters()}
    leaf.grad = None
    layer.zero_grad(set_to_none=True)
    return found


def relative(a: Tensor, b: Tensor) -> float:
    """Relative difference of two tensors in the Frobenius norm."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def peak_mib(call: Callable[[], object]) -> float:
    """Return what torch had allocated at its peak during a call, in MiB."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**20


def measured(shape: Shape, ways: list[str], repeats: int, device: str = "cuda") -> Iterator[tuple[str, float, float]]:
    """Yield name, step time in ms and peak memory in MiB of each way."""
    torch.manual_seed(0)
    layer = Layer(shape, device)
    leaf, dy = (torch.randn(shape.batch, shape.length, shape.hidden, device=device).bfloat16() for _ in range(2))
    leaf.requires_grad_()
    calls, peaks = {}, {}
    for name in ways:
        calls[name] = partial(step, WAYS[name](), layer, leaf, dy)
        try:
            for _ in range(2):
                calls[name]()
        except ImportError as error:
            print(f"{name:12}absent: {error}", flush=True)
            continue
        peaks[name] = peak_mib(calls[name])
    timer = Timer(CudaDevice(), iterations=repeats, batch=5)  # its buffer is not the layer's memory
    for name, peak in peaks.items():
        yield name, timer.measure([calls[name]]).us / 1000, peak


def main(arguments: list[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in Shape.__dataclass_fields__.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default.default)
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated: " + ", ".join(WAYS))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="also write a file that `python -m bench record --layers` takes")
    args = vars(parser.parse_args(arguments))
    ways, repeats, out = args.pop("ways").split(","), args.pop("repeats"), args.pop("out")
    shape = Shape(**args)
    row = {"tokens": shape.batch * shape.length, "hidden": shape.hidden, "ffn": shape.ffn}
    print(f"{'':12}{'step':>12}{'peak memory':>16}")
    for name, ms, memory in measured(shape, ways, repeats):
        print(f"{name:12}{ms:9.2f} ms{memory:12.0f} MiB", flush=True)
        row[name] = {"forward_and_backward_ms": round(ms, 2), "peak_mib": round(memory)}
    if out:
        layer = {f"decoder_{shape.hidden}": {"command": "python -m bench.measure.layer", "rows": [row]}}
        out.write_text(json.dumps({"environment": meta.environment(), "layers": layer}))


if __name__ == "__main__":
    main()
