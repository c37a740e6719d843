"""docs/measured_models.md: whole models and the policy, from the recorded results."""

from __future__ import annotations

from typing import Any

from bench.e2e.arms import FAMILIES
from bench.report import tables as report

_ARMS = {
    "hf": "transformers",
    "hf_perturbed": "transformers, weights changed by 1e-3",
    "liger": "Liger",
    "compile": "torch.compile",
    "hf_compile": "torch.compile, static cache",
    "ours": "patched",
    "ours_compile": "patched, torch.compile",
    "ours_fused": "`fused_layers`, `attention`",
    "ours_graph": "static cache, a step as a CUDA graph",
    "fp8": "the same with fp8",
    "fp8_saturated": "fp8, scales eight times too small",
}
_OURS = {"ours": "`fused_layers`, `attention`"}  # what the arm means in inference
_INTRODUCTION = """\
# Measured models

Written by `python -m bench readme` from `bench/results/e2e/h200.json`, `bench/results/vla/h200.json` and, for parts of
the policy, a tuning run. [benchmarks.md](benchmarks.md) describes the commands, [performance.md](performance.md) has
single ops and layers, and [decisions/models.md](decisions/models.md) has profiles.

"dense" has 0.89 B parameters in the shape of Qwen3; "moe" has 2.15 B, with 32 experts of which 4 are chosen per
token.

![Time and peak memory of whole models](pictures/models.svg)"""
_NOTES = {
    "train": ["16384 tokens per step; the optimizer's step and clipping are included."],
    "infer": [
        "Prompts of 2048 random tokens. Decoding without a CUDA graph is limited by the host, which was slow in these",
        "runs.",
    ],
    "parity": [
        "Losses are means over the last fifth of 200 steps; held-out losses and their spread are those of three data",
        "orders. The spread of the fp8 runs misses the limit of 1 % that this run was recorded with. The bf16 runs of",
        "the same orders differ by 2.4 %, so the gate now also accepts that of bf16 (`bench/e2e/gates.py`).",
        "`fp8_saturated`, with scales eight times too small, must miss at least one gate.",
    ],
}
_GENERATED = {
    "qwen3_06b": "Qwen3, 0.6 B", "qwen3_09b": "Qwen3, 0.9 B (dense)", "llama": "Llama-like, 6 layers of 2048",
    "qwen3_8b_8": "Qwen3, 8 layers of 8 B", "gemma3": "Gemma 3-like", "qwen3_moe": "Qwen3-MoE-like",
}  # fmt: skip
_TITLES = {"train": "Training", "infer": "Inference", "parity": "Parity with transformers"}


def page(
    e2e: dict[str, Any], policy: dict[str, Any], layers: dict[str, Any] | None = None,
) -> str:  # fmt: skip
    """The text of docs/measured_models.md; `layers` is a tuning run with the parts of the policy."""
    lines = [_INTRODUCTION, ""]
    for kind, title in _TITLES.items():
        found = {name: result for name, result in sorted(e2e["results"].items()) if name.startswith(kind)}
        families = {name: found.pop(name) for name in list(found) if found[name]["model"] in FAMILIES}
        if found:
            lines += [f"## {title}", "", *_NOTES[kind], ""]
            for name, result in found.items():
                lines += [f"### {name.removeprefix(kind).strip()}", "", *_table(kind, result), "", _source(result), ""]
        lines += _families(families)
        if kind == "infer" and "generate" in e2e["results"]:
            lines += _generate(e2e["results"]["generate"])
    return "\n".join([*lines, *_policy(policy), *(_parts(layers) if layers else []), ""])


def _parts(layers: dict[str, Any]) -> list[str]:
    """The parts of the policy in a tuning run, each beside its floor."""
    (run,) = (part for part in layers.values() if isinstance(part, dict) and "torch eager" in part.get("rows", {}))
    names = ("vision", "prefix", "expert")

    def cells(row: dict[str, Any]) -> list[str]:
        return [f"{row['parts'][name]:.1f} / {row['floors'][name]:.1f}" for name in names]

    body = [
        [name, f"{row['ms']:.1f}", *cells(row), f"{row['kernels']}", f"{row['cosine']:.5f}"]
        for name, row in run["rows"].items()
    ]
    return [
        "",
        "Its parts, from a tuning run (`bench/results/tuning/h200-2026-11-18-layers.json`), in which layers of the",
        "expert take five launches, without torch.compile; ms of each part / its floor by memory or tensor cores:",
        "",
        *report.table(["", "ms", *names, "kernels per denoising step", "cosine"], body),
        "",
        f"{layers['gpu']}, {layers['date']}.",
    ]


def steps_of(generated: dict[str, Any]) -> dict[tuple[str, int, int], dict[str, dict[str, Any]]]:
    """Return the recorded rows of ``generate()``: by model, prompt and batch, then by arm."""
    found: dict[tuple[str, int, int], dict[str, dict[str, Any]]] = {}
    for name, row in generated["rows"].items():
        model, arm, prompt, batch = name.split()
        found.setdefault((model, int(prompt), int(batch)), {})[arm] = row
    return dict(sorted(found.items()))


def token_ms(row: dict[str, Any]) -> float:
    """Return the milliseconds of a token; of a replay where calls were not measured."""
    return row.get("ms_per_token", row.get("replay_ms"))


def _generate(generated: dict[str, Any]) -> list[str]:
    newest = max(row["date"] for row in generated["rows"].values())

    def cell(batch: int, row: dict[str, Any] | None) -> str:
        if row is None:
            return "-"
        ms, replay = token_ms(row), row.get("replay_ms")
        device = ", no graph" if replay is None else f" ({replay:.3f})" if "ms_per_token" in row else " (replay)"
        older = "" if row["date"] == newest else f", {row['date']}"
        return f"{ms:.3f}{device}, {1000 * batch / ms:.0f}, {100 * row['floor_ms'] / ms:.0f} %{older}"

    body = [
        [_GENERATED[model], f"{prompt}", f"{batch}",
         *(cell(batch, arms.get(f"generate{weights}")) for weights in ("", "_fp8", "_int4", "_nvfp4")), _compiled(arms)]
        for (model, prompt, batch), arms in steps_of(generated).items()
    ]  # fmt: skip
    return [
        "## generate()",
        "",
        "Milliseconds per token of `generate()` of a patched model, prompt excluded, in brackets of a replay of the",
        "step's CUDA graph; tokens per second of all sequences; and the time in which a copy moves the bytes that a",
        "token must read, as a part of it. The other weights are those of `serve(model, weights=\"fp8\", head=True)`,",
        '"int4" and "nvfp4". The last column is transformers in bf16 with a static cache and',
        '`torch.compile(mode="reduce-overhead")`, and its time over ours in bf16. Measured by',
        "`bench e2e infer --rows`; cells with a date are of an earlier run.",
        "",
        *report.table(["", "prompt", "batch", "bf16", "fp8", "int4", "NVFP4", "transformers, compiled"], body),
        "",
        _source(generated),
        "",
    ]


def _compiled(arms: dict[str, dict[str, Any]]) -> str:
    if "hf_compile" not in arms:
        return "-"
    ms = arms["hf_compile"]["ms_per_token"]
    return f"{ms:.3f} ({ms / token_ms(arms['generate']):.2f} x)" if "generate" in arms else f"{ms:.3f}"


def _families(found: dict[str, dict[str, Any]]) -> list[str]:
    """The table of ``bench e2e families``: ms per step and peak GiB of each arm, what misses a gate in words."""
    if not found:
        return []
    arms = [arm for arm in _ARMS if any(arm in result["arms"] for result in found.values())]

    def cell(record: dict[str, Any]) -> str:
        if "step_ms" not in record:
            return "absent" if "absent" in record else "-"
        return f"{record['step_ms']:.1f} / {record['peak_mib'] / 1024:.1f}"

    body = [[name.removeprefix("train "), *(cell(r["arms"].get(arm, {})) for arm in arms)] for name, r in found.items()]
    missed = [
        f"* {name.removeprefix('train ')}: {gate['gate']} {gate['value']:g}, limit {gate['must']:g}"
        for name, result in found.items() for gate in result["gates"] if not gate["passed"]
    ]  # fmt: skip
    first = next(iter(found.values()))
    return [
        "## Six families",
        "",
        f"ms per step / peak GiB, {first['tokens']} tokens in sequences of {first['seq']}, a few layers in the shape",
        "of each family (`bench/e2e/arms.py`), all arms back to back in one process; fastest of three runs. Limits:",
        "patched at most torch.compile's and Liger's time and 1.03 of Liger's memory; `fused_layers`, `attention` at",
        "most the time of patched. -: did not end in that run.",
        "",
        *report.table(["", *(_ARMS[arm] for arm in arms)], body),
        "",
        *(["Missed:", "", *missed, ""] if missed else []),
        *dict.fromkeys(_source(result) for result in found.values()),
        "",
    ]


def _source(result: dict[str, Any]) -> str:
    run = result["environment"]
    peers = "".join(
        f", {name} {version}" for name, version in run["peers"].items() if version and name in result.get("arms", ())
    )
    return f"{run['gpu']}, torch {run['torch']}{peers}, {run['date'][:10]}."


def _table(kind: str, result: dict[str, Any]) -> list[str]:
    order = [arm for arm in _ARMS if arm in result["arms"]]
    arms = [(arm, result["arms"][arm]) for arm in order]
    if kind == "train":
        body = [[_ARMS[a], f"{r['step_ms']:.1f}", f"{r['tokens_per_s']}", f"{r['peak_mib']}"] for a, r in arms]
        return report.table(["", "ms per step", "tokens/s", "peak MiB"], body)
    if kind == "infer":
        body = []
        for arm, r in arms:
            decode = (f"{r['decode'][batch]['ms_per_token']:.2f}" for batch in ("1", "32"))
            body.append([(_ARMS | _OURS)[arm], f"{r['prefill']['8']['tokens_per_s']}", *decode, f"{r['peak_mib']}"])
        titles = ["", "prefill of 8 prompts, tokens/s", "ms per token, batch 1", "ms per token, batch 32", "peak MiB"]
        return report.table(titles, body)
    body = [[gate["gate"], f"{gate['value']:g}", f"{gate['must']:g}", _passed(gate)] for gate in result["gates"]]
    return report.table(["gate", "value", "limit", "passed"], body)


def _passed(gate: dict[str, Any]) -> str:
    return "yes" if gate["passed"] else "no"


def _policy(policy: dict[str, Any]) -> list[str]:
    body = [
        [name, f"{row['ms']:.1f}", f"{row['GB']:.2f}", f"{row['kernels']}", f"{row['cosine']:.5f}"]
        for name, row in policy["rows"].items()
    ]
    return [
        "## Policy",
        "",
        "`examples/vla_policy.py`: batch 1, the whole policy as one CUDA graph. The cosine is that with torch eager.",
        f"With `torch.compile`, layers of the {policy['autotune']} use max-autotune and the others the default mode.",
        "",
        *report.table(["", "ms", "GB", "kernels per denoising step", "cosine"], body),
        "",
        f"{policy['gpu']}, torch {policy['torch']}, {policy['date']}"
        + "".join(f"; {name} {row['date']}" for name, row in policy["rows"].items() if "date" in row)
        + ".",
    ]
