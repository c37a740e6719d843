"""linghe's fp8 quantisers, alone and fused with norms and activations."""

from __future__ import annotations

from typing import Any

from bench.peers.base import Absent, Call, Table


def _row(x: Any, **_: Any) -> Call:
    from linghe.quant.channel import triton_tokenwise_row_quant

    if x.shape[-1] & (x.shape[-1] - 1):
        raise Absent("linghe's tokenwise row quantiser takes power-of-two widths only")
    return lambda: triton_tokenwise_row_quant(x)


def _channel(x: Any, **_: Any) -> Call:
    from linghe.quant.channel import triton_transpose_row_quant

    return lambda: triton_transpose_row_quant(x)


def _group(x: Any, **_: Any) -> Call:
    from linghe.quant.group import triton_group_quant

    return lambda: triton_group_quant(x)


def _group_t(x: Any, **_: Any) -> Call:
    from linghe.quant.block import triton_blockwise_quant

    return lambda: triton_blockwise_quant(x, output_mode=1)[2:]


def _group_both(x: Any, **_: Any) -> Call:
    """Scales of rows are [columns / 128, rows]: linghe has no other layout here, and the bytes are the same."""
    from linghe.quant.block import triton_blockwise_quant

    return lambda: triton_blockwise_quant(x, output_mode=2)


def _block(x: Any, **_: Any) -> Call:
    from linghe.quant.block import triton_block_quant

    return lambda: triton_block_quant(x)


def _block_both(x: Any, **_: Any) -> Call:
    """Two kernels, the second transposes the codes: linghe has none that does both."""
    from linghe.quant.block import triton_block_quant
    from linghe.utils.transpose import triton_transpose

    def call() -> tuple[Any, ...]:
        q, scale = triton_block_quant(x)
        return q, scale, triton_transpose(q)

    return call


def _experts(x: Any, counts: Any, **_: Any) -> Call:
    """linghe also wants the counts on the host; they are read beforehand."""
    from linghe.quant.block import triton_batch_blockwise_quant

    splits = counts.tolist()
    return lambda: triton_batch_blockwise_quant(x, counts, splits)


def _smooth(calibrate: bool) -> Any:
    def prepare(x: Any, smooth: Any, **_: Any) -> Call:
        """``reverse`` multiplies by the smooth factors as the row does; maxima are rounded to bf16 on the way."""
        from linghe.quant.smooth import triton_smooth_quant

        return lambda: triton_smooth_quant(x, smooth, reverse=True, calibrate=calibrate)

    return prepare


def _hadamard(x: Any, **_: Any) -> Call:
    """The row kernel alone, without the one for columns that its wrapper launches too; the matrix is bf16.

    Three stages instead of six: six blocks of 128 x 128 do not fit into shared memory.
    """
    import torch
    from linghe.quant.hadamard import hadamard_quant_row_kernel

    block, (rows, cols) = 128, x.shape
    matrix = torch.ones(1, 1, device=x.device)
    while matrix.shape[0] < block:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    matrix = (matrix * block**-0.5).to(x.dtype)

    def call() -> tuple[Any, Any]:
        q = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)
        hadamard_quant_row_kernel[(-(-rows // block),)](
            x, matrix, q, scale, rows, cols, block, 1, num_stages=3, num_warps=4
        )
        return q, scale

    return call


def _rms_norm_fp8(mode: int) -> Any:
    def prepare(x: Any, weight: Any, rstd: Any = None, **_: Any) -> Call:
        """Mode 0 gives rows, 1 columns (from a known 1/rms, as the row), 2 both in two kernels.

        Scales of rows are [columns / 128, rows], as in the row "both_column": linghe has no other layout here.
        """
        from linghe.utils.norm import triton_rms_norm_and_block_quant_forward

        first = 3 if mode == 1 else 0
        return lambda: triton_rms_norm_and_block_quant_forward(
            x, weight, eps=1e-6, rms=rstd, round_scale=False, output_mode=mode
        )[first:]

    return prepare


def _glu_fp8(x: Any, **_: Any) -> Call:
    from linghe.utils.silu import triton_silu_and_block_quant_forward

    return lambda: triton_silu_and_block_quant_forward(x, round_scale=True, output_mode=2)


def _glu_fp8_bwd(dy: Any, x: Any, **_: Any) -> Call:
    from linghe.utils.silu import triton_silu_and_block_quant_backward

    return lambda: triton_silu_and_block_quant_backward(dy, x, round_scale=True)


def _expert_glu_fp8(x: Any, weight: Any, counts: Any, **_: Any) -> Call:
    """linghe also wants the counts on the host; they are read beforehand."""
    from linghe.utils.silu import triton_batch_weighted_silu_and_block_quant_forward

    splits = counts.tolist()
    return lambda: triton_batch_weighted_silu_and_block_quant_forward(
        x, weight, counts, splits=splits, round_scale=True, output_mode=2
    )


def _expert_glu_fp8_bwd(dy: Any, x: Any, weight: Any, counts: Any, **_: Any) -> Call:
    """As above; the gradient of the weights comes third instead of last."""
    from linghe.utils.silu import triton_batch_weighted_silu_and_block_quant_backward

    splits = counts.tolist()
    return lambda: triton_batch_weighted_silu_and_block_quant_backward(
        dy, x, weight, counts, splits=splits, round_scale=True
    )


ADAPTERS: Table = {
    "quantize_fp8_row": {"linghe": _row},
    "quantize_fp8_channel": {"linghe": _channel},
    "quantize_fp8_group": {"linghe": _group},
    "quantize_fp8_group_t": {"linghe": _group_t},
    "quantize_fp8_group_both": {"linghe": _group_both},
    "quantize_fp8_block": {"linghe": _block},
    "quantize_fp8_block_both": {"linghe": _block_both},
    "quantize_fp8_experts": {"linghe": _experts},
    "quantize_fp8_smooth": {"linghe": _smooth(False)},
    "quantize_fp8_smooth_amax": {"linghe": _smooth(True)},
    "quantize_fp8_hadamard": {"linghe": _hadamard},
    "rms_norm_fp8_row": {"linghe": _rms_norm_fp8(0)},
    "rms_norm_fp8_t": {"linghe": _rms_norm_fp8(1)},
    "rms_norm_fp8_both": {"linghe": _rms_norm_fp8(2)},
    "rms_norm_fp8_both_column": {"linghe": _rms_norm_fp8(2)},
    "glu_fp8_both": {"linghe": _glu_fp8},
    "glu_fp8_bwd_both": {"linghe": _glu_fp8_bwd},
    "expert_glu_fp8_both": {"linghe": _expert_glu_fp8},
    "expert_glu_fp8_bwd_both": {"linghe": _expert_glu_fp8_bwd},
}
