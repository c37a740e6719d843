"""The names and signatures of other libraries that our adapters rely on, read from their source without importing it.

``python tests/integrations/contract.py FOLDER`` records them from the wheels in a folder.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

RECORD = Path(__file__).with_name("contract.json")

# By package: a file, and a name in it. A dotted name is that of a method, of a function inside of another, or of an
# attribute that a class assigns. With @ it is more: variables of its surroundings that a function uses, fields of a
# class, or calls with ``fused_lm_head=`` and of ``add_fused_lm_head`` in a file.
NAMES = {
    "transformers": (
        "integrations/sdpa_attention.py:sdpa_attention_forward",
        "masking_utils.py:sdpa_mask",
        "masking_utils.py:AttentionMaskInterface",
        "modeling_utils.py:AttentionInterface",
        "modeling_utils.py:PreTrainedModel.set_attn_implementation",
        "modeling_utils.py:PreTrainedModel.set_experts_implementation",
        "integrations/moe.py:grouped_mm_experts_forward",
        "integrations/moe.py:ALL_EXPERTS_FUNCTIONS",
        "integrations/finegrained_fp8.py:ALL_FP8_EXPERTS_FUNCTIONS",
        "utils/generic.py:GeneralInterface.register",
        "trainer_callback.py:TrainerCallback.on_init_end",
        "trainer_callback.py:TrainerCallback.on_train_begin",
        "trainer_callback.py:CallbackHandler.call_event",
        "core_model_loading.py:revert_weight_conversion",
    ),
    "accelerate": (
        "state.py:AcceleratorState.mixed_precision",
        "state.py:AcceleratorState._mixed_precision",
        "state.py:AcceleratorState._shared_state",
    ),
    "peft": (
        "tuners/lora/config.py:LoraConfig._register_custom_module",
        "tuners/lora/layer.py:Linear.__init__",
        "tuners/lora/layer.py:Linear.merge",
        "tuners/lora/layer.py:Linear.forward",
        "tuners/tuners_utils.py:BaseTunerLayer._move_adapter_to_device_of_base_layer",
    ),
    "vllm": (
        "ir/op.py:IrOp.register_impl",
        "ir/ops/layernorm.py:rms_norm",
        "ir/ops/layernorm.py:fused_add_rms_norm",
        "model_executor/custom_op.py:CustomOp.register_oot",
        "model_executor/layers/activation.py:SiluAndMul.forward_cuda",
        "model_executor/layers/activation.py:GeluAndMul.forward_cuda",
        "model_executor/layers/activation.py:GeluAndMul.approximate",
        "model_executor/layers/rotary_embedding/base.py:RotaryEmbedding.forward_cuda",
        "model_executor/layers/rotary_embedding/base.py:RotaryEmbeddingBase.cos_sin_cache",
        "model_executor/layers/quantization/input_quant_fp8.py:QuantFP8.__init__",
        "model_executor/layers/quantization/input_quant_fp8.py:QuantFP8.forward_cuda",
        *(
            f"model_executor/layers/quantization/input_quant_fp8.py:QuantFP8.{field}"
            for field in (
                "static",
                "group_shape",
                "use_per_token_if_dynamic",
                "num_token_padding",
                "column_major_scales",
                "tma_aligned_scales",
                "use_ue8m0",
                "is_group_quant",
                "group_size",
            )
        ),
        "v1/attention/backend.py:AttentionBackend.get_supported_kernel_block_sizes",
        "v1/attention/backend.py:AttentionBackend.supports_head_size",
        "v1/attention/backend.py:AttentionImpl.__init__",
        "v1/attention/backend.py:AttentionImpl.forward",
        "v1/attention/backend.py:AttentionMetadataBuilder.__init__",
        "v1/attention/backend.py:AttentionMetadataBuilder.build",
        "v1/attention/backend.py:CommonAttentionMetadata@fields",
        "v1/attention/backends/registry.py:register_backend",
        "v1/attention/backends/triton_attn.py:TritonAttentionImpl.do_kv_cache_update",
        "model_executor/kernels/linear/__init__.py:register_linear_kernel",
        "model_executor/kernels/linear/__init__.py:init_fp8_linear_kernel",
        "model_executor/kernels/linear/scaled_mm/ScaledMMLinearKernel.py:ScaledMMLinearKernel.is_supported",
        "model_executor/kernels/linear/scaled_mm/ScaledMMLinearKernel.py:ScaledMMLinearKernel.can_implement",
        "model_executor/kernels/linear/scaled_mm/ScaledMMLinearKernel.py:FP8ScaledMMLinearLayerConfig@fields",
        "model_executor/kernels/linear/scaled_mm/ScaledMMLinearKernel.py:FP8ScaledMMLinearKernel.__init__",
        "model_executor/kernels/linear/scaled_mm/ScaledMMLinearKernel.py:FP8ScaledMMLinearKernel.apply_weights",
        "model_executor/kernels/linear/scaled_mm/ScaledMMLinearKernel.py:FP8ScaledMMLinearKernel.apply_scaled_mm",
        "model_executor/kernels/linear/scaled_mm/ScaledMMLinearKernel.py:FP8ScaledMMLinearKernel._get_layer_params",
        "model_executor/kernels/linear/scaled_mm/BlockScaledMMLinearKernel.py:FP8BlockParams.block_scale",
        "model_executor/kernels/linear/scaled_mm/BlockScaledMMLinearKernel.py:FP8BlockParams.block_scale_attr",
        "model_executor/kernels/linear/scaled_mm/BlockScaledMMLinearKernel.py:Fp8BlockScaledMMLinearKernel.__init__",
        "model_executor/kernels/linear/scaled_mm/BlockScaledMMLinearKernel.py:Fp8BlockScaledMMLinearKernel.apply_weights",
        "model_executor/kernels/linear/scaled_mm/BlockScaledMMLinearKernel.py:"
        "Fp8BlockScaledMMLinearKernel.apply_block_scaled_mm",
        "model_executor/layers/quantization/__init__.py:register_quantization_config",
        "model_executor/layers/quantization/base_config.py:QuantizationConfig.override_quantization_method",
        "model_executor/layers/quantization/fp8.py:Fp8Config.get_quant_method",
        "model_executor/layers/quantization/fp8.py:Fp8LinearMethod.__init__",
        "model_executor/layers/quantization/fp8.py:Fp8LinearMethod.create_weights",
        "model_executor/layers/quantization/fp8.py:Fp8LinearMethod.fp8_linear",
        "model_executor/layers/quantization/fp8.py:Fp8LinearMethod.activation_quant_key",
        "model_executor/layers/quantization/fp8.py:Fp8LinearMethod.use_marlin",
        "model_executor/layers/quantization/fp8.py:Fp8MoEMethod.__init__",
        "model_executor/layers/quantization/fp8.py:Fp8MoEMethod.moe_block_shape",
        "model_executor/layers/quantization/fp8.py:Fp8MoEMethod.per_act_token_quant",
        "model_executor/layers/quantization/fp8.py:Fp8MoEMethod.experts_cls",
        "model_executor/layers/quantization/fp8.py:Fp8MoEMethod.fp8_backend",
        "model_executor/layers/quantization/utils/quant_utils.py:create_fp8_quant_key",
        "model_executor/layers/quantization/utils/quant_utils.py:kFp8Static128BlockSym",
        "model_executor/layers/quantization/utils/quant_utils.py:kFp8StaticChannelSym",
        "model_executor/utils.py:replace_parameter",
        "model_executor/layers/fused_moe/activation.py:MoEActivation.SILU",
        "model_executor/layers/fused_moe/config.py:FusedMoEConfig@fields",
        "model_executor/layers/fused_moe/modular_kernel.py:FusedMoEExperts.is_supported_config",
        "model_executor/layers/fused_moe/modular_kernel.py:FusedMoEExperts._supports_current_device",
        "model_executor/layers/fused_moe/modular_kernel.py:FusedMoEExperts._supports_no_act_and_mul",
        "model_executor/layers/fused_moe/modular_kernel.py:FusedMoEExperts._supports_quant_scheme",
        "model_executor/layers/fused_moe/modular_kernel.py:FusedMoEExperts._supports_activation",
        "model_executor/layers/fused_moe/modular_kernel.py:FusedMoEExperts._supports_parallel_config",
        "model_executor/layers/fused_moe/modular_kernel.py:FusedMoEExperts._uses_post_gemm2_hook",
        "model_executor/layers/fused_moe/modular_kernel.py:FusedMoEExperts.block_shape",
        "model_executor/layers/fused_moe/modular_kernel.py:FusedMoEExpertsModular.workspace_shapes",
        "model_executor/layers/fused_moe/modular_kernel.py:FusedMoEExpertsModular.finalize_weight_and_reduce_impl",
        "model_executor/layers/fused_moe/modular_kernel.py:FusedMoEExpertsModular.apply",
        "model_executor/layers/fused_moe/oracle/fp8.py:Fp8MoeBackend.TRITON",
        "model_executor/layers/fused_moe/oracle/unquantized.py:UnquantizedMoeBackend.TRITON",
        "model_executor/layers/fused_moe/topk_weight_and_reduce.py:TopKWeightAndReduceNoOP",
        "model_executor/layers/fused_moe/unquantized_fused_moe_method.py:UnquantizedFusedMoEMethod.__init__",
        "model_executor/layers/fused_moe/unquantized_fused_moe_method.py:UnquantizedFusedMoEMethod.unquantized_backend",
        "model_executor/layers/attention/mla_attention.py:MLACommonMetadata@fields",
        "model_executor/layers/attention/mla_attention.py:MLACommonDecodeMetadata@fields",
        "model_executor/layers/attention/mla_attention.py:MLACommonPrefillMetadata@fields",
        "model_executor/layers/attention/mla_attention.py:MLACommonPrefillMetadata.ContextChunk@fields",
        "model_executor/layers/attention/mla_attention.py:MLACommonImpl.__init__",
        "model_executor/layers/attention/mla_attention.py:MLACommonImpl.forward_mqa",
        "model_executor/layers/attention/mla_attention.py:MLACommonBaseImpl.forward_mha",
        "model_executor/layers/attention/mla_attention.py:QueryLenSupport.UNIFORM",
        "v1/attention/backend.py:MLAAttentionImpl.__init__",
        "v1/attention/backend.py:MLAAttentionImpl.do_kv_cache_update",
        "v1/attention/backends/mla/prefill/base.py:MLAPrefillBackend.__init__",
        "v1/attention/backends/mla/prefill/base.py:MLAPrefillBackend.prepare_metadata",
        "v1/attention/backends/mla/prefill/base.py:MLAPrefillBackend.run_prefill_new_tokens",
        "v1/attention/backends/mla/prefill/base.py:MLAPrefillBackend.run_prefill_context_chunk",
        "v1/attention/backends/mla/prefill/base.py:MLAPrefillBackend.supports_mla_dimensions",
        "v1/attention/backends/mla/prefill/registry.py:register_mla_prefill_backend",
    ),
    "trl": (
        "trainer/utils.py:FusedCausalLMOutput",
        "trainer/utils.py:FusedCausalLMOutput@fields",
        "trainer/utils.py:add_fused_lm_head",
        "trainer/utils.py:add_fused_lm_head._fused_forward",
        "trainer/utils.py:add_fused_lm_head._fused_forward@cells",
        "trainer/sft_trainer.py:SFTTrainer.compute_loss",
        "trainer/dpo_trainer.py:DPOTrainer._compute_loss",
        "trainer/kto_trainer.py:KTOTrainer._compute_loss",
        "trainer/grpo_trainer.py:GRPOTrainer._get_per_token_logps_and_entropies",
        "trainer/rloo_trainer.py:RLOOTrainer._get_per_token_logps_and_entropies",
        "trainer/sft_trainer.py:@fused",
        "trainer/dpo_trainer.py:@fused",
        "trainer/kto_trainer.py:@fused",
        "trainer/grpo_trainer.py:@fused",
        "trainer/rloo_trainer.py:@fused",
        "trainer/distillation_trainer.py:_chunked_divergence_loss",
        "trainer/distillation_trainer.py:DistillationTrainer._compute_loss",
        "experimental/cpo/cpo_trainer.py:CPOTrainer.concatenated_forward",
        "experimental/cpo/cpo_trainer.py:CPOTrainer.get_batch_logps",
        "experimental/orpo/orpo_trainer.py:ORPOTrainer.concatenated_forward",
        "experimental/orpo/orpo_trainer.py:ORPOTrainer.get_batch_logps",
    ),
    "torchtitan": (
        "config/override.py:override",
        "config/override.py:derive",
        "config/override.py:parse_cli_imports",
        "models/common/nn_modules.py:RMSNorm.Config@fields",
        "models/common/linear.py:Linear.Config@fields",
        "models/common/feed_forward.py:FeedForward.Config@fields",
        "models/common/feed_forward.py:FeedForward.forward",
        "models/common/moe.py:GroupedExperts.Config@fields",
        "models/common/moe.py:GroupedExperts.forward",
        "models/common/moe.py:GroupedExperts.w1_EFD",
        "models/common/moe.py:GroupedExperts.w2_EDF",
        "models/common/moe.py:GroupedExperts.w3_EFD",
        "models/common/attention.py:ScaledDotProductAttention.forward",
        "models/common/attention.py:VarlenAttention.Config@fields",
        "models/common/attention.py:VarlenAttention.forward",
        "models/common/attention.py:VarlenMetadata@fields",
        "components/loss.py:IGNORE_INDEX",
        "components/loss.py:cross_entropy_loss",
        "components/loss.py:CrossEntropyLoss.Config@fields",
        "components/loss.py:CrossEntropyLoss.__init__",
        "protocols/model.py:ModelConfigConverter.convert",
        "protocols/module.py:Module@fields",
        "protocols/module.py:Module.Config@fields",
        "distributed/spmd_types.py:current_spmd_mesh",
        "distributed/spmd_types.py:spmd_mesh_size",
        "distributed/utils.py:get_spmd_backend",
    ),
}


def signatures(package: str, read: Callable[[str], str]) -> dict[str, str | None]:
    """Return what is behind each name: parameters of a function, "class", "value", None if it does not exist.

    `read` returns the text of a file of the package, by its path in the package.
    """
    found: dict[str, str | None] = {}
    trees: dict[str, ast.Module | None] = {}
    for place in NAMES[package]:
        path, _, name = place.partition(":")
        if path not in trees:
            try:
                trees[path] = ast.parse(read(path))
            except (KeyError, FileNotFoundError):
                trees[path] = None
        tree = trees[path]
        name, _, more = name.partition("@")
        found[place] = None if tree is None else _MORE[more](tree, name)
    return found


def _cells(tree: ast.Module, name: str) -> str | None:
    """Return the variables of an outer function that an inner one uses."""
    waiting, wanted = [compile(tree, "source", "exec")], name.rpartition(".")[2]
    while waiting:
        code = waiting.pop()
        if code.co_name == wanted:
            return ", ".join(sorted(code.co_freevars))
        waiting += [inner for inner in code.co_consts if isinstance(inner, type(code))]
    return None


def _fields(tree: ast.AST, name: str) -> str | None:
    """Return the annotated attributes of a class, which may be inside of another."""
    outer, _, inner = name.partition(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == outer:
            if inner:
                return _fields(node, inner)
            return ", ".join(n.target.id for n in node.body if isinstance(n, ast.AnnAssign))
    return None


def _fused(tree: ast.Module, name: str) -> str | None:
    """Return that a file adds TRL's fused head and asks for it."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    added = any(isinstance(call.func, ast.Name) and call.func.id == "add_fused_lm_head" for call in calls)
    asked = any(keyword.arg == "fused_lm_head" for call in calls for keyword in call.keywords)
    return "added and asked for" if added and asked else None


def _about(tree: ast.AST, name: str) -> str | None:
    outer, _, inner = name.partition(".")
    for node in getattr(tree, "body", []):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == outer:
            if inner:
                return _about(node, inner) or ("value" if _assigns(node, inner) else None)
            return "class" if isinstance(node, ast.ClassDef) else f"({_parameters(node.args)})"
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and not inner:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == outer for target in targets):
                return "value"
    return None


def _assigns(cls: ast.ClassDef, name: str) -> bool:
    """Return True if a method of a class assigns to an attribute of self."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store)
        for node in ast.walk(cls)
    )


def _parameters(given: ast.arguments) -> str:
    """Return names and defaults of parameters without annotations, which change more often than calls do."""
    for arg in [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]:
        if arg is not None:
            arg.annotation = None
    return ast.unparse(given)


_MORE = {"": _about, "cells": _cells, "fields": _fields, "fused": _fused}


def of_adapter(name: str, file: Path) -> str | None:
    """Return what is behind a name of one of our files, without importing it."""
    return _about(ast.parse(file.read_text(encoding="utf-8")), name)


def of_installed(package: str) -> tuple[str, dict[str, str | None]]:
    """Return the version of an installed package, and what its names are."""
    from importlib.metadata import version

    spec = importlib.util.find_spec(package)
    folder = Path(spec.origin).parent
    return version(package), signatures(package, lambda path: (folder / path).read_text(encoding="utf-8"))


def of_wheel(file: Path) -> tuple[str, str, dict[str, str | None]]:
    """Return package and version of a wheel, and what its names are."""
    package, version = re.match(r"([A-Za-z0-9_]+)-([^-]+)-", file.name).groups()
    with zipfile.ZipFile(file) as wheel:
        return package, version, signatures(package, lambda path: wheel.read(f"{package}/{path}").decode())


def main(folder: str) -> None:
    record: dict[str, dict[str, dict[str, str | None]]] = {}
    for file in sorted(Path(folder).glob("*.whl")):
        package, version, about = of_wheel(file)
        record.setdefault(package, {})[version] = about
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
