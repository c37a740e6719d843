"""A mixture-of-experts layer in bf16, forward and backward, compared with the same layer in plain PyTorch.

Router logits in fp32, top-k routing, permutation into padded expert order, expert GEMMs through torch, SwiGLU weighted
by the router's probabilities, and the way back. Nothing waits for the host: counts and offsets stay on the device.

    python examples/moe_layer.py                    # a GPU: 8192 tokens, 64 experts; without one: a small layer
    python examples/moe_layer.py --tokens 32768 --experts 32 --top-k 2

Prints the differences of the results and gradients, and time and peak memory of both layers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import rtkernels as rk

PADDING = 16  # rows of an expert start at a multiple of this, which torch's grouped GEMM requires


class MoeLayer(nn.Module):
    """Top-k softmax router and SwiGLU experts.

    Args:
        hidden: Size of a token.
        inner: Size of an expert's inner layer.
        experts: How many there are.
        top_k: How many a token goes to.
        device: Where the parameters are.
    """

    def __init__(self, hidden: int, inner: int, experts: int, top_k: int, device: str) -> None:
        super().__init__()
        self.experts, self.top_k = experts, top_k

        def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
            values = torch.randn(shape, device=device) * shape[-2 if len(shape) == 3 else -1] ** -0.5
            return nn.Parameter(values.to(dtype))

        self.router = parameter(experts, hidden, dtype=torch.float32)
        self.gate_up = parameter(experts, hidden, 2 * inner)
        self.down = parameter(experts, inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for tokens x ``[T, hidden]``."""
        logits = rk.router_gemm(x, self.router, precision="high")
        routed = rk.topk_router(logits, self.top_k, score="softmax", renormalize=True)
        index = rk.moe_index(routed.indices, self.experts, multiple_of=PADDING)
        rows = rk.moe_permute(x, index, probs=routed.probs)
        ends = index.offsets[1:]
        inner = torch.nn.functional.grouped_mm(rows.y, self.gate_up, offs=ends)
        inner = rk.glu(inner, weight=rows.probs)
        return rk.moe_unpermute(torch.nn.functional.grouped_mm(inner, self.down, offs=ends), index)


def plain(layer: MoeLayer, x: Tensor) -> Tensor:
    """The same layer in plain PyTorch: expert by expert."""
    logits = x.float() @ layer.router.t()
    probs, chosen = logits.softmax(-1).topk(layer.top_k, dim=-1)
    probs = probs / probs.sum(-1, keepdim=True)
    out = torch.zeros(x.shape, device=x.device)
    for e in range(layer.experts):
        token, choice = (chosen == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ layer.gate_up[e]).chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate.float()) * up.float() * probs[token, choice, None]
        out = out.index_add(0, token, (inner.to(x.dtype) @ layer.down[e]).float())
    return out.to(x.dtype)


def gradients(layer: MoeLayer, run: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Run forward and backward; return the output and every gradient."""
    x = x.detach().requires_grad_()
    layer.zero_grad(set_to_none=True)
    y = run(x)
    y.backward(dy)
    found = {name: p.grad for name, p in layer.named_parameters()}
    return {"output": y.detach(), "x": x.grad, **found}


def measure(run: Callable[[], object], device: str, repeats: int) -> tuple[float, float]:
    """Return milliseconds of one call, and its peak memory in MiB in addition to what was allocated before."""
    for _ in range(2):
        run()
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / repeats * 1e3, float("nan")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(repeats):
        run()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / repeats, (torch.cuda.max_memory_allocated() - before) / 2**20


def relative(a: Tensor, b: Tensor) -> float:
    """Relative difference of two tensors in the Frobenius norm."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Compare the two layers; return the relative difference of each result."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--tokens", type=int, default=8192 if on_gpu else 64)
    parser.add_argument("--hidden", type=int, default=2048 if on_gpu else 64)
    parser.add_argument("--inner", type=int, default=1024 if on_gpu else 32)
    parser.add_argument("--experts", type=int, default=64 if on_gpu else 8)
    parser.add_argument("--top-k", type=int, default=8 if on_gpu else 2)
    parser.add_argument("--repeats", type=int, default=10 if on_gpu else 2)
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    layer = MoeLayer(args.hidden, args.inner, args.experts, args.top_k, args.device)
    x, dy = (torch.randn(args.tokens, args.hidden, device=args.device).bfloat16() for _ in range(2))
    ways = {"rtkernels": layer, "plain torch": lambda x: plain(layer, x)}
    ours, theirs = (gradients(layer, run, x, dy) for run in ways.values())
    differences = {name: relative(ours[name], theirs[name]) for name in ours}
    print("relative difference: " + ", ".join(f"{name} {value:.1e}" for name, value in differences.items()))
    del ours, theirs

    print(f"{'':14}{'forward':>12}{'with backward':>16}{'peak memory':>14}")
    for name, run in ways.items():

        def forward(run: Callable[[Tensor], Tensor] = run) -> None:
            with torch.no_grad():
                run(x)

        def both(run: Callable[[Tensor], Tensor] = run) -> None:
            gradients(layer, run, x, dy)

        once, _ = measure(forward, args.device, args.repeats)
        twice, memory = measure(both, args.device, args.repeats)
        print(f"{name:14}{once:9.2f} ms{twice:13.2f} ms{memory:10.0f} MiB")
    return differences


if __name__ == "__main__":
    main()
