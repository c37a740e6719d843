"""Every public function rejects invalid arguments with an ArgumentError, and with no other error."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import rtkernels
from rtkernels import ArgumentError

FUNCTIONS = [name for name in sorted(rtkernels.__all__) if inspect.isfunction(getattr(rtkernels, name))]
FUNCTIONS.remove("set_batch_invariant")  # whose effect would stay
NONSENSE: dict[str, Any] = {
    "a number": 3,
    "a string": "a",
    "nothing": None,
    "a list": [1.0],
    "no dimensions": torch.tensor(1.0),
    "no rows": torch.ones(0, 4),
    "int16": torch.ones(2, 4, dtype=torch.int16),
    "float64": torch.ones(2, 4, dtype=torch.float64),
    "bool": torch.ones(2, 4, dtype=torch.bool),
    "five dimensions": torch.ones(1, 2, 1, 2, 4),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nonsense(name: str) -> None:
    function = getattr(rtkernels, name)
    wanted = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    wanted = [p for p in wanted if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for what, value in NONSENSE.items():
        try:
            function(**{p.name: value for p in wanted})
        except ArgumentError as error:
            assert str(error), what
        except Exception as error:
            pytest.fail(f"{what}: {type(error).__name__}: {error}")


# ---- a call that is right but for one argument ----------------------------------------------------------------------


def _f(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def _h(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def _i(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


RIGHT: dict[str, dict[str, Any]] = {
    "rms_norm": {"x": _f(4, 8), "weight": _f(8), "residual": _f(4, 8), "gate": _f(4, 8), "scale": _f(8)},
    "layer_norm": {"x": _f(4, 8), "weight": _f(8), "bias": _f(8), "residual": _f(4, 8)},
    "rms_norm_fp8": {"x": _f(4, 128), "weight": _f(128), "residual": _f(4, 128)},
    "group_rms_norm_gate": {"x": _f(4, 8), "gate": _f(4, 8), "weight": _f(8), "groups": 2},
    "glu": {"x": _f(4, 8), "up": _f(4, 8), "weight": _f(4)},
    "glu_fp8": {"x": _f(4, 256), "weight": _f(4)},
    "act": {"x": _f(4, 8), "kind": "silu", "add": _f(8)},
    "add_residual": {"residual": _f(4, 8), "x": _f(4, 8), "gate": _f(8)},
    "softmax": {"x": _f(4, 8)},
    "rope": {"x": _f(2, 3, 4, 8), "cos": _f(3, 4), "sin": _f(3, 4)},
    "cross_entropy": {"logits": _f(4, 8), "labels": _i(0, 1, 2, 3)},
    "linear_cross_entropy": {"hidden": _f(4, 8), "weight": _f(10, 8), "labels": _i(0, 1, 2, 3)},
    "linear_divergence": {
        "student_hidden": _f(4, 8), "student_weight": _f(10, 8), "teacher_hidden": _f(4, 6),
        "teacher_weight": _f(10, 6),
    },
    "linear_logprob": {"hidden": _f(4, 8), "weight": _f(10, 8), "ids": _i(0, 1, 2, 3)},
    "kl_div": {"input": _f(4, 8), "target": _f(4, 8)},
    "embedding": {"ids": _i(0, 1), "weight": _f(10, 8)},
    "index_select": {"x": _f(4, 8), "indices": _i(0, 1)},
    "scatter_add": {"x": _f(4, 8), "indices": _i(0, 1, 2, 3), "rows": 5},
    "topk": {"x": _f(4, 8), "k": 2},
    "topk_router": {"logits": _f(4, 8), "k": 2},
    "quantize_fp8": {"x": _f(4, 128)},
    "quantize_nvfp4": {"x": _f(4, 64), "channel_scale": _f(64)},
    "quantize_fp8_smooth": {"x": _f(4, 8), "smooth": _f(8)},
    "scaled_mm": {"a": _h(4, 64), "b": _h(8, 64), "bias": _h(8), "add": _h(4, 8)},
    "gated_mm": {"a": _h(4, 64), "b": _h(16, 64)},
    "decode_linear": {"a": _h(4, 64), "b": _h(8, 64), "bias": _h(8), "add": _h(4, 8), "norm_weight": _h(64), "eps": 1},
    "grouped_mm": {"a": _h(6, 64), "b": _h(2, 8, 64), "offs": _i(2, 6)},
    "grouped_wgrad": {"dy": _h(6, 16), "x": _h(6, 8), "offs": _i(2, 6)},
    "fp8_linear": {"x": _h(16, 128), "weight": _h(128, 128), "bias": _h(128)},
    "attention": {
        "q": _h(1, 5, 2, 64), "k": _h(1, 7, 2, 64), "v": _h(1, 7, 2, 64), "sinks": _f(2), "bias": _h(1, 2, 5, 7),
        "seqused_k": _i(3),
    },
    "attention_varlen": {
        "q": _h(5, 2, 64), "k": _h(7, 2, 64), "v": _h(7, 2, 64), "cu_seqlens_q": _i(0, 5), "cu_seqlens_k": _i(0, 7),
        "max_seqlen_q": 5, "max_seqlen_k": 7,
    },
    "sdpa": {"query": _h(1, 2, 5, 64), "key": _h(1, 2, 7, 64), "value": _h(1, 2, 7, 64)},
    "attention_decode": {
        "q": _h(2, 1, 2, 64), "k_cache": _h(2, 16, 2, 64), "v_cache": _h(2, 16, 2, 64), "seqlens": _i(3, 4),
    },
    "chunk_attention": {
        "qkv": _h(1, 3, 512), "k_cache": _h(1, 9, 1, 128), "v_cache": _h(1, 9, 1, 128),
        "rope": (_f(16, 64), _f(16, 64)), "prefix": 5,
    },
    "merge_attention": {"outs": [_h(1, 5, 2, 64)] * 2, "lses": [_f(1, 2, 5)] * 2},
    "lightning_attention": {"q": _h(1, 8, 2, 64), "k": _h(1, 8, 2, 64), "v": _h(1, 8, 2, 64), "decay": _f(2)},
    "gated_delta_rule": {
        "q": _h(1, 8, 2, 64), "k": _h(1, 8, 2, 64), "v": _h(1, 8, 2, 64), "g": _f(1, 8, 2), "beta": _f(1, 8, 2),
    },
    "ssd": {"x": _h(1, 8, 2, 64), "dt": _f(1, 8, 2), "A": _f(2), "B": _h(1, 8, 1, 64), "C": _h(1, 8, 1, 64)},
    "causal_conv1d": {"x": _f(2, 8, 4), "weight": _f(4, 4), "bias": _f(4)},
    "hadamard": {"x": _f(4, 128)},
    "row_dot": {"x": _f(4, 8), "y": _f(4, 8)},
    "transpose": {"x": _f(4, 8)},
    "euler_step": {"x": _f(4, 8), "v": _f(4, 8), "dt": 0.1},
    "qkv_split": {"qkv": _f(4, 64), "num_heads": 2, "num_kv_heads": 1},
    "multi_norm": {"tensors": [_f(3), _f(4)]},
}  # fmt: skip


def _wrong(value: Any) -> dict[str, Any]:
    """Return replacements for a valid argument."""
    if isinstance(value, torch.Tensor):
        return {
            "a string": "a", "a list": [1.0], "a number": 1.5, "int16": value.to(torch.int16),
            "complex": value.to(torch.complex64), "elsewhere": torch.empty_like(value, device="meta"),
            "no dimensions": value.flatten()[0], "seven dimensions": value.reshape(1, 1, 1, 1, 1, 1, -1),
            "longer": torch.cat([value, value], -1),
        }  # fmt: skip
    if isinstance(value, list):
        return {"numbers": [1, 2], "nothing": [None, None], "float64": [t.double() for t in value]}
    return {"a string": "a", "nothing": None, "below 0": -3, "three elements": torch.ones(3)}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_one_wrong_argument(name: str) -> None:
    """It is rejected by an ArgumentError, unless the function can use it."""
    function, right = getattr(rtkernels, name), RIGHT[name]
    function(**right)
    for argument, value in right.items():
        for what, wrong in _wrong(value).items():
            try:
                function(**{**right, argument: wrong})
            except ArgumentError:
                continue
            except Exception as error:
                pytest.fail(f"{argument}, {what}: {type(error).__name__}: {error}")
