"""Load, create, serve and write models with fp8 weights and one scale per 128 x 128 block.

The file layout is that of the DeepSeek-V3 and Qwen3 fp8 checkpoints, which transformers calls fine-grained fp8: an e4m3
``weight``, a float32 ``weight_scale_inv`` ``[rows / 128, columns / 128]``, and in ``config.json`` a
``quantization_config`` of method "fp8". The names of tensors in files come from transformers' own conversion.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rtkernels.errors import ArgumentError, RtkError
from rtkernels.models import servable
from rtkernels.models.checkpoint_files import check_tokenizer, write_tokenizer
from rtkernels.models.recognize import NotRecognized
from rtkernels.models.served import BLOCK, ServedExperts, ServedLinear, serve_experts, serve_linear
from rtkernels.nn.quantized_linear import QuantizedLinear
from rtkernels.runtime.progress import Bar

_SCALE = "_scale_inv"  # suffix of a weight's name
_SHARD_BYTES = 5 * 10**9


class _Place(NamedTuple):
    """Where a tensor of a file is in the model: the parameter and, for experts, which expert and which half."""

    name: str
    expert: int | None = None
    half: int | None = None


def _experts_of(model: nn.Module) -> dict[str, nn.Module]:
    from rtkernels.models.experts import is_experts

    return {name: m for name, m in model.named_modules() if isinstance(m, ServedExperts) or is_experts(m)}


def _places(model: nn.Module) -> dict[str, _Place]:
    """Return the location in the model of every tensor of a checkpoint, by its name in the file.

    To find them, numbers instead of tensors are sent through the conversion that transformers uses for saving.
    """
    from transformers.core_model_loading import revert_weight_conversion

    experts = _experts_of(model)
    numbers: dict[str, Tensor] = {}
    places: list[_Place] = []
    for name in model.state_dict(keep_vars=True):
        path, _, part = name.rpartition(".")
        if name.endswith(_SCALE):  # handled with its weight
            continue
        if path in experts and part in ("gate_up_proj", "down_proj") and not experts[path].has_bias:
            halves, count = (2 if part == "gate_up_proj" else 1), experts[path].num_experts
            first = len(places)
            places += [_Place(name, e, h if halves == 2 else None) for e in range(count) for h in range(halves)]
            numbers[name] = torch.arange(first, len(places), dtype=torch.float64, device="cpu").view(count, halves, 1)
        else:
            numbers[name] = torch.full((1,), len(places), dtype=torch.float64, device="cpu")
            places.append(_Place(name))
    found = {name: value.flatten() for name, value in revert_weight_conversion(model, numbers).items()}
    if any(value.numel() != 1 for value in found.values()) or len(found) != len(places):
        raise RtkError(f"{type(model).__name__} is saved in a layout that rtkernels does not know")
    return {name: places[int(value)] for name, value in found.items()}


def _part(parameter: Tensor, place: _Place, scale: bool = False) -> Tensor:
    """Return the view of a parameter, or of its scales, at a location."""
    if place.expert is None:
        return parameter
    whole = parameter[place.expert]
    return whole if place.half is None else whole.chunk(2)[place.half]


# ---- writing --------------------------------------------------------------------------------------------------------


def export_fp8(model: nn.Module, path: str | Path, *, tokenizer: Any = None) -> list[str]:
    """Write a model as an fp8 checkpoint in the layout of the DeepSeek-V3 and Qwen3 checkpoints.

    Linear layers and experts become e4m3 codes with one float32 scale per 128 x 128 block. The head, embeddings, norms,
    routers, layers with fewer than 128 rows or columns, and those that :func:`serve` leaves alone do not change.
    transformers, vLLM and :func:`serve` can read the result. The generation configuration and the files of the
    tokenizer and processors are written, too. On a terminal, a bar shows the rate, unless transformers' progress bars
    are disabled.

    Args:
        model: A transformers model, or the result of :func:`serve`, whose fp8 codes are written unchanged.
        path: The output folder; it is created if it does not exist.
        tokenizer: A tokenizer or processor with ``save_pretrained``. Default: the files are copied from the folder, or
            from the Hub's cache on this machine, that the model was loaded from; a warning is issued if they are not
            there. False: none are written.

    Returns:
        Names of the modules that were not converted, as listed in the configuration.

    Raises:
        ArgumentError: `tokenizer` has no ``save_pretrained``.
        RtkError: The model has layers of :class:`rtkernels.nn.QuantizedLinear`, as from ``serve(weights="int4")``,
            or infinite weights.
    """
    check_tokenizer(tokenizer)
    packed = [name for name, m in model.named_modules() if isinstance(m, QuantizedLinear)]
    if packed:
        raise RtkError(f"{packed[0]} has {model.get_submodule(packed[0]).weights} weights, which fp8 files cannot hold")
    from safetensors.torch import save_file

    quantized, skipped = _plan(model)
    servable.check_finite(model, quantized)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in _tensors(model, quantized):
        nbytes = tensor.nbytes
        if shards[-1] and size + nbytes > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name], size = tensor.detach().contiguous().cpu(), size + nbytes
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        where = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        total = sum(map(_bytes, shards))
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    with _bar(sum(map(_bytes, shards))) as bar:
        for file, shard in zip(names, shards, strict=True):
            save_file(shard, folder / file, metadata={"format": "pt"})
            bar.step(_bytes(shard))
    config = model.config.to_dict()
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(next(p.dtype for p in model.parameters() if p.element_size() > 1)).removeprefix("torch.")
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": skipped,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str))
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    write_tokenizer(model, tokenizer, folder)
    return skipped


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _bar(nbytes: int) -> Bar:
    """Return a bar of bytes, which is drawn on a terminal only, and unless transformers' own bars are off."""
    from transformers.utils.logging import is_progress_bar_enabled

    return Bar(nbytes, "GB", None if is_progress_bar_enabled() else io.StringIO(), lines=False)


def _plan(model: nn.Module) -> tuple[set[str], list[str]]:
    """Return the parameters to quantise, and the linear modules that are not quantised."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    quantized, skipped = set(), []
    experts, kept = _experts_of(model), servable.reasons(model)
    for name, module in model.named_modules():
        if name in experts:
            if _fits(module):
                quantized |= {f"{name}.gate_up_proj", f"{name}.down_proj"}
            else:
                skipped.append(name)
        elif isinstance(module, ServedLinear):
            quantized.add(f"{name}.weight")
        elif isinstance(module, nn.Linear):
            if module is not head and name not in kept and min(module.weight.shape) >= BLOCK:
                quantized.add(f"{name}.weight")
            else:
                skipped.append(name)
    return quantized, skipped


def _fits(experts: nn.Module) -> bool:
    """Return True if no block of 128 rows contains both gate and up rows, or rows of two experts."""
    if isinstance(experts, ServedExperts):
        return True
    flags = not experts.has_bias and experts.has_gate and not experts.is_transposed and experts.is_concatenated
    return flags and experts.gate_up_proj.shape[1] % (2 * BLOCK) == 0 and experts.down_proj.shape[1] % BLOCK == 0


def _tensors(model: nn.Module, quantized: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the files, with codes and scales instead of the named weights."""
    import rtkernels

    state, tied = model.state_dict(keep_vars=True), _tied(model)
    parts = {
        name: (place, _part(state[place.name].detach(), place))
        for name, place in _places(model).items() if place.name not in tied
    }  # fmt: skip
    with _bar(sum(tensor.nbytes for _, tensor in parts.values())) as bar:
        for file_name, (place, tensor) in parts.items():
            if place.name not in quantized:
                yield file_name, tensor
            elif place.name + _SCALE in state:
                yield file_name, tensor
                yield file_name + _SCALE, _part(state[place.name + _SCALE].detach(), place, scale=True)
            else:
                codes, scale = rtkernels.quantize_fp8(tensor, granularity="block")
                yield file_name, codes
                yield file_name + _SCALE, scale
            bar.step(tensor.nbytes)


def _tied(model: nn.Module) -> set[str]:
    """Return the names of parameters that are shared with another one, such as a head tied to the embeddings."""
    first: dict[int, str] = {}
    names = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if first.setdefault(id(tensor), name) != name:
            names.add(name)
    return names


# ---- loading --------------------------------------------------------------------------------------------------------


def convert_fp8(model_or_path: Any, device: Any, head: bool) -> nn.Module:
    """Return the model of ``serve_fp8``."""
    if isinstance(model_or_path, nn.Module):
        quantized, _ = _plan(model_or_path)
        servable.check_finite(model_or_path, quantized)
        model = _convert(model_or_path, quantized)
    elif isinstance(model_or_path, (str, Path)):
        model = _loaded(Path(model_or_path))
    else:
        came = type(model_or_path).__name__
        raise ArgumentError(f"model_or_path is a {came}; expected a model of transformers or a folder")
    if head:
        _convert_head(model)
    return model.eval().requires_grad_(False) if device is None else model.eval().requires_grad_(False).to(device)


def _convert(model: nn.Module, quantized: set[str], empty: bool = False) -> nn.Module:
    """Replace the linear layers and experts with the named weights by serving layers."""
    for name, module in list(model.named_modules()):
        path, _, child = name.rpartition(".")
        served: nn.Module | None = None
        if f"{name}.weight" in quantized and not isinstance(module, ServedLinear):
            served = serve_linear(module, empty)
        elif f"{name}.gate_up_proj" in quantized and not isinstance(module, ServedExperts):
            try:
                served = serve_experts(module, empty)
            except NotRecognized as error:
                raise RtkError(f"{name}, a {type(module).__name__}, cannot be served in fp8: {error}") from error
        if served is not None:
            setattr(model.get_submodule(path), child, served)
    return model


def _convert_head(model: nn.Module) -> None:
    """Replace the head of a model by a serving layer.

    Raises:
        RtkError: It has no head, or one that is not a linear layer of 16 features or a multiple.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if isinstance(head, ServedLinear):
        return
    if not isinstance(head, nn.Linear) or head.in_features % 16:
        raise RtkError(f"head=True: the head of this model is {head}; expected a linear layer of 16 n features")
    served = serve_linear(head)
    if model.get_input_embeddings().weight is head.weight:
        model.config.tie_word_embeddings = False  # or transformers would share the codes with the embedding
    model.set_output_embeddings(served)


def _loaded(folder: Path) -> nn.Module:
    """Return a model with the tensors of a checkpoint."""
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.initialization import no_init_weights

    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").exists():
        raise ArgumentError(f"model_or_path is {str(folder)!r}; expected a folder with config.json and *.safetensors")
    config = AutoConfig.from_pretrained(folder)
    how = getattr(config, "quantization_config", None) or {}
    if how.get("quant_method") != "fp8" or list(how.get("weight_block_size") or ()) != [BLOCK, BLOCK]:
        raise ArgumentError(
            f"{folder} has the quantization_config {how or None}; expected quant_method 'fp8' with weight_block_size "
            f"[128, 128]"
        )
    del config.quantization_config
    with no_init_weights():  # memory that is never written is not committed
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.bfloat16)
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    places = _places(model)
    opened = [safe_open(file, "pt") for file in files]
    where = {name: file for file in opened for name in file.keys()}
    coded = {place.name for name, place in places.items() if name + _SCALE in where}
    _convert(model, coded, empty=True)
    model.config.quantization_config = how
    state, tied, missing = model.state_dict(keep_vars=True), _tied(model), []
    for name, place in places.items():
        if name not in where:
            missing += [] if place.name in tied else [name]
            continue
        _copy(_part(state[place.name], place), where[name].get_tensor(name), name)
        if place.name in coded:
            scale = where[name + _SCALE].get_tensor(name + _SCALE)
            _copy(_part(state[place.name + _SCALE], place, scale=True), scale, name + _SCALE)
    if missing:
        raise RtkError(f"{folder} lacks {len(missing)} tensors of the model: {', '.join(missing[:5])}")
    return model


@torch.no_grad()
def _copy(to: Tensor, value: Tensor, name: str) -> None:
    if to.shape != value.shape:
        raise RtkError(f"{name} has shape {tuple(value.shape)} in the file; the model expects {tuple(to.shape)}")
    to.copy_(value)
