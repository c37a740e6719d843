"""``rtkernels/models/expected.py``: gains of the kinds of modules that ``patch`` replaces, from recorded measurements.

Wheels have no ``bench/results``, so the few numbers that the report of ``patch`` shows are written into the package.
Every baseline is what a transformers model would run otherwise, or is named.
"""

from __future__ import annotations

import json
from typing import Any

from bench import meta

FILE = meta.ROOT / "rtkernels" / "models" / "expected.py"
# By kind: rows whose times are added, their shape, the peer, what the peer is called, what the op is called.
_OPS = {
    "norm": (("rms_norm_fwd", "rms_norm_bwd"), "8192x4096", "torch", "plain torch", "rms_norm with its backward"),
    "mlp": (("glu_fwd", "glu_bwd"), "8192x2x4096", "inductor", "torch.compile", "glu with its backward"),
    "rope": (("rope_fwd",), "b2s4096q32kv8d128", "inductor", "torch.compile", "rope"),
    "router": (("softmax_router_fwd",), "8192x128k8", "torch", "plain torch", "topk_router"),
    "loss": (("linear_cross_entropy",), "8192x4096x151936", "torch", "plain torch", "linear_cross_entropy"),
    "attention": (
        ("attention_fwd", "attention_bwd"), "4x4096 16/16 heads of 128 causal", "torch_fused", "torch's fused op",
        "attention with its backward",
    ),
}  # fmt: skip
# By kind: the measured layer, our way, the baseline, what that is called, what the layer is called.
_LAYERS = {
    "experts": ("layer_moe", "ours_fused", "transformers", "transformers", "128 experts of 768, top 8"),
    "fp8": ("fp8_linear", "fp8", "bf16", "bf16 products", "a linear layer of 4096 x 14336"),
}
_FUSED = ("rope", "attention", "fused")
# The recorded command, our arm, what the model is called, the kinds that it replaces.
_MODELS = (
    ("train dense", "fp8", "a dense model of 0.89 B parameters", ("norm", "mlp", "loss", "fp8", *_FUSED)),
    ("train moe", "fp8", "a mixture of experts of 2.15 B parameters", ("norm", "experts", "loss", "fp8", *_FUSED)),
    ("train dense", "ours_fused", "a dense model of 0.89 B parameters", ("norm", "mlp", "loss", *_FUSED)),
    ("train moe", "ours_fused", "a mixture of experts of 2.15 B parameters", ("norm", "experts", "loss", *_FUSED)),
    ("infer dense", "ours", "a dense model of 0.89 B parameters", ("norm", "mlp", *_FUSED)),
    ("infer moe", "ours", "a mixture of experts of 2.15 B parameters", ("norm", "experts", *_FUSED)),
)


def ops(numbers: dict[str, Any]) -> dict[str, tuple[float, str, str, str, str]]:
    """Return, by kind, how many times faster ours is, than what, where, on which GPU and when."""
    measured = {(row["row"], row["shape"]): row for row in numbers["rows"]}
    found = {}
    for kind, (names, shape, peer, called, title) in _OPS.items():
        rows = [measured.get((name, shape)) for name in names]
        if all(row and isinstance(row["peers"].get(peer), float) for row in rows):
            factor = sum(row["peers"][peer] for row in rows) / sum(row["us"] for row in rows)
            run = min((numbers["runs"][row["run"]] for row in rows), key=lambda run: run["date"])
            found[kind] = round(factor, 2), called, f"{title}, {shape}", run["gpu"], run["date"][:10]
    for kind, (name, ours, peer, called, title) in _LAYERS.items():
        entry = numbers["layers"].get(name)
        row = entry["measured"]["rows"][0] if entry else {}
        if ours in row and peer in row:
            run, key = numbers["runs"][entry["run"]], "forward_and_backward_ms"
            factor = row[peer][key] / row[ours][key]
            found[kind] = round(factor, 2), called, f"{title}, with its backward", run["gpu"], run["date"][:10]
    return found


def models(e2e: dict[str, Any]) -> list[tuple[str, tuple[str, ...], str, float, float, str, str]]:
    """Return model, kinds, what was timed, times as fast as transformers, share of its memory, GPU, and date."""
    found = []
    for name, arm, title, kinds in _MODELS:
        result = e2e["results"].get(name, {"arms": {}})
        ours, theirs = result["arms"].get(arm), result["arms"].get("hf")
        if not ours or not theirs:
            continue
        if name.startswith("train"):
            work, times = "forward and backward", [a["forward_backward_ms"] for a in (theirs, ours)]
        else:
            work, times = "prefill of 8 prompts", [a["prefill"]["8"]["ms"] for a in (theirs, ours)]
        memory, run = ours["peak_mib"] / theirs["peak_mib"], result["environment"]
        found.append(
            (title, kinds, work, round(times[0] / times[1], 2), round(memory, 2), run["gpu"], run["date"][:10])
        )
    return found


def module(numbers: dict[str, Any], e2e: dict[str, Any]) -> str:
    """Return the text of the module."""

    def text(value: Any) -> str:
        if isinstance(value, tuple):
            return f"({', '.join(map(text, value))})"
        return json.dumps(value)

    gains = "".join(f'    "{kind}": {text(gain)},\n' for kind, gain in ops(numbers).items())
    steps = "".join(f"    {text(tuple(record))},\n" for record in models(e2e))
    return (
        '"""Measured gains of what ``patch`` replaces, for its report.\n\n'
        "Written by ``python -m bench readme`` from ``bench/results/h200.json`` and ``bench/results/e2e/h200.json``.\n"
        '"""\n\n'
        "# fmt: off\n# ruff: noqa: E501\n\n"
        "# Kind: times as fast, as what, which op or layer, GPU, date.\n"
        f"OPS = {{\n{gains}}}\n"
        "# Model, kinds that were replaced, what was timed, times as fast as transformers, share of its peak memory\n"
        "# (of a whole training step, with our AdamW), GPU, date.\n"
        f"MODELS = (\n{steps})\n"
    )
