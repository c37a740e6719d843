"""accelerate's FSDP2 around a patched model, two processes on gloo."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from support.processes import WORLD, Operators, run_in_processes, whole

from rtkernels import models

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate", minversion="1.13", reason="FSDP2 of accelerate 1.13 or newer is not installed")

from support.tiny_models import build, tokens

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available() and hasattr(fsdp, "fully_shard")),
    reason="needs gloo and FSDP2",
)


def _accelerator(rank: int, **options: Any) -> Any:
    """Return an Accelerator with FSDP2. It uses DDP instead on the CPU, so the test says that the CPU is a GPU."""
    import accelerate
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
    os.environ |= {name: str(number) for name, number in ranks.items()}
    os.environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1"}  # the process group exists already
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
        reshard_after_forward=True, **options,
    )  # fmt: skip
    return accelerate.Accelerator(fsdp_plugin=plugin)


def _losses(model: Any, optimizer: Any, rank: int | None, backward: Any) -> list[float]:
    losses = []
    for step in range(10):
        ids = tokens(4, 12, seed=step)
        ids = ids if rank is None else ids.tensor_split(WORLD)[rank]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if rank is not None:
            dist.all_reduce(mean)
            mean /= WORLD
        losses.append(mean.item())
    return losses


def check_ten_steps(rank: int, mesh: Any) -> None:
    plain = build("qwen3")
    wanted = _losses(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), None, torch.Tensor.backward)
    for efficient in (False, True):
        accelerator = _accelerator(rank, cpu_ram_efficient_loading=efficient)
        model = build("qwen3")
        report = models.patch(model, fused_layers=True)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        units = (*model.model.layers, model.lm_head, model)
        assert all(isinstance(unit, fsdp.FSDPModule) for unit in units), [type(unit).__mro__ for unit in units]
        assert all(type(p).__name__ == "DTensor" for p in model.parameters())
        with Operators() as seen:
            found = _losses(model, optimizer, rank, accelerator.backward)
        assert found == pytest.approx(wanted, rel=1e-5) and found[-1] < found[0]
        assert {"rms_norm_fwd", "glu_fwd"} <= seen.names and any("cross_entropy" in name for name in seen.names)
        assert models.report(accelerator.unwrap_model(model)) is report
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(one.detach()), other.detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.one_in(1000)
def test_fsdp2_is_engaged(tmp_path: Path) -> None:
    run_in_processes((check_ten_steps,), tmp_path)
