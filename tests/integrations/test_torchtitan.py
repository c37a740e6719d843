"""torchtitan's trainer on the CPU with our overrides and without: FSDP2 and tensor parallelism over two processes."""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import WORLD, Operators, run_in_processes, use_the_cpu

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
if torch.__version__ < "2.15":
    pytest.skip("torchtitan 0.3 needs torch 2.15", allow_module_level=True)
PREFIX = "rtkernels.integrations.torchtitan."


def _losses(overrides: Any = (), steps: int = 10, **options: Any) -> list[float]:
    use_the_cpu()
    from support.titan import ten_losses, trainer

    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOCAL_RANK"] = str(dist.get_rank())
        return ten_losses(trainer(folder, [*overrides], **options), steps)


def _all(*more: Any) -> list[Any]:
    from support.titan import OVERRIDES

    return [*(PREFIX + name for name in OVERRIDES), *more]


def check_fsdp(rank: int, mesh: Any) -> None:
    wanted = _losses()
    with Operators() as seen:
        found = _losses(_all())
    assert found == pytest.approx(wanted, rel=1e-5) and found[-1] < found[0]
    assert {"rms_norm_fwd", "glu_fwd"} <= seen.names, seen.names


def check_tensor_parallelism(rank: int, mesh: Any) -> None:
    wanted = _losses(tp=WORLD)
    for backend in ("spmd_types", "partial_dtensor"):
        assert _losses(_all(), tp=WORLD, backend=backend) == pytest.approx(wanted, rel=1e-5), backend
    assert _losses(_all(), 1, tp=WORLD, typed=True) == pytest.approx(wanted[:1], rel=1e-5)


def check_halves(rank: int, mesh: Any) -> None:
    """bf16: attention is ours, too. fp8 by the converter and by overrides: the same layers, the same losses."""
    use_the_cpu()
    from rtkernels.integrations.torchtitan import Fp8LinearConverter

    wanted = _losses(dtype="bfloat16")
    with Operators() as seen:
        found = _losses(_all(), dtype="bfloat16")
    assert found == pytest.approx(wanted, rel=2e-3) and "attention_fwd" in seen.names, seen.names
    converted = _losses(_all(), dtype="bfloat16", tp=WORLD, converters=[Fp8LinearConverter.Config()])
    assert converted == pytest.approx(_losses(_all(), dtype="bfloat16", tp=WORLD), rel=2e-2)
    named = [PREFIX + "rms_norm", PREFIX + "scaled_dot_product_attention", PREFIX + "cross_entropy_loss"]
    named += [(PREFIX + "feed_forward", {"fp8": True}), PREFIX + "attention_fp8"]
    assert _losses(named, dtype="bfloat16", tp=WORLD) == converted


def check_experts(rank: int, mesh: Any) -> None:
    options = {"family": "qwen3", "flavor": "debugmodel_moe", "dtype": "bfloat16"}
    wanted = _losses(**options)
    with Operators() as seen:
        found = _losses(_all(PREFIX + "grouped_experts"), **options)
    assert found == pytest.approx(wanted, rel=5e-3) and any("grouped" in name for name in seen.names), seen.names


def check_modules(rank: int, mesh: Any) -> None:
    """Attention of packed documents and the converter, in each process by itself."""
    use_the_cpu()
    from support.titan import specification
    from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
    from torchtitan.models.common.linear import Linear, ScaledBiasRowwiseLinear

    from rtkernels.errors import ArgumentError
    from rtkernels.integrations import torchtitan as ours

    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 12, heads, 16, generator=random) for heads in (4, 2, 2))
    ends = torch.tensor([0, 5, 12, 24], dtype=torch.int32)
    masks = VarlenMetadata(ends, ends, 12, 12)
    for window in ((-1, 0), (-1, -1), (3, 0)):
        module = ours.varlen_attention(VarlenAttention.Config(window_size=window)).build()
        found = module(q, k, v, attention_masks=masks, scale=0.3, enable_gqa=True)
        flat = [t.flatten(0, 1).bfloat16().float().repeat_interleave(4 // t.shape[2], 1) for t in (q, k, v)]
        for first, last in itertools.pairwise(ends.tolist()):
            a, b, c = (t[first:last].transpose(0, 1) for t in flat)
            gap = torch.arange(last - first)[:, None] - torch.arange(last - first)
            seen = (gap >= 0 if window[1] == 0 else gap == gap) & (gap <= window[0] if window[0] >= 0 else gap == gap)
            wanted = (a @ b.mT * 0.3).masked_fill(~seen, -torch.inf).softmax(-1) @ c
            torch.testing.assert_close(
                found.flatten(0, 1)[first:last], wanted.transpose(0, 1), rtol=2e-2, atol=2e-2
            )  # fmt: skip
    scaled = module(q, k, v, attention_masks=masks, out_transform=lambda out, lse: out * 0 + lse[..., None])
    assert scaled.shape == q.shape and scaled.isfinite().all()
    with pytest.raises(ArgumentError, match="attention_masks is a NoneType; expected VarlenMetadata"):
        module(q, k, v, attention_masks=None)

    layer = Linear.Config(in_features=64, out_features=40)
    assert ours._in_fp8(layer, "row") is layer  # 40 is no multiple of 16
    other = ScaledBiasRowwiseLinear.Config(in_features=64, out_features=64)
    assert ours._in_fp8(other, "row") is other
    model = specification("llama3", "debugmodel", [ours.Fp8LinearConverter.Config(filter_fqns=["w2"])]).model
    kinds = {name: type(config) for name, config, _, _ in model.traverse(Linear.Config)}
    assert {name for name, kind in kinds.items() if kind is Linear.Config} == {
        "layers.0.feed_forward.w2", "layers.1.feed_forward.w2",
    }  # fmt: skip
    with pytest.raises(ArgumentError, match="recipe is 'rows'; expected one of 'block', 'row', 'tensor'"):
        ours.Fp8LinearConverter.Config(recipe="rows").build()


CHECKS = (check_modules, check_fsdp, check_tensor_parallelism, check_halves, check_experts)


@pytest.mark.one_in(1000)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_processes(check: Any, tmp_path: Path) -> None:
    run_in_processes((check,), tmp_path)
