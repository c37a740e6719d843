"""LoRA of PEFT on the fp8 layers of ``rtkernels.models.serve_fp8``: ``get_peft_model(model, served_lora(config))``.

PEFT rejects layers that it does not know; :func:`served_lora` tells a configuration which class to use for ours.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear

from rtkernels.errors import ArgumentError, RtkError
from rtkernels.models.served import ServedLinear

_INITS = (True, False, "gaussian", "orthogonal")  # those that do not change the weight


class ServedLora(Linear):
    """LoRA on a layer with fp8 weights: ``base(x) + scaling B A x``, with adapters in float32.

    The gradient of x is computed with the dequantised weight. The weight itself stays fp8, so adapters are not merged.
    """

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Plain LoRA is the only variant."""
        return {(): None}

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.in_features, module.out_features

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move an adapter without rounding it to the weight's dtype, fp8, as PEFT would."""
        device = self.get_base_layer().weight.device if device is None else device
        for layers in (self.lora_A, self.lora_B):
            if adapter_name in layers and layers[adapter_name].weight.device.type != "meta":
                layers[adapter_name].to(device, torch.float32)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raise an RtkError."""
        raise RtkError(
            "adapters cannot be merged into fp8 weights. Load the adapter on the 16-bit model, call "
            "merge_and_unload() there, and write the result with rtkernels.models.export_fp8"
        )


def served_lora(config: LoraConfig) -> LoraConfig:
    """Let a LoRA configuration target the fp8 linear layers of a model from :func:`rtkernels.models.serve_fp8`.

    Use it for ``get_peft_model(model, served_lora(config))``, and to load an adapter:
    ``PeftModel.from_pretrained(model, folder, config=served_lora(LoraConfig.from_pretrained(folder)))``. Adapters of
    the 16-bit model fit. Other layers of the model get PEFT's own classes.

    Args:
        config: Plain LoRA. It is changed in place.

    Returns:
        `config`.

    Raises:
        ArgumentError: `config` is not a ``LoraConfig``, or asks for a variant that changes or reads the base weight.
    """
    if not isinstance(config, LoraConfig):
        raise ArgumentError(f"config is a {type(config).__name__}; expected a peft.LoraConfig")
    if config.init_lora_weights not in _INITS:
        raise ArgumentError(
            f"config.init_lora_weights is {config.init_lora_weights!r}; expected one of {_INITS}: others change the "
            f"base weight, which is fp8"
        )
    for name in ("use_dora", "target_parameters"):
        if getattr(config, name, None):
            raise ArgumentError(
                f"config.{name} is {getattr(config, name)!r}; expected it unset: it needs the base weight in 16 bits"
            )
    config._register_custom_module({ServedLinear: ServedLora})
    return config
