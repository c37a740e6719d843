"""The README's table of gains: models, layers and ops, from the recorded results."""

from __future__ import annotations

import json
from typing import Any

from bench import meta
from bench.report import tables as report
from bench.report.models_page import steps_of, token_ms

HEAD = "| on one NVIDIA H200 |"
_NAMES = {"hf": "transformers", "transformers": "transformers", "liger": "Liger", "compile": "torch.compile"}
_OP_PEERS = {
    "liger": "Liger", "inductor": "torch.compile", "torch_fused": "torch's fused op", "fa4": "FlashAttention 4",
    "fa4_deterministic": "FlashAttention 4, deterministic", "torch_cudnn": "cuDNN",
    "torch_flash": "torch's flash attention",
}  # fmt: skip
# What a row is called, the recorded command, our arm of it.
_MODELS = (
    ("training step, dense model of 0.89 B parameters", "train dense", "ours_fused"),
    ("the same with fp8 products", "train dense", "fp8"),
    ("training step, 4 layers of that model", "train dense, 4 layers", "ours_fused"),
    ("training step, 4 layers of an MoE model", "train moe, 4 layers", "ours_fused"),
)
# What a row is called; model, prompt and batch; arm.
_TOKENS = (
    ("a token of `generate()`, batch 1, dense model of 0.89 B", ("qwen3_09b", 128, 1), "generate"),
    ("a token of `generate()`, batch 1, six Llama layers of 2048", ("llama", 128, 1), "generate"),
    ("32 tokens of `generate()`, batch 32, eight layers of Qwen3 8 B", ("qwen3_8b_8", 128, 32), "generate"),
)
_POLICIES = (
    ("robot policy of pi0.5's shape, one CUDA graph", "rtkernels bf16"),
    ("the same with fp8 products", "rtkernels fp8"),
)
_LAYERS = (
    ("dense layer, hidden size 4096, forward and backward", "layer_dense", "ours_fused"),
    ("the same with fp8 products", "layer_dense", "fp8_fused"),
)
# What a row is called, row, shape.
_OPS = (
    ("`rms_norm` backward, 8192x4096", "rms_norm_bwd", "8192x4096"),
    ("`attention` forward, causal, 2x4096, 32/8 heads of 128", "attn_causal_fwd", "b2s4096q32kv8d128"),
    ("`attention` backward, causal, 2x4096, 32/8 heads of 128", "attn_causal_bwd", "b2s4096q32kv8d128"),
    ("`attention` backward, causal, 4x4096, 16 heads of 128", "attention_bwd", "4x4096 16/16 heads of 128 causal"),
    ("`scaled_mm`, int8, 4096x4096x4096", "scaled_mm", "4096x4096x4096_int8_row"),
    ("`qk_norm_rope` backward, 4096x2 tokens, 32 + 8 heads", "qk_norm_rope_bwd", "s4096b2q32kv8d128"),
    ("`cross_entropy`, loss and gradient, 8192x157184", "cross_entropy_fwdbwd", "8192x157184"),
    ("`rms_norm_fp8`, both layouts, 8192x4096", "rms_norm_fp8_both", "8192x4096"),
    ("`moe_permute`, 8192x7168, 256 experts, top 8", "permute_pad", "8192x7168e256k8"),
    ("`optim.AdamW`, 1e9 parameters", "adamw_master", "500x2000000"),
)


_STRONG_NAMES = {"rms_norm_bwd": "rmsnorm_bwd"}  # rows that are called otherwise in the run with the strongest peers


def headline(
    accepted: dict[str, Any], e2e: dict[str, Any], policy: dict[str, Any], strong: dict[str, Any] | None = None,
) -> list[str]:  # fmt: skip
    """The lines of the README's table; what was not recorded is left out.

    Args:
        accepted: The content of ``bench/results/<gpu>.json``.
        e2e: That of ``bench/results/e2e/<gpu>.json``.
        policy: That of ``bench/results/vla/<gpu>.json``.
        strong: That of ``bench/results/peers/<gpu>.json``. Where an op gains less in that run, the line is that run's.
    """
    body = [*_models(e2e), *_tokens(e2e), *_policies(policy), *_layers(accepted), *_ops(accepted, strong)]
    return report.table([HEAD.strip("| "), "what", "ours", "fastest peer", "faster by", "recorded"], body)


def recorded() -> tuple[dict[str, Any], dict[str, Any]]:
    """The recorded results of whole models and of the policy."""
    files = (meta.RESULTS / folder / "h200.json" for folder in ("e2e", "vla"))
    e2e, policy = (json.loads(path.read_text(encoding="utf-8")) for path in files)
    return e2e, policy


def recorded_parts() -> dict[str, Any]:
    """The newest tuning run with the parts of the policy."""
    return json.loads((meta.RESULTS / "tuning" / "h200-2026-11-18-layers.json").read_text(encoding="utf-8"))


def _tokens(e2e: dict[str, Any]) -> list[list[str]]:
    """Lines of ``generate()``: time of a token, tokens per second, part of memory speed; transformers' beside it."""
    body = []
    generated = e2e.get("results", {}).get("generate")
    for what, key, arm in _TOKENS if generated else ():
        arms = steps_of(generated).get(key, {})
        if (row := arms.get(arm)) is None:
            continue
        ms, peer = token_ms(row), arms.get("hf_compile")
        speed = f"{1000 * key[2] / ms:.0f} tokens/s, {100 * row['floor_ms'] / ms:.0f} % of memory speed"
        other = (
            [f"transformers with torch.compile {peer['ms_per_token']:.2f} ms", f"{peer['ms_per_token'] / ms:.2f} x"]
            if peer else ["-", "-"]
        )  # fmt: skip
        body.append(["model", f"{what}: {speed}", f"{ms:.2f} ms", *other, row["date"]])
    return body


def _line(kind: str, what: str, ours: float, peers: dict[str, float], unit: str, date: str) -> list[str]:
    name, time = min(peers.items(), key=lambda peer: peer[1])
    return [kind, what, f"{ours:.1f} {unit}", f"{name} {time:.1f} {unit}", f"{time / ours:.2f} x", date[:10]]


def _models(e2e: dict[str, Any]) -> list[list[str]]:
    body = []
    for what, name, arm in _MODELS:
        if (found := e2e.get("results", {}).get(name)) is not None:
            peers = {_NAMES[a]: r["step_ms"] for a, r in found["arms"].items() if a in _NAMES}
            body.append(_line("model", what, found["arms"][arm]["step_ms"], peers, "ms", found["environment"]["date"]))
    return body


def _policies(policy: dict[str, Any]) -> list[list[str]]:
    rows = {name: row["ms"] for name, row in policy.get("rows", {}).items()}
    peers = {name: ms for name, ms in rows.items() if not name.startswith("rtkernels")}
    return [_line("model", what, rows[w], peers, "ms", policy["date"]) for what, w in _POLICIES if w in rows]


def _layers(accepted: dict[str, Any]) -> list[list[str]]:
    body = []
    for what, name, way in _LAYERS:
        if (entry := accepted["layers"].get(name)) is not None:
            row = entry["measured"]["rows"][0]
            peers = {title: row[peer]["forward_and_backward_ms"] for peer, title in _NAMES.items() if peer in row}
            date = accepted["runs"][entry["run"]]["date"]
            body.append(_line("layer", what, row[way]["forward_and_backward_ms"], peers, "ms", date))
    return body


def _ops(accepted: dict[str, Any], strong: dict[str, Any] | None) -> list[list[str]]:
    measured = {(row["row"], row["shape"]): row for row in accepted["rows"]}
    stronger = {(row["row"], row["shape"]): row for row in (strong or {"rows": []})["rows"]}
    body = []
    for what, name, shape in _OPS:
        row, other = measured.get((name, shape)), stronger.get((_STRONG_NAMES.get(name, name), shape))
        found = [
            (report.ranked(r), r, date)
            for r, date in (
                (row, accepted["runs"][row["run"]]["date"] if row else ""), (other, (strong or {}).get("date", ""))
            )
            if r is not None and report.ranked(r)
        ]  # fmt: skip
        if found:
            ranked, row, date = min(found, key=lambda item: item[0][0][1] / item[1]["us"])
            peers = {_OP_PEERS.get(peer, peer): us for peer, us in ranked[::-1]}
            body.append(_line("op", what, row["us"], peers, "µs", date))
    return body
