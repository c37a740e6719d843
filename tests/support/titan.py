"""Ten steps of torchtitan's trainer on the CPU, with its debug models cut to two layers and random tokens.

For processes of their own, which call ``use_the_cpu`` of :mod:`support.processes` before they import this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.components.metrics as titan_metrics
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, OverrideConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.trainer import Trainer

STEPS, LENGTH, VOCABULARY = 10, 32, 2048
OVERRIDES = ("rms_norm", "feed_forward", "scaled_dot_product_attention", "cross_entropy_loss")

titan_metrics.build_device_memory_monitor = lambda: SimpleNamespace(
    device_name="cpu", get_peak_stats=lambda: titan_metrics.DeviceMemStats(0, 0, 0, 0, 0, 0), reset_peak_stats=int
)


_created: dict[tuple[int, str], Any] = {}
_init_distributed = Trainer.init_distributed


def _meshes_of_before(self: Trainer) -> Any:
    """Return the meshes of an earlier trainer of this process: FSDP2 compares them by identity."""
    key = (self.config.parallelism.tensor_parallel_degree, self.config.parallelism.spmd_backend)
    if key not in _created:
        _created[key] = _init_distributed(self)
    return _created[key]


Trainer.init_distributed = _meshes_of_before


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **given: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **given: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **given: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


class RandomTokens(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **given: Any
    ) -> None:
        self.shape, self.mine = (dp_world_size * local_batch_size, seq_len + 1), (dp_rank, dp_world_size)

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(0)
        rank, count = self.mine
        while True:
            ids = torch.randint(0, 64, self.shape, generator=generator).tensor_split(count)[rank]
            yield {"input": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def specification(family: str, flavor: str, converters: Sequence[Any] = ()) -> Any:
    """Return a debug model with two layers and torch's attention, which runs on the CPU."""
    from importlib import import_module

    registry = import_module(f"torchtitan.models.{family}").model_registry
    found = registry(flavor, attn_backend="varlen", converters=list(converters))
    found.model.layers = found.model.layers[:2]
    for layer in found.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return found


def trainer(
    folder: str, overrides: Sequence[Any] = (), *, family: str = "llama3", flavor: str = "debugmodel", tp: int = 1,
    backend: str = "spmd_types", dtype: str = "float32", typed: bool = False, converters: Sequence[Any] = (),
) -> Trainer:  # fmt: skip
    """Return a trainer over two processes: FSDP2, or tensor parallelism for ``tp=2``."""
    config = Trainer.Config(
        loss=ChunkedLossWrapper.Config(num_chunks=2, loss_fn=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)),
        model_spec=specification(family, flavor, converters), tokenizer=NoTokenizer.Config(),
        dataloader=RandomTokens.Config(), optimizer=default_adamw(lr=1e-3),
        training=TrainingConfig(
            local_batch_size=2, seq_len=LENGTH, steps=STEPS, disable_cuda_graphs=True, mixed_precision_param=dtype
        ),
        parallelism=ParallelismConfig(tensor_parallel_degree=tp, spmd_backend=backend), dump_folder=folder,
        activation_checkpoint=None,
        debug=DebugConfig(seed=1, spmd_typechecking=typed, enable_structured_logging=False),
        override=OverrideConfig(imports=list(overrides)),
    )  # fmt: skip
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does where it creates the process group itself
    built = config.build()
    for module in built.model_parts[0].modules():
        if isinstance(module, FSDPModule):  # gloo has no sums with a factor
            module.set_force_sum_reduction_for_comms(True)
    return built


def ten_losses(built: Trainer, steps: int = STEPS) -> list[float]:
    """Train, and return the loss of each step over all processes."""
    losses: list[float] = []
    metrics = built.metrics_processor
    metrics.should_log = lambda step: True
    metrics.log = lambda step, loss, *others, **more: losses.append(float(loss))
    batches = built.batch_generator(built.dataloader)
    for step in range(steps):
        built.step = step + 1
        built.train_step(batches)
    built.close()
    return losses
