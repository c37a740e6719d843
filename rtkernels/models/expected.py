"""Measured gains of what ``patch`` replaces, for its report.

Written by ``python -m bench readme`` from ``bench/results/h200.json`` and ``bench/results/e2e/h200.json``.
"""

# fmt: off
# ruff: noqa: E501

# Kind: times as fast, as what, which op or layer, GPU, date.
OPS = {
    "norm": (17.12, "plain torch", "rms_norm with its backward, 8192x4096", "NVIDIA H200", "2026-11-16"),
    "mlp": (1.4, "torch.compile", "glu with its backward, 8192x2x4096", "NVIDIA H200", "2026-11-16"),
    "rope": (1.24, "torch.compile", "rope, b2s4096q32kv8d128", "NVIDIA H200", "2026-11-15"),
    "router": (11.38, "plain torch", "topk_router, 8192x128k8", "NVIDIA H200", "2026-11-15"),
    "loss": (1.25, "plain torch", "linear_cross_entropy, 8192x4096x151936", "NVIDIA H200", "2026-11-16"),
    "attention": (1.09, "torch's fused op", "attention with its backward, 4x4096 16/16 heads of 128 causal", "NVIDIA H200", "2026-11-16"),
    "experts": (2.4, "transformers", "128 experts of 768, top 8, with its backward", "NVIDIA H200", "2026-11-18"),
    "fp8": (1.34, "bf16 products", "a linear layer of 4096 x 14336, with its backward", "NVIDIA H200", "2026-11-17"),
}
# Model, kinds that were replaced, what was timed, times as fast as transformers, share of its peak memory
# (of a whole training step, with our AdamW), GPU, date.
MODELS = (
    ("a dense model of 0.89 B parameters", ("norm", "mlp", "loss", "fp8", "rope", "attention", "fused"), "forward and backward", 2.08, 0.44, "NVIDIA H200", "2026-11-17"),
    ("a mixture of experts of 2.15 B parameters", ("norm", "experts", "loss", "fp8", "rope", "attention", "fused"), "forward and backward", 2.58, 0.54, "NVIDIA H200", "2026-11-17"),
    ("a dense model of 0.89 B parameters", ("norm", "mlp", "loss", "rope", "attention", "fused"), "forward and backward", 1.85, 0.46, "NVIDIA H200", "2026-11-17"),
    ("a mixture of experts of 2.15 B parameters", ("norm", "experts", "loss", "rope", "attention", "fused"), "forward and backward", 2.34, 0.54, "NVIDIA H200", "2026-11-17"),
    ("a dense model of 0.89 B parameters", ("norm", "mlp", "rope", "attention", "fused"), "prefill of 8 prompts", 1.88, 1.08, "NVIDIA H200", "2026-11-17"),
    ("a mixture of experts of 2.15 B parameters", ("norm", "experts", "rope", "attention", "fused"), "prefill of 8 prompts", 2.72, 1.02, "NVIDIA H200", "2026-11-17"),
)
