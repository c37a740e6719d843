"""export_fp8 and serve_fp8: codes and names as transformers has them, the same logits after a round trip."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import rtkernels
from rtkernels import models
from rtkernels.errors import ArgumentError, RtkError
from rtkernels.models import served
from rtkernels.models.served import ServedExperts, ServedLinear

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file
from support.tiny_models import build, tokens

SIZES = {
    "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 128, "moe_intermediate_size": 128, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "v_head_dim": 64,
    "first_k_dense_replace": 0,
}  # fmt: skip


def build_model(kind: str) -> nn.Module:
    model = build(kind, **SIZES)
    angles = model.model.rotary_emb
    model.bfloat16().eval()
    model.model.rotary_emb = type(angles)(config=model.config)  # frequencies stay fp32 in a model that was loaded
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens(2, 9)).logits.float()


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_a_round_trip(kind: str, tmp_path: Path) -> None:
    model = build_model(kind)
    wanted = logits(model)
    skipped = models.export_fp8(model, tmp_path / "first")
    loaded = models.serve_fp8(tmp_path / "first")
    served = models.serve_fp8(model)  # in place, from the weights themselves
    assert sum(isinstance(m, ServedLinear) for m in loaded.modules()) > 3
    assert any(isinstance(m, ServedExperts) for m in loaded.modules()) == (kind != "qwen3")
    assert not isinstance(loaded.lm_head, ServedLinear) and "lm_head" in skipped
    assert torch.equal(logits(loaded), logits(served))
    error = (logits(loaded) - wanted).norm() / wanted.norm()
    assert error < 0.1, float(error)
    models.export_fp8(loaded, tmp_path / "second")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name


def test_names_are_those_of_deepseek_and_qwen(tmp_path: Path) -> None:
    models.export_fp8(build_model("qwen3_moe"), tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.0."
    experts = [f"mlp.experts.{e}.{part}_proj" for e in range(4) for part in ("gate", "up", "down")]
    for name in (*experts, *(f"self_attn.{p}_proj" for p in "qkvo")):
        weight, scale = files[f"{prefix}{name}.weight"], files[f"{prefix}{name}.weight_scale_inv"]
        assert weight.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
        assert tuple(scale.shape) == tuple(-(-n // 128) for n in weight.shape), name
    assert files[prefix + "mlp.gate.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert config["quantization_config"]["quant_method"] == "fp8" and config["model_type"] == "qwen3_moe"


def test_transformers_modules_take_these_tensors(tmp_path: Path) -> None:
    """The modules that transformers builds for such a checkpoint have our names, shapes and dtypes."""
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
    from transformers.utils.quantization_config import FineGrainedFP8Config

    model = build_model("qwen3_moe")
    names = models.export_fp8(model, tmp_path)
    theirs = replace_with_fp8_linear(
        build_model("qwen3_moe"),
        modules_to_not_convert=names,
        quantization_config=FineGrainedFP8Config(),
        pre_quantized=True,
    )
    state, served = theirs.state_dict(), models.serve_fp8(model).state_dict()
    assert state.keys() == served.keys()
    for name, tensor in served.items():
        assert state[name].shape == tensor.shape and state[name].dtype == tensor.dtype, name
    theirs.load_state_dict(served, assign=True)
    again = models.serve_fp8(theirs)  # with the codes that they have
    assert torch.equal(logits(again), logits(model))


def test_served_models_move_and_generate() -> None:
    model = models.serve_fp8(build_model("qwen3"))
    prompt = tokens(1, 5)
    wanted = model.generate(prompt, max_new_tokens=4, do_sample=False)
    models.patch(model)
    assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), wanted)
    model.half()
    layer = model.model.layers[0].self_attn.q_proj
    assert layer.weight.dtype == torch.float8_e4m3fn and layer.weight_scale_inv.dtype == torch.float32


def test_layers_that_read_the_same_tensor_are_one_product() -> None:
    model = models.serve_fp8(build("qwen3", **SIZES | {"head_dim": 128, "hidden_size": 128}).bfloat16().eval())
    attention, before = model.model.layers[0].self_attn, logits(model)
    linears = attention.q_proj, attention.k_proj, attention.v_proj
    assert served.merged(torch.zeros(1, 128), linears) is None
    models.patch(model, loss=False, fused_layers=True)
    x = torch.randn(3, 5, 128).bfloat16()
    assert torch.equal(served.merged(x, linears), torch.cat([linear(x) for linear in linears], -1))
    assert (logits(model) - before).norm() < 0.06 * before.norm()  # codes of activations that were rounded otherwise
    model.half()  # codes stay where they are
    assert served.merged(x, linears) is not None
    linears[1].register_forward_hook(lambda *args: None)
    assert served.merged(x, linears) is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_experts_are_served_without_gradients(mode) -> None:
    with mode():
        model = models.serve_fp8(build("qwen3_moe", **SIZES).bfloat16().eval())
    assert any(isinstance(module, ServedExperts) for module in model.modules())


def test_codes_come_from_norms_and_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}
    model = build("qwen3", num_attention_heads=2, num_key_value_heads=1, **sizes).bfloat16().eval()
    model.requires_grad_(False)
    plain = model(input_ids=tokens(2, 20)).logits.float()
    models.serve_fp8(model)
    wanted = [model(input_ids=tokens(*shape)).logits.float() for shape in ((2, 20), (1, 3))]
    models.patch(model, loss=False, fused_layers=True)
    calls: list[str] = []
    for name in ("rms_norm_fp8", "glu_fp8", "quantize_fp8", "rms_norm", "glu"):
        op = getattr(rtkernels, name)
        monkeypatch.setattr(rtkernels, name, lambda *a, _n=name, _op=op, **o: calls.append(_n) or _op(*a, **o))
    found = model(input_ids=tokens(2, 20)).logits.float()
    # In each of two layers: both norms, the activation, the output projection; the last norm gives numbers.
    assert Counter(calls) == {"rms_norm_fp8": 4, "glu_fp8": 2, "quantize_fp8": 2, "rms_norm": 1}
    assert (found - plain).norm() <= 1.2 * (wanted[0] - plain).norm()
    calls.clear()
    small = model(input_ids=tokens(1, 3)).logits.float()
    assert Counter(calls) == {"rms_norm": 5, "glu": 2} and (small - wanted[1]).norm() <= 0.1 * small.norm()
    models.unpatch(model)
    assert torch.equal(model(input_ids=tokens(2, 20)).logits.float(), wanted[0])


def test_messages(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="model_or_path is a dict; expected a model of transformers or a folder"):
        models.serve_fp8({})
    with pytest.raises(ArgumentError, match=r"expected a folder with config.json and \*.safetensors"):
        models.serve_fp8(tmp_path)
    model = build_model("qwen3")
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(ArgumentError, match="expected quant_method 'fp8' with weight_block_size"):
        models.serve_fp8(tmp_path / "plain")
    models.export_fp8(model, tmp_path / "coded")
    files = load_file(tmp_path / "coded" / "model.safetensors")
    del files["model.norm.weight"]
    save_file(files, tmp_path / "coded" / "model.safetensors")
    with pytest.raises(RtkError, match=r"lacks 1 tensors of the model: model\.norm\.weight"):
        models.serve_fp8(tmp_path / "coded")


LOADED = [
    "qwen3_moe", pytest.param("qwen3", marks=pytest.mark.slow), pytest.param("deepseek_v3", marks=pytest.mark.slow)
]  # fmt: skip


@pytest.mark.parametrize("kind", LOADED)
def test_the_loader_of_transformers_takes_it(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    model = build_model(kind)
    models.export_fp8(model, tmp_path)
    wanted = logits(models.serve_fp8(tmp_path))
    # Where there is a GPU of today it makes fp8 modules, wherever they are; without one, weights of 16 bits.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, p in model.named_parameters():
        if p.dim() > 1 and p.shape[-2] % 128 and "embed" not in name and "head" not in name:
            continue  # it takes the rows of all scales to be equally many
        got = plain.get_parameter(name)
        error = float(((got.float() - p.float()).norm() / p.float().norm()).detach())
        assert got.dtype == torch.bfloat16 and error < 0.04, (name, error)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu").eval()
    monkeypatch.undo()
    names = {type(m).__name__ for m in loaded.modules()}
    assert "FP8Linear" in names and ("FP8Experts" in names) == (kind != "qwen3")
    models.serve_fp8(loaded)
    assert not any(type(m).__name__.startswith("FP8") for m in loaded.modules())
    assert torch.equal(logits(loaded), wanted)


# ---- files besides the weights --------------------------------------------------------------------------------------


def _tokenizer() -> object:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", chat_template="{{ messages }}")


def test_a_folder_is_complete(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """With the tokenizer that is given, then with that of the folder a model came from."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = build_model("qwen3")
    model.generation_config.max_new_tokens = 7
    models.export_fp8(model, tmp_path / "first", tokenizer=_tokenizer())
    loaded = models.serve_fp8(tmp_path / "first")
    assert loaded.generation_config.max_new_tokens == 7
    models.export_fp8(loaded, tmp_path / "second")
    model.save_pretrained(tmp_path / "plain")
    _tokenizer().save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "preprocessor_config.json").write_text("{}")
    models.export_fp8(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), tmp_path / "third")
    for name in ("first", "second", "third"):
        found = AutoTokenizer.from_pretrained(tmp_path / name)
        assert found("b")["input_ids"] == [2] and found.chat_template == "{{ messages }}"
        assert json.loads((tmp_path / name / "generation_config.json").read_text())["max_new_tokens"] == 7
    assert (tmp_path / "third" / "preprocessor_config.json").exists()
    assert not [w for w in recwarn if "export_fp8" in str(w.message)]


def test_a_tokenizer_that_is_nowhere(tmp_path: Path) -> None:
    model = build_model("qwen3")
    model.config._name_or_path = "nobody/nothing"
    with pytest.warns(UserWarning, match="no tokenizer was found for 'nobody/nothing'.*pass tokenizer="):
        models.export_fp8(model, tmp_path)
    models.export_fp8(model, tmp_path, tokenizer=False)
    for wrong in (True, "name"):
        with pytest.raises(ArgumentError, match=r"tokenizer is (True|a str); expected one with save_pretrained"):
            models.export_fp8(model, tmp_path, tokenizer=wrong)


def test_a_terminal_shows_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import logging

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    model, terminal = build_model("qwen3"), Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    models.export_fp8(model, tmp_path)
    assert terminal.getvalue().count(" GB, ") >= 2 and terminal.getvalue().endswith(" \r")
    monkeypatch.setattr("sys.stderr", quiet := Terminal())
    logging.disable_progress_bar()
    try:
        models.export_fp8(model, tmp_path)
    finally:
        logging.enable_progress_bar()
    assert quiet.getvalue() == ""
