"""Models of transformers, built small with inputs that they accept."""

from __future__ import annotations

import inspect
import random
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench.zoo import small
from bench.zoo.inputs import MAX_TRIES, Maker, learn

LARGEST_PARAMETERS = 40_000_000


class NotBuilt(Exception):
    """A class that could not be built small, or does not accept any of our inputs; says why."""


class Built(NamedTuple):
    """A model in training mode, and inputs for it: with labels, where it has a loss of its own."""

    model: nn.Module
    inputs: dict[str, Any]
    has_loss: bool
    input_gradients: bool = True


def seed(number: int = 0) -> None:
    """Seed the random numbers of torch, Python and NumPy."""
    torch.manual_seed(number)
    random.seed(number)
    try:
        import numpy

        numpy.random.seed(number)
    except ImportError:
        pass


def classes() -> dict[str, tuple[str, str]]:
    """Return the model type and the first mapping of every class in transformers' auto mappings."""
    from transformers.models.auto import modeling_auto

    found: dict[str, tuple[str, str]] = {}
    for mapping, entries in vars(modeling_auto).items():
        if mapping.endswith("_MAPPING_NAMES") and mapping.startswith("MODEL"):
            for kind, names in entries.items():
                for name in names if isinstance(names, (tuple, list)) else (names,):
                    found.setdefault(name, (kind, mapping.removesuffix("_MAPPING_NAMES")))
    return found


def class_of(name: str) -> type:
    """Return a class of transformers.

    Raises:
        NotBuilt: It needs a library that is not there.
    """
    import transformers

    try:
        cls = getattr(transformers, name)
        if getattr(cls, "_backends", None):  # a placeholder
            raise NotBuilt(f"needs {', '.join(cls._backends)}")
        inspect.signature(cls.forward)
    except NotBuilt:
        raise
    except BaseException as error:  # a placeholder of transformers for a missing library raises its own errors
        raise NotBuilt(_line(error)) from None
    return cls


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


def kind_of(cls: type, model_type: str) -> str:
    """Return the kind under which a class is counted."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    names = set(inspect.signature(cls.forward).parameters)
    pictures = names & {"pixel_values", "pixel_values_videos", "image_grid_thw", "flattened_patches", "visual_feats"}
    audio = names & {"input_features", "input_values", "audio_features", "audio_input_features", "audio_mel"}
    text = "input_ids" in names
    if names & {"past_values"}:
        return "time series"
    if text and (pictures or audio):
        return "multimodal"
    if pictures or "grid_thw" in names:
        return "vision"
    if audio:
        return "audio"
    if "decoder_input_ids" in names:
        return "encoder-decoder"
    if text and model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return "decoder"
    return "encoder" if text else "other"


def config_of(cls: type, model_type: str, level: int, changes: dict[str, Any] | None = None) -> Any:
    """Return a small configuration for a class."""
    from transformers import AutoConfig, PreTrainedConfig

    try:
        config = AutoConfig.for_model(model_type)
    except (ValueError, KeyError):
        config = cls.config_class()
    wanted = getattr(cls, "config_class", None)
    if wanted is not None and not isinstance(config, wanted):
        config = wanted()
    small.shrink(config, PreTrainedConfig, level)
    small.apply_changes(config, {**small.CHANGES.get(model_type, {}), **(changes or {})})
    _compute_caps(config)
    return config


def _compute_caps(config: Any) -> bool:
    """Make a model with soft-capped attention eager, because sdpa ignores the cap; return whether it did."""
    inner = [_compute_caps(part) for part in vars(config).values() if hasattr(part, "_attn_implementation")]
    if any(inner) or getattr(config, "attn_logit_softcapping", None) is not None:
        config._attn_implementation = "eager"
        return True
    return False


def outputs_of(result: Any) -> dict[str, Tensor]:
    """Return the tensors of a model's result by their path in it; caches are left out."""
    found: dict[str, Tensor] = {}

    def walk(path: str, value: Any) -> None:
        if isinstance(value, Tensor):
            found[path] = value
        elif hasattr(value, "tensor") and hasattr(value, "hidden"):  # logits that are not computed yet
            found[path] = value.tensor()
        elif isinstance(value, dict) or hasattr(value, "items"):
            for name, inner in value.items():
                if "past_key_values" not in str(name) and "cache" not in str(name):
                    walk(f"{path}.{name}", inner)
        elif isinstance(value, (tuple, list)):
            for i, inner in enumerate(value):
                walk(f"{path}[{i}]", inner)

    walk("", result)
    return found


def with_gradients(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return inputs with the floating-point ones as leaves of a graph."""
    return {
        name: value.detach().clone().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in inputs.items()
    }


def call(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """Return the result of a forward with fixed random numbers."""
    seed(1)
    return model(**unshared(inputs))


def unshared(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return inputs that a model may write to; leaves of a graph as they are."""
    return {
        name: value.clone() if isinstance(value, Tensor) and not value.requires_grad else value
        for name, value in inputs.items()
    }


def _try(model: nn.Module, inputs: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = call(model, inputs)
    if not any(t.is_floating_point() and t.numel() for t in outputs_of(result).values()):
        raise NotBuilt("gives no numbers")
    return result


def model_of(cls: type, config: Any, known_small: bool = True) -> nn.Module:
    """Return a model with random weights in fp32, in training mode, the same at every call.

    Raises:
        NotBuilt: It would be too large.
    """
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in cls(config).parameters())
    except Exception:  # its constructor computes something: it is built at once
        if not known_small:
            raise
        size = 0
    if size > LARGEST_PARAMETERS:
        raise NotBuilt(f"has {size / 1e6:.0f} M parameters")
    seed()
    model = cls(config).float().train()
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout2d, nn.AlphaDropout)):
            module.p = 0.0
    size = sum(p.numel() for p in model.parameters())
    if size > LARGEST_PARAMETERS:
        raise NotBuilt(f"has {size / 1e6:.0f} M parameters")
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        for name, token in (("pad_token_id", 0), ("bos_token_id", 1), ("decoder_start_token_id", 1)):
            if getattr(generation, name, None) is None:
                setattr(generation, name, token)
        generation.forced_eos_token_id = generation.forced_bos_token_id = None
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # norms begin as ones or zeros, which hides mistakes
        if not parameter.is_floating_point() or not parameter.numel():
            continue
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        elif not torch.isfinite(parameter).all() or float(parameter.detach().abs().max()) == 0:
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and not torch.isfinite(buffer).all() and "mask" not in name:
            raise NotBuilt(f"its buffer {name} is not finite")
    return model


def build(name: str, model_type: str | None = None, changes: dict[str, Any] | None = None) -> Built:
    """Return a class of transformers, built small, with inputs.

    Raises:
        NotBuilt: None of the attempts gave a model that accepts inputs.
    """
    cls = class_of(name)
    model_type = classes()[name][0] if model_type is None else model_type
    reasons: list[str] = []
    tries = 0
    for level in (0, 1, 2):
        try:
            config = config_of(cls, model_type, level, changes)
            if hasattr(config, "use_cache"):
                config.use_cache = False
            model = model_of(cls, config, level == 0)
        except Exception as error:  # of a library that we do not own
            reasons.append(f"{_line(error)}")
            continue
        maker = Maker(cls, model.config)
        kept: dict[str, Any] | None = None
        forms, learned = maker.forms(), False
        position = 0
        while tries < MAX_TRIES * (level + 1):
            if learned:  # with other tokens, from the same form on
                forms = maker.forms()
                for _ in range(position - 1):
                    next(forms, None)
                learned, position = False, position - 1
            inputs = next(forms, None)
            position += 1
            if inputs is None:
                break
            tries += 1
            try:
                _try(model, inputs)
            except Exception as error:
                reasons.append(_line(error))
                learned = learn(maker, error)
                continue
            kept = inputs
            break
        if kept is not None:
            return _with_labels(model, maker, kept)
    raise NotBuilt(" | ".join(dict.fromkeys(reasons)) if reasons else "has no inputs that we know")


def _with_labels(model: nn.Module, maker: Maker, inputs: dict[str, Any]) -> Built:
    for labels in maker.labels(inputs):
        for together in (
            {**inputs, **labels},
            {k: v for k, v in {**inputs, **labels}.items() if k != "decoder_input_ids"},
        ):
            try:
                loss = getattr(_try(model, together), "loss", None)
            except Exception:  # labels of another form
                continue
            if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad and torch.isfinite(loss):
                return Built(model, together, True)
    return Built(model, inputs, False)
