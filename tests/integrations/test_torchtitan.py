"""torchtitan's trainer on the CPU with our overrides and without: FSDP2 and tensor parallelism over two processes."""

from __future__ import annotations

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


CHECKS = (check_fsdp, check_tensor_parallelism, check_halves, check_experts)


@pytest.mark.one_in(1000)
def test_two_processes(tmp_path: Path) -> None:
    run_in_processes(CHECKS, tmp_path)
