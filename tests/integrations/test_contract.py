"""Names and signatures of other libraries are those that our adapters were written for."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integrations import fake_vllm, fake_vllm_fp8, fake_vllm_mla
from integrations.contract import NAMES, RECORD, of_adapter, of_installed, of_wheel

ROOT = Path(__file__).resolve().parents[2]
RECORDED: dict[str, dict[str, dict[str, str | None]]] = json.loads(RECORD.read_text(encoding="utf-8"))
# Names that old versions lack; the adapters do without them there.
NEWER = {"integrations/finegrained_fp8.py:ALL_FP8_EXPERTS_FUNCTIONS"}


def versions() -> Iterator[tuple[str, str, dict[str, str | None]]]:
    """Yield package, version and names: recorded, installed, and of the wheels in $RTKERNELS_WHEELS."""
    for package, by_version in RECORDED.items():
        yield from ((package, f"{version} recorded", names) for version, names in by_version.items())
        if importlib.util.find_spec(package) is not None:
            version, names = of_installed(package)
            yield package, f"{version} installed", names
    folder = os.environ.get("RTKERNELS_WHEELS")
    if folder:
        for file in sorted(Path(folder).glob("*.whl")):
            if file.name.partition("-")[0] in NAMES:
                package, version, names = of_wheel(file)
                yield package, f"{version} wheel", names


FOUND = list(versions())
OF_EACH = pytest.mark.parametrize(
    ("package", "names"), [pytest.param(p, names, id=f"{p} {version}") for p, version, names in FOUND]
)


@OF_EACH
def test_every_name_exists(package: str, names: dict[str, str | None]) -> None:
    missing = {name for name, about in names.items() if about is None} - NEWER
    assert set(names) == set(NAMES[package]) and not missing


@pytest.mark.parametrize("package", NAMES)
def test_the_installed_version_has_a_recorded_contract(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    version, names = of_installed(package)
    recorded = RECORDED[package]
    newest = max(recorded, key=lambda v: tuple(map(int, v.split("."))))
    assert names in (recorded.get(version, recorded[newest]), *recorded.values()), (
        f"{package} {version} changed; read what changed, then run python tests/integrations/contract.py FOLDER"
    )


def parameters(about: str | None) -> list[str]:
    """Return the names of the parameters that a signature has."""
    function = ast.parse(f"def f{about}: pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    return [arg.arg for arg in function.args.args + function.args.kwonlyargs]


def own(function: Any) -> list[str]:
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY,
    )  # fmt: skip
    return [name for name, p in inspect.signature(function).parameters.items() if p.kind in kinds]


@OF_EACH
def test_ours_take_what_theirs_take(package: str, names: dict[str, str | None]) -> None:
    if package == "transformers":
        from rtkernels.models import attention, by_name

        theirs = parameters(names["integrations/sdpa_attention.py:sdpa_attention_forward"])
        assert own(by_name.attention_by_name) == theirs[:5]
        assert set(theirs) - {"cache"} <= set(own(attention.attention_forward))  # a cache is rejected
        theirs = parameters(names["integrations/moe.py:grouped_mm_experts_forward"])
        assert own(by_name.experts_by_name) == theirs
        assert parameters(names["utils/generic.py:GeneralInterface.register"]) == ["cls", "key", "value"]
        for event in ("on_init_end", "on_train_begin"):
            theirs = parameters(names[f"trainer_callback.py:TrainerCallback.{event}"])
            assert theirs == ["self", "args", "state", "control"]
            pytest.importorskip("transformers")
            from rtkernels.integrations.transformers import RtkernelsCallback

            assert own(getattr(RtkernelsCallback, event))[:4] == theirs
    elif package == "trl":
        from rtkernels.models import fused_head, trl_distillation, trl_pairs

        for name in ("cpo/cpo_trainer.py:CPOTrainer", "orpo/orpo_trainer.py:ORPOTrainer"):
            for method, wanted in trl_pairs._PARAMETERS.items():
                assert parameters(names[f"experimental/{name}.{method}"]) == wanted
        theirs = parameters(names["trainer/distillation_trainer.py:_chunked_divergence_loss"])
        assert own(trl_distillation._divergence) == [*theirs, "save", "chunk_bytes"]
        assert names["trainer/utils.py:add_fused_lm_head._fused_forward@cells"] == ", ".join(sorted(fused_head._CELLS))
        fields = set(names["trainer/utils.py:FusedCausalLMOutput@fields"].split(", "))
        assert fields == {"loss", "log_probs", *fused_head.RESULTS, "label_mask", "aux_loss"}
        wanted = "fused_lm_head=False, labels=None, shift_labels=None, num_items_in_batch=None"
        assert names["trainer/utils.py:add_fused_lm_head._fused_forward"] == f"(self, *args, {wanted}, **kwargs)"
    elif package == "vllm":
        _compare_with_vllm(names)
    elif package == "peft":
        pytest.importorskip("peft")
        from rtkernels.integrations.peft import ServedLora

        assert own(ServedLora.merge) == parameters(names["tuners/lora/layer.py:Linear.merge"])
        moves = names["tuners/tuners_utils.py:BaseTunerLayer._move_adapter_to_device_of_base_layer"]
        assert own(ServedLora._move_adapter_to_device_of_base_layer) == parameters(moves)
        assert parameters(names["tuners/lora/config.py:LoraConfig._register_custom_module"]) == ["self", "mapping"]
    elif package == "torchtitan":
        adapter = ROOT / "rtkernels" / "integrations" / "torchtitan.py"
        for file, cls in (("feed_forward", "FeedForward"), ("moe", "GroupedExperts"),
                          ("attention", "ScaledDotProductAttention"), ("attention", "VarlenAttention")):  # fmt: skip
            theirs = names[f"models/common/{file}.py:{cls}.forward"]
            assert of_adapter(f"{cls}.forward", adapter) == theirs, cls
        theirs = names["components/loss.py:cross_entropy_loss"]
        assert of_adapter("cross_entropy_sum", adapter) == theirs
        assert of_adapter("CrossEntropyLoss.__init__", adapter) == names["components/loss.py:CrossEntropyLoss.__init__"]
        theirs = names["protocols/model.py:ModelConfigConverter.convert"]
        assert of_adapter("Fp8LinearConverter.convert", adapter) == theirs


def _compare_with_vllm(names: dict[str, str | None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fake_vllm.install(patch)
        ours = importlib.import_module("rtkernels.integrations.vllm")
        attention = importlib.import_module("rtkernels.integrations.vllm_attention")
        of_norms, of_backend = "ir/ops/layernorm.py", "v1/attention/backend.py"
        of_quantizer = "model_executor/layers/quantization/input_quant_fp8.py:QuantFP8"
        ours._register_layers()
        quantizer = fake_vllm.CustomOp.registered["QuantFP8"]
        for function, theirs in (
            (ours.rms_norm, f"{of_norms}:rms_norm"), (ours._plain, f"{of_norms}:rms_norm"),
            (ours.fused_add_rms_norm, f"{of_norms}:fused_add_rms_norm"),
            (ours._plain_sum, f"{of_norms}:fused_add_rms_norm"),
            (attention.RtkernelsImpl.forward, f"{of_backend}:AttentionImpl.forward"),
            (attention.RtkernelsMetadataBuilder.__init__, f"{of_backend}:AttentionMetadataBuilder.__init__"),
            (attention.RtkernelsMetadataBuilder.build, f"{of_backend}:AttentionMetadataBuilder.build"),
            (attention.RtkernelsImpl.do_kv_cache_update,
             "v1/attention/backends/triton_attn.py:TritonAttentionImpl.do_kv_cache_update"),
            (fake_vllm.IrOp.register_impl, "ir/op.py:IrOp.register_impl"),
            (fake_vllm.QuantFP8.__init__, f"{of_quantizer}.__init__"),
            (quantizer.forward_cuda, f"{of_quantizer}.forward_cuda"),
        ):  # fmt: skip
            assert own(function) == parameters(names[theirs]), theirs
        _compare_fp8_with_vllm(names)
        _compare_mla_with_vllm(names)
        init = parameters(names[f"{of_backend}:AttentionImpl.__init__"])
        assert own(attention.RtkernelsImpl.__init__)[: len(init)] == init
        fields = set(names[f"{of_backend}:CommonAttentionMetadata@fields"].split(", "))
        assert fields >= {
            "query_start_loc", "seq_lens", "num_actual_tokens", "max_query_len", "max_seq_len", "block_table_tensor",
            "slot_mapping", "causal",
        }  # fmt: skip


def _compare_fp8_with_vllm(names: dict[str, str | None]) -> None:
    fp8, moe = (importlib.import_module(f"rtkernels.integrations.vllm_{name}") for name in ("fp8", "moe"))
    kernels, layers = "model_executor/kernels/linear", "model_executor/layers"
    plain, blocks = f"{kernels}/scaled_mm/ScaledMMLinearKernel.py", f"{kernels}/scaled_mm/BlockScaledMMLinearKernel.py"
    of_experts, of_fp8 = f"{layers}/fused_moe/modular_kernel.py", f"{layers}/quantization/fp8.py"
    linear, by_blocks, experts = fp8.RtkernelsFp8LinearKernel, fp8.RtkernelsFp8BlockLinearKernel, moe.RtkernelsExperts
    for function, theirs in (
        (linear.__init__, f"{plain}:FP8ScaledMMLinearKernel.__init__"),
        (linear.apply_weights, f"{plain}:FP8ScaledMMLinearKernel.apply_weights"),
        (linear.apply_scaled_mm, f"{plain}:FP8ScaledMMLinearKernel.apply_scaled_mm"),
        (linear.is_supported.__func__, f"{plain}:ScaledMMLinearKernel.is_supported"),
        (linear.can_implement.__func__, f"{plain}:ScaledMMLinearKernel.can_implement"),
        (by_blocks.__init__, f"{blocks}:Fp8BlockScaledMMLinearKernel.__init__"),
        (by_blocks.apply_weights, f"{blocks}:Fp8BlockScaledMMLinearKernel.apply_weights"),
        (by_blocks.apply_block_scaled_mm, f"{blocks}:Fp8BlockScaledMMLinearKernel.apply_block_scaled_mm"),
        (fp8.RtkernelsFp8Config.override_quantization_method.__func__,
         f"{layers}/quantization/base_config.py:QuantizationConfig.override_quantization_method"),
        (fp8.RtkernelsFp8Config.get_quant_method, f"{of_fp8}:Fp8Config.get_quant_method"),
        (fp8.RtkernelsFp8MoEMethod.__init__, f"{of_fp8}:Fp8MoEMethod.__init__"),
        (fake_vllm_fp8.Fp8LinearMethod.create_weights, f"{of_fp8}:Fp8LinearMethod.create_weights"),
        (fake_vllm_fp8.init_fp8_linear_kernel, f"{kernels}/__init__.py:init_fp8_linear_kernel"),
        (experts.is_supported_config, f"{of_experts}:FusedMoEExperts.is_supported_config"),
        (experts._supports_quant_scheme, f"{of_experts}:FusedMoEExperts._supports_quant_scheme"),
        (experts._supports_activation, f"{of_experts}:FusedMoEExperts._supports_activation"),
        (experts._supports_parallel_config, f"{of_experts}:FusedMoEExperts._supports_parallel_config"),
        (experts.workspace_shapes, f"{of_experts}:FusedMoEExpertsModular.workspace_shapes"),
        (experts.apply, f"{of_experts}:FusedMoEExpertsModular.apply"),
        (moe.RtkernelsUnquantizedMoEMethod.__init__,
         f"{layers}/fused_moe/unquantized_fused_moe_method.py:UnquantizedFusedMoEMethod.__init__"),
    ):  # fmt: skip
        assert own(function) == parameters(names[theirs]), theirs
    config = names[f"{plain}:FP8ScaledMMLinearLayerConfig@fields"].split(", ")
    assert [field.name for field in dataclasses.fields(fake_vllm_fp8.FP8ScaledMMLinearLayerConfig)] == config
    read = {field.name for field in dataclasses.fields(fake_vllm_fp8.MoEConfig)} - {"is_act_and_mul"}
    assert read <= set(names[f"{layers}/fused_moe/config.py:FusedMoEConfig@fields"].split(", "))


def _compare_mla_with_vllm(names: dict[str, str | None]) -> None:
    mla = importlib.import_module("rtkernels.integrations.vllm_mla")
    layer, prefill = "model_executor/layers/attention/mla_attention.py", "v1/attention/backends/mla/prefill/base.py"
    impl, backend = mla.RtkernelsMLAImpl, mla.RtkernelsMLAPrefillBackend
    for function, theirs in (
        (impl.forward_mqa, f"{layer}:MLACommonImpl.forward_mqa"),
        (impl.do_kv_cache_update, "v1/attention/backend.py:MLAAttentionImpl.do_kv_cache_update"),
        (fake_vllm_mla.MLACommonImpl.__init__, f"{layer}:MLACommonImpl.__init__"),
        (fake_vllm_mla.MLACommonImpl.forward_mha, f"{layer}:MLACommonBaseImpl.forward_mha"),
        (backend.__init__, f"{prefill}:MLAPrefillBackend.__init__"),
        (backend.prepare_metadata, f"{prefill}:MLAPrefillBackend.prepare_metadata"),
        (backend.supports_mla_dimensions.__func__, f"{prefill}:MLAPrefillBackend.supports_mla_dimensions"),
        (backend.run_prefill_new_tokens, f"{prefill}:MLAPrefillBackend.run_prefill_new_tokens"),
        (backend.run_prefill_context_chunk, f"{prefill}:MLAPrefillBackend.run_prefill_context_chunk"),
    ):
        assert own(function) == parameters(names[theirs]), theirs
    common = parameters(names["v1/attention/backend.py:MLAAttentionImpl.__init__"])
    given = [name for name in own(impl.__init__) if name != "mla_args"]
    assert given == common[: len(given)]
    fields = {name: set(names[f"{layer}:{name}@fields"].split(", ")) for name in (
        "MLACommonMetadata", "MLACommonDecodeMetadata", "MLACommonPrefillMetadata",
        "MLACommonPrefillMetadata.ContextChunk")}  # fmt: skip
    ours = {field.name for field in dataclasses.fields(fake_vllm_mla.MLACommonMetadata)}
    assert ours <= fields["MLACommonMetadata"]
    assert {"block_table", "seq_lens"} <= fields["MLACommonDecodeMetadata"]
    assert {"query_start_loc", "max_query_len", "prefill_backend"} <= fields["MLACommonPrefillMetadata"]
    chunk = {"query_start_loc", "cu_seq_lens", "max_query_len", "max_seq_len"}
    assert chunk <= fields["MLACommonPrefillMetadata.ContextChunk"]


def test_nobody_imports_an_adapter() -> None:
    for path in (ROOT / "rtkernels").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "integrations" in path.parts or "rtkernels.integrations" not in text, path
