"""The parts of ``vla_policy.py``: the policy, and its math in plain torch and in rtkernels.

``Policy`` defines the computation in terms of a few functions that ``TorchMath`` and ``OurMath`` implement. A layer
starts with the norm that adds the residual of the previous layer, so that each layer is a separate function and no
fusion is lost between two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import rtkernels as rk

sys.path.insert(0, str(Path(__file__).parent))
from vla_weights import Layer, Sizes

FP8 = torch.float8_e4m3fn


# ---- the policy -----------------------------------------------------------------------------------------------------


class Policy:
    """Images and a prompt to a chunk of actions.

    Args:
        sizes: Of the model.
        weights: What ``make_weights`` gives.
        ops: ``TorchMath`` or ``OurMath``.
        compiled: None, or ``torch.compile`` each kind of layer, those of these names ("vision", "gemma", "expert") with
            max-autotune.
    """

    def __init__(self, sizes: Sizes, weights: dict[str, Any], ops: Any, compiled: Sequence[str] | None = None) -> None:
        self.sizes, self.ops, self.table = sizes, ops, weights["table"]
        self.styles, self.last_styles = weights["styles"], weights["last_styles"]
        self.layers = {
            part: [ops.prepare(f"{part}.{i}", layer) for i, layer in enumerate(weights[part])]
            for part in ("vision", "prefix", "expert")
        }
        self.ends = ops.prepare("ends", weights["ends"])
        self.folded = ops.fold(self.layers["expert"], weights["expert"], self.styles)
        self.vision_layer, self.gemma_layer, self.expert_layer = self._vision, self._gemma, self._expert
        for kind in ("vision", "gemma", "expert") if compiled is not None else ():
            mode = "max-autotune-no-cudagraphs" if kind in compiled else None
            setattr(self, f"{kind}_layer", torch.compile(getattr(self, f"_{kind}"), mode=mode, dynamic=False))

    def __call__(self, images: Tensor, prompt: Tensor, noise: Tensor) -> Tensor:
        """Return actions ``[horizon, action]``, float32.

        Args:
            images: ``[views, height, width, 3]``, bfloat16.
            prompt: ``[prompt]``, int64.
            noise: ``[horizon, action]``, float32.
        """
        return self.denoise(noise, self.read(self.see(images), prompt))

    def nbytes(self) -> int:
        """Return the size of all weights that this policy uses."""
        parts: list[Any] = [self.layers, self.ends, self.table, self.styles, self.last_styles]
        found: dict[int, int] = {}
        while parts:
            part = parts.pop()
            if isinstance(part, Tensor):
                found[part.data_ptr()] = part.nbytes
            elif isinstance(part, (dict, list, tuple)):
                parts += part.values() if isinstance(part, dict) else part
        return sum(found.values())

    def see(self, images: Tensor) -> Tensor:
        """Return a token of the prefix for each patch."""
        sizes, ops, ends = self.sizes, self.ops, self.ends
        x = ops.linear(ops.patchify(images, sizes.patch), ends, "patch", bias=False)
        x = ops.add_bias(x, ends, "patch_bias", "position")
        x, h = x.view(-1, sizes.vision_width), None
        for layer in self.layers["vision"]:
            x, h = self.vision_layer(x, h, layer)
        x, _, _ = ops.norm(x, ends, "norm", feeds="image", residual=h)
        return ops.linear(x, ends, "image")

    def _vision(self, x: Tensor, h: Tensor | None, layer: Layer) -> tuple[Tensor, Tensor]:
        sizes, ops = self.sizes, self.ops
        y, h, _ = ops.norm(x, layer, "norm1", feeds="qkv", residual=h)
        qkv = ops.linear(y, layer, "qkv").view(sizes.views, sizes.patches, 3, sizes.vision_heads, -1)
        y = ops.attention(*qkv.unbind(2)).reshape(x.shape)
        x = ops.linear(ops.narrowed(y, layer, "out"), layer, "out")
        y, h, _ = ops.norm(x, layer, "norm2", feeds="up", residual=h)
        y = ops.linear(y, layer, "up", act="gelu_tanh")
        return ops.linear(ops.narrowed(y, layer, "down"), layer, "down"), h

    def read(self, seen: Tensor, prompt: Tensor) -> Any:
        """Return the keys and values of all layers. The rest of the last layer is skipped because nothing reads its
        output."""
        ops, x, h = self.ops, torch.cat([seen, self.ops.embedding(prompt, self.table)]), None
        cache = ops.new_cache(self.sizes, x)
        for i, layer in enumerate(self.layers["prefix"][:-1]):
            x, h, kept = self.gemma_layer(x, h, layer, cache[i])
            cache[i] = kept
        y, _, _ = ops.norm(x, self.layers["prefix"][-1], "norm1", feeds="qkv", residual=h)
        qkv = ops.linear(y, self.layers["prefix"][-1], "qkv")
        cache[-1] = ops.heads(qkv, self.sizes, 0, cache[-1])[3]
        return cache

    def _gemma(self, x: Tensor, h: Tensor | None, layer: Layer, kept: Any) -> tuple[Tensor, Tensor, Any]:
        ops = self.ops
        y, h, _ = ops.norm(x, layer, "norm1", feeds="qkv", residual=h)
        q, k, v, kept = ops.heads(ops.linear(y, layer, "qkv"), self.sizes, 0, kept)
        y = ops.attention(q, k, v).reshape(len(x), -1)
        x = ops.linear(ops.narrowed(y, layer, "out"), layer, "out")
        y, h, _ = ops.norm(x, layer, "norm2", feeds="gate_up", residual=h)
        return ops.gated(y, layer), h, kept

    def denoise(self, actions: Tensor, cache: Any) -> Tensor:
        """Return the actions after all steps."""
        for step in range(self.sizes.steps):
            actions = self.step(actions, cache, step)
        return actions

    def step(self, actions: Tensor, cache: Any, step: int) -> Tensor:
        """Return the actions one step of Euler's method closer to time 0."""
        ops, h, gate = self.ops, None, None
        x = self.embed_actions(actions.bfloat16(), step)
        for i, layer in enumerate(self.layers["expert"]):
            if self.folded is None:
                x, h, gate = self.expert_layer(x, h, gate, layer, *self.styles[step][i], cache[i])
            else:
                x = ops.few_tokens(x, layer, *self.folded[step][i], self.sizes, cache[i])
        style = self.last_styles[step]
        y, _, _ = ops.norm(x, self.ends, "action_norm", feeds=None, residual=h, gate=gate, style=style)
        velocity = ops.linear(y, self.ends, "action_out")
        return ops.euler_step(actions, velocity, -1.0 / self.sizes.steps)

    def embed_actions(self, actions: Tensor, step: int) -> Tensor:
        """Return the expert's tokens."""
        return self.ops.linear(actions, self.ends, "action_in")

    def _expert(
        self, x: Tensor, h: Tensor | None, gate: Tensor | None, layer: Layer, style1: Any, style2: Any, kept: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._expert_at(self.sizes.context, x, h, gate, layer, style1, style2, kept)[:3]

    def _expert_at(
        self, first: int, x: Tensor, h: Tensor | None, gate: Tensor | None, layer: Layer, style1: Any, style2: Any,
        kept: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Any]:  # fmt: skip
        ops = self.ops
        y, h, gate = ops.norm(x, layer, "norm1", feeds="qkv", residual=h, gate=gate, style=style1)
        q, k, v, kept = ops.heads(ops.linear(y, layer, "qkv"), self.sizes, first, kept)
        y = ops.attention(q, k, v).reshape(len(x), -1)
        x = ops.linear(ops.narrowed(y, layer, "out"), layer, "out")
        y, h, gate = ops.norm(x, layer, "norm2", feeds="gate_up", residual=h, gate=gate, style=style2)
        return ops.gated(y, layer), h, gate, kept


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


# ---- its math in plain torch ----------------------------------------------------------------------------------------


class TorchMath:
    """The functions of a policy in plain torch."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        self.rope = rk.rope_table(sizes.tokens, sizes.head_dim, device=device)

    def prepare(self, site: str, layer: Layer) -> Layer:
        return layer

    def norm(
        self, x: Tensor, layer: Layer, name: str | None, *, feeds: str | None, residual: Tensor | None = None,
        gate: Tensor | None = None, style: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        h = x.float() if gate is None else x.float() * gate.float()
        h = (h if residual is None else residual.float() + h).to(x.dtype)
        if f"{name}_bias" in layer:
            return F.layer_norm(h, h.shape[-1:], layer[name], layer[f"{name}_bias"], 1e-6), h, None
        y = h.float() * torch.rsqrt(h.float().square().mean(-1, keepdim=True) + 1e-6)
        if style is None:
            return (y * layer[name].float()).to(x.dtype), h, None
        scale, shift, gate = style.chunk(3)
        return (y * (1 + scale.float()) + shift.float()).to(x.dtype), h, gate

    def linear(self, x: Tensor, layer: Layer, name: str, act: str | None = None, bias: bool = True) -> Tensor:
        y = F.linear(x, layer[name], layer.get(f"{name}_bias") if bias else None)
        return {"gelu_tanh": gelu_tanh, "silu": F.silu}[act](y) if act else y

    def narrowed(self, x: Tensor, layer: Layer, name: str) -> Tensor:
        return x

    def fold(self, layers: list[Layer], plain: list[Layer], styles: Any) -> None:
        return None

    def gated(self, x: Tensor, layer: Layer) -> Tensor:
        gate, up = F.linear(x, layer["gate_up"]).chunk(2, -1)
        return F.linear(gelu_tanh(gate) * up, layer["down"])

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    def new_cache(self, sizes: Sizes, like: Tensor) -> list[Any]:
        return [None] * sizes.layers

    def heads(self, qkv: Tensor, sizes: Sizes, first: int, kept: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
        parts = [sizes.heads, 1, 1]
        q, k, v = qkv.view(1, len(qkv), -1, sizes.head_dim).split(parts, 2)
        cos, sin = (t[first : first + len(qkv), None] for t in self.rope)
        q, k = self._rotated(q, cos, sin), self._rotated(k, cos, sin)
        if kept is not None:
            k, v = torch.cat([kept[0], k], 1), torch.cat([kept[1], v], 1)
        return q, k, v, (k, v)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        low, high = x.float().chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)

    def patchify(self, images: Tensor, patch: int) -> Tensor:
        n, h, w, c = images.shape
        parts = images.view(n, h // patch, patch, w // patch, patch, c).transpose(2, 3)
        return parts.reshape(n, (h // patch) * (w // patch), patch * patch * c)

    def add_bias(self, x: Tensor, layer: Layer, bias: str, position: str) -> Tensor:
        return x + layer[bias] + layer[position]

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(ids, table)

    def euler_step(self, x: Tensor, v: Tensor, dt: float) -> Tensor:
        return x + dt * v.float()


# ---- its math in rtkernels ------------------------------------------------------------------------------------------


class OurMath:
    """The same in kernels of rtkernels.

    Up to 16 action tokens run in five launches a layer: ``decode_linear`` has norm and residual sum inside, and
    ``chunk_attention`` the rotation. More of them run in eight, as the prefix does.

    Args:
        sizes: Of the model.
        device: Where it runs.
        fp8: Weights of layers are fp8 codes with one scale, and so are inputs of products, with a static scale each.
            Those of the expert stay in bfloat16 where ``decode_linear`` takes them: only reading weights takes time
            there. For more action tokens, `out` and `down` of the expert stay in bfloat16, because a launch to quantise
            their inputs does not pay off. The product before the prefix's `down` writes codes with one scale per 128
            elements.
        calibration: Knows the scales of inputs (fp8), or records what they must be (without).
    """

    def __init__(self, sizes: Sizes, device: str, fp8: bool = False, calibration: Any = None) -> None:
        self.few = sizes.horizon <= 16
        self.rope = rk.rope_table(sizes.tokens, sizes.head_dim, device=device)
        self.keys = {
            n: torch.tensor([n], dtype=torch.int32, device=device) for n in (sizes.context, sizes.tokens)
        }  # fmt: skip
        self.fp8, self.calibration = fp8, calibration

    def prepare(self, site: str, layer: Layer) -> Layer:
        """Return a layer with codes, scales and the call sites of its inputs."""
        parts = {**layer, "site": site}
        if site == "ends":  # rows of 3 * 14 * 14 elements are not multiples of 16 bytes, which fast products need
            parts["patch"] = F.pad(layer["patch"], (0, -layer["patch"].shape[1] % 8))
        if not self.fp8 or site == "ends":
            return parts
        expert = site.startswith("expert")
        names = ("qkv", "gate_up") if expert and not self.few else ("qkv", "out", "gate_up", "up", "down")
        for name in [name for name in names if name in layer]:
            parts[name], parts[f"{name}_scale"] = rk.quantize_fp8(layer[name])
            if not (expert and self.few):
                parts[f"{name}_quant"] = self.calibration.quant(f"{site}.{name}", layer[name].device)
        return parts

    def fold(self, layers: list[Layer], plain: list[Layer], styles: Any) -> list[list[tuple[Any, Any]]] | None:
        """Return what ``few_tokens`` takes of the modulations of each step and layer.

        They depend on the step only, so the product of a shift with the weights that follow is a bias known in advance,
        and a gate is a factor of each row of the weights before it.
        """
        if not self.few:
            return None

        def half(i: int, name: str, style: Tensor | None, feeds: str, last: str) -> tuple[Any, Any]:
            first, end = layers[i].get(f"{feeds}_scale"), layers[i].get(f"{last}_scale")
            if style is None:  # Gemma's norms: 1 + weight in float32
                weight = (layers[i][name].float() - 1).bfloat16()
                return {"norm_weight": weight, "offset": 1.0, "scale_b": first}, {"scale_b": end}
            scale, shift, gate = style.chunk(3)
            bias = plain[i][feeds].float() @ shift.float()
            gate = gate.float() if end is None else gate.float() * end
            return {"norm_weight": scale, "offset": 1.0, "bias": bias, "scale_b": first}, {"scale_b": gate}

        return [
            [
                (half(i, "norm1", style1, "qkv", "out"), half(i, "norm2", style2, "gate_up", "down"))
                for i, (style1, style2) in enumerate(of_step)
            ]
            for of_step in styles
        ]

    def few_tokens(self, x: Tensor, layer: Layer, first: Any, second: Any, sizes: Sizes, kept: Any) -> Tensor:
        """Return the residual stream behind a layer of the expert."""
        qkv = rk.decode_linear(x, layer["qkv"], constant=True, **first[0])
        y = rk.chunk_attention(qkv[None], *kept, self.rope, prefix=sizes.context, constant=True).view(len(x), -1)
        x = rk.decode_linear(y, layer["out"], add=x, constant=True, **first[1])
        y = rk.decode_linear(x, layer["gate_up"], act="gelu_tanh", gated=True, constant=True, **second[0])
        return rk.decode_linear(y, layer["down"], add=x, constant=True, **second[1])

    def _seen(self, x: Tensor, layer: Layer, name: str | None) -> None:
        if self.calibration is not None and not self.fp8 and name is not None:
            self.calibration.observe(f"{layer['site']}.{name}", x)

    def norm(
        self, x: Tensor, layer: Layer, name: str | None, *, feeds: str | None, residual: Tensor | None = None,
        gate: Tensor | None = None, style: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        options = {"residual": residual, "gate": gate, "style": style, "quant": layer.get(f"{feeds}_quant")}
        if f"{name}_bias" in layer:
            result = rk.layer_norm(x, layer[name], layer[f"{name}_bias"], eps=1e-6, **options)
        else:
            result = rk.rms_norm(x, layer.get(name), **options)
        if isinstance(result, Tensor):
            y, h, gate = result, x, None
        else:
            y, h, gate = result[0], result[1] if residual is not None else x, result.gate if style is not None else None
        self._seen(y, layer, feeds)
        return y, h, gate

    def linear(
        self, x: Tensor, layer: Layer, name: str, act: str | None = None, bias: bool = True, scale: Tensor | None = None
    ) -> Tensor:
        options = {"bias": layer.get(f"{name}_bias") if bias else None, "act": act}
        if x.dtype != FP8:
            return rk.scaled_mm(x, layer[name], scale_b=layer.get(f"{name}_scale"), **options)
        acc = "fast" if scale is None and len(x) > 64 else "auto"
        scales = layer[f"{name}_quant"].scale if scale is None else scale, layer[f"{name}_scale"]
        return rk.scaled_mm(x, layer[name], *scales, acc=acc, out_dtype=torch.bfloat16, **options)

    def narrowed(self, x: Tensor, layer: Layer, name: str) -> Tensor:
        self._seen(x, layer, name)
        return rk.quantize_fp8(x, layer[f"{name}_quant"].scale)[0] if f"{name}_quant" in layer else x

    def gated(self, x: Tensor, layer: Layer) -> Tensor:
        if x.dtype != FP8:
            y = rk.gated_mm(x, layer["gate_up"], scale_b=layer.get("gate_up_scale"), act="gelu_tanh")
            self._seen(y, layer, "down")
            return self.linear(y, layer, "down")
        given = (x, layer["gate_up"], layer["gate_up_quant"].scale, layer["gate_up_scale"])
        if "down_quant" in layer:
            codes, scale = rk.gated_mm(*given, act="gelu_tanh", quant_out="1x128", acc="fast")
            return self.linear(codes, layer, "down", scale=scale)
        return self.linear(rk.gated_mm(*given, act="gelu_tanh", out_dtype=torch.bfloat16), layer, "down")

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[1] < k.shape[1]:  # actions attend to all tokens: few queries, so blocks split the keys
            return rk.attention_decode(q, k, v, self.keys[k.shape[1]], causal=False)
        return rk.attention(q, k, v)

    def new_cache(self, sizes: Sizes, like: Tensor) -> list[Any]:
        shape = (sizes.layers, 2, 1, sizes.tokens, 1, sizes.head_dim)
        return list(like.new_empty(shape).unbind())

    def heads(self, qkv: Tensor, sizes: Sizes, first: int, kept: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
        k, v = kept
        caches = {"k_cache": k, "v_cache": v, "pos": first}
        q = rk.qkv_split(qkv[None], sizes.heads, 1, rope=self.rope, **caches)[0]
        used = first + len(qkv)
        return q, k[:, :used], v[:, :used], kept

    def patchify(self, images: Tensor, patch: int) -> Tensor:
        patches = rk.patchify(images, patch)
        return F.pad(patches, (0, -patches.shape[-1] % 8))

    embedding: Callable[..., Tensor] = staticmethod(rk.embedding)
    euler_step: Callable[..., Tensor] = staticmethod(rk.euler_step)

    def add_bias(self, x: Tensor, layer: Layer, bias: str, position: str) -> Tensor:
        return rk.add_bias(x, layer[bias], pos=layer[position])
