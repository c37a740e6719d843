"""Codes and scales of this package as tensors of Transformer Engine, which its products take.

Needs the package ``transformer_engine``, which nothing else here does.
"""

from __future__ import annotations

from typing import Any

import torch

from rtkernels.errors import ArgumentError


def blockwise(codes: Any, like: torch.Tensor, quantizer: Any = None) -> Any:
    """Return a ``Float8BlockwiseQTensor`` that shares the memory of codes and scales.

    Args:
        codes: A result with ``q``, ``scale``, ``q_t`` and ``scale_t`` (some may be None), as ``rms_norm_fp8``,
            ``glu_fp8`` and ``quantize_fp8(layout="both")`` give it: 1x128, with ``scale_layout="column"``.
        like: A tensor of the shape and the dtype that the result is to have.
        quantizer: That of Transformer Engine, if the result is to be quantised anew.
    """
    import transformer_engine_torch as codes_of_te
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor

    kinds = {
        torch.float8_e4m3fn: codes_of_te.DType.kFloat8E4M3,
        torch.float8_e5m2: codes_of_te.DType.kFloat8E5M2,
    }
    by_rows, transposed = getattr(codes, "q", None), getattr(codes, "q_t", None)
    given = by_rows if by_rows is not None else transposed
    if given is None or given.dtype not in kinds:
        raise ArgumentError("codes has neither q nor q_t of an fp8 dtype; expected a result of a quantiser")
    return Float8BlockwiseQTensor(
        shape=like.shape,
        dtype=like.dtype,
        rowwise_data=None if by_rows is None else by_rows.view(torch.uint8),
        rowwise_scale_inv=getattr(codes, "scale", None),
        columnwise_data=None if transposed is None else transposed.view(torch.uint8),
        columnwise_scale_inv=getattr(codes, "scale_t", None),
        fp8_dtype=kinds[given.dtype],
        quantizer=quantizer,
        is_2D_scaled=False,
    )
