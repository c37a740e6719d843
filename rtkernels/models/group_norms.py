"""Replace ``nn.GroupNorm``.

A silu behind it stays a module of its own: who calls the norm may want its result without.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import rtkernels
from rtkernels.models import replace
from rtkernels.models.probe import NotRecognized, Recognized, Trial, check_plain, normal, probing, twin_of
from rtkernels.models.proof import Setting, prove
from rtkernels.models.recognize import autocasts
from rtkernels.runtime.operator.sharding import is_sharded

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def is_group_norm(module: nn.Module) -> bool:
    """Return True if a module may be a group norm."""
    return isinstance(module, nn.GroupNorm) and not module._modules


@probing()
def recognize(module: nn.Module) -> Recognized:
    """Return the replacement of a group norm.

    Raises:
        NotRecognized: It computes something else.
    """
    given = {name: p for name, p in module._parameters.items() if p is not None}
    if set(given) not in (set(), {"weight", "bias"}):
        raise NotRecognized(f"its parameters are {', '.join(given)}; expected weight and bias, or none")
    check_plain(module)
    channels = module.num_channels

    def twin(width: int, dtype: torch.dtype, training: bool) -> nn.Module:
        fresh = {name: normal(width, seed=i, dtype=dtype) for i, name in enumerate(given)}
        return twin_of(module, fresh, training=training)

    def setting(
        where: str, *spatial: int, dtype: torch.dtype = torch.float32, training: bool = True, **more: Any
    ) -> Setting:
        def trial(width: int) -> Trial:
            scales = torch.tensor([1e-2, 1.0, 1e2], dtype=torch.float32, device="cpu") if dtype == torch.float32 else 1
            x = normal(*spatial, 3, width).movedim((-2, -1), (0, 1)) + 0.5
            x = (x.movedim(0, -1) * scales).movedim(-1, 0).to(dtype)
            return Trial(where, (x.contiguous(**more),))

        return Setting(trial, (channels,), dtype, training)

    settings = [
        setting("for inputs of 4 dimensions", 3, 5),
        setting("for inputs of 3 dimensions", 7),
        setting("for inputs of 5 dimensions", 2, 3, 2),
        setting("for channels that lie last", 3, 5, memory_format=torch.channels_last),
        setting("in evaluation", 4, 4, training=False),
        *(setting(f"in {str(dtype)[6:]}", 4, 4, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)),
    ]
    return prove(module, channels, [("group_norm", Recognized("group_norm", ()))], twin, settings)


# ---- forwards -------------------------------------------------------------------------------------------------------


def _group_norm(original: type[nn.Module]) -> replace.Forward:
    own = original.forward

    def forward(self, input):
        x, weight, bias = input, self.weight, self.bias
        fits = isinstance(x, Tensor) and x.dtype in _FLOATS and x.dim() > 1 and x.numel() > 0 and not autocasts(x)
        if not fits or is_sharded(x) or (weight is not None and weight.dtype != x.dtype):
            return own(self, x)
        return rtkernels.group_norm(x, weight, bias, groups=self.num_groups, eps=self.eps)

    return forward


replace.register("group_norm", _group_norm)
