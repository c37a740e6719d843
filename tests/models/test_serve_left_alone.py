"""``serve`` replaces linear layers that are nothing but a product, and refuses what it cannot keep."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rtkernels import models
from rtkernels.errors import ArgumentError, RtkError
from rtkernels.models import fp8 as quantized

pytest.importorskip("transformers", minversion="5.0")

from support.tiny_models import build, tokens

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64, "num_hidden_layers": 1}
PRODUCT = "its class computes something else than x @ weight.T + bias"
HOOKS = "it has hooks or a forward of its own, which a layer of codes would not run"


def model_of() -> nn.Module:
    return build("qwen3", **SIZES).bfloat16().eval()


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Transposed(nn.Linear):
    """As FalconLinear: a forward of its own, with the same result."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def _of_class(cls: type[nn.Linear]) -> Callable[[nn.Module, str], None]:
    def change(mlp: nn.Module, name: str) -> None:
        layer, own = cls(512, 256, bias=False).bfloat16(), mlp.get_submodule(name)
        layer.weight = own.weight
        setattr(mlp, name, layer)

    return change


def _hook(mlp: nn.Module, name: str) -> None:
    mlp.get_submodule(name).register_forward_hook(lambda module, given, y: 2 * y)


def _forward(mlp: nn.Module, name: str) -> None:
    layer = mlp.get_submodule(name)
    own = layer.forward
    layer.forward = lambda x: 2 * own(x)


CHANGES = {
    "class": (_of_class(Doubled), PRODUCT), "hook": (_hook, HOOKS), "forward": (_forward, HOOKS),
    "same": (_of_class(Transposed), None),
    "weight_norm": (lambda mlp, name: nn.utils.parametrizations.weight_norm(mlp.get_submodule(name)), None),
}  # fmt: skip


@pytest.mark.parametrize("weights", ["fp8", "int4"])
@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_are_more_than_a_product(change: str, weights: str, tmp_path: Path) -> None:
    act, reason = CHANGES[change]
    model, ids = model_of(), tokens(2, 12)
    act(model.model.layers[0].mlp, "down_proj")
    with torch.no_grad():
        plain = model(input_ids=ids).logits.float()
        models.serve(model, weights=weights)
        served = model(input_ids=ids).logits.float()
    (site,) = (site for site in models.serve_report(model).sites if "down_proj" in site.name)
    assert (site.kind, site.reason) == (("16 bits", reason) if reason else (weights, None))
    assert float((served - plain).norm() / plain.norm()) < (0.15 if weights == "fp8" else 0.35)
    if reason and weights == "fp8":
        assert site.name in models.export_fp8(model, tmp_path, tokenizer=False)


def test_weights_that_the_owner_reads() -> None:
    """T5 casts the input of `wo` to the dtype of its weight; nn.MultiheadAttention multiplies by the weight itself."""
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 1, "num_heads": 4, "vocab_size": 128}
    config = transformers.T5Config(**sizes, feed_forward_proj="gated-gelu", dropout_rate=0.0, decoder_start_token_id=0)
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).bfloat16().eval()
    ids = tokens(2, 20)
    with torch.no_grad():
        plain = model(input_ids=ids, decoder_input_ids=ids).logits.float()
        models.serve(model)
        served = model(input_ids=ids, decoder_input_ids=ids).logits.float()
    assert float((served - plain).norm() / plain.norm()) < 0.1
    report = models.serve_report(model)
    assert {s.reason for s in report.sites if s.name.endswith(".wo")} == {"T5DenseGatedActDense reads its weight"}
    assert all(s.kind == "fp8" for s in report.sites if not s.name.endswith((".wo", "lm_head")))
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True).bfloat16().eval()
    x = torch.randn(2, 20, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        assert torch.equal(models.serve(copy.deepcopy(layer))(x), layer(x))


class _OfInt8(nn.Linear):
    """As layers of other libraries: a class of nn.Linear with codes."""

    def __init__(self) -> None:
        super().__init__(512, 256, bias=False)
        self.weight = nn.Parameter(torch.ones(256, 512, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype).T / 512)


@pytest.mark.parametrize("weights", ["fp8", "nvfp4"])
def test_codes_of_other_libraries(weights: str) -> None:
    model = model_of()
    mlp = model.model.layers[0].mlp
    mlp.down_proj = _OfInt8()
    models.serve(model, weights=weights)
    (site,) = (site for site in models.serve_report(model).sites if "down_proj" in site.name)
    assert type(mlp.down_proj) is _OfInt8 and (site.kind, site.reason) == ("int8", "it has a weight of int8")


def test_infinite_weights(tmp_path: Path) -> None:
    """Their codes would be finite. Nothing changes, and nothing is written."""
    model = model_of()
    model.model.layers[0].mlp.up_proj.weight.data[3, 5] = torch.inf
    for call in (models.serve, models.serve_fp8, lambda m: models.export_fp8(m, tmp_path / "new", tokenizer=False)):
        with pytest.raises(RtkError, match=r"0\.mlp\.up_proj has infinite weights, which fp8 codes cannot hold"):
            call(model)
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear and not (tmp_path / "new").exists()


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_save_pretrained_would_lose_the_scales(weights: str, tmp_path: Path) -> None:
    model = models.serve(model_of(), weights=weights)
    for served in (model, copy.deepcopy(model)):
        with pytest.raises(RtkError, match="from_pretrained takes for weights; export_fp8"):
            served.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    torch.save(model, tmp_path / "whole.pt")
    again = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert torch.equal(again(input_ids=tokens()).logits, model(input_ids=tokens()).logits)


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_models_with_other_fp8_layers(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms that write codes for fp8 layers would give them to layers of 4 bits."""
    monkeypatch.setattr(quantized, "_SMALLEST_GAIN", 0)
    model = model_of()
    models.patch(model, fp8=True)
    with pytest.raises(ArgumentError, match="was patched with fp8 layers; call unpatch"):
        models.serve(model, weights=weights)
    models.unpatch(model)
    models.serve(model, weights=weights)
    models.patch(model, fused_layers=True)
    models.serve(model, weights=weights)  # again changes nothing
    with torch.no_grad():
        assert model(input_ids=tokens()).logits.isfinite().all()


def test_layers_on_devices_of_accelerate() -> None:
    """``device_map`` puts a hook on every layer that moves inputs to where they are already."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, ids = model_of(), tokens(2, 20)
    places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    hooks.attach_align_device_hook_on_blocks(model, execution_device=places, offload=dict.fromkeys(places, False))
    with torch.no_grad():
        plain = model(input_ids=ids).logits.float()
        models.serve(model)
        served = model(input_ids=ids).logits.float()
    assert {site.kind for site in models.serve_report(model).sites if "layers" in site.name} == {"fp8"}
    assert float((served - plain).norm() / plain.norm()) < 0.15


def test_weights_of_another_library_are_left_alone() -> None:
    class Codes(Tensor):
        pass

    model = model_of()
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Codes), requires_grad=False)
    models.serve(model)
    (site,) = (site for site in models.serve_report(model).sites if "down_proj" in site.name)
    assert (site.kind, site.reason) == ("16 bits", "its weight is a Codes")


def test_nothing_was_served_and_can_be_saved(tmp_path: Path) -> None:
    model = build("qwen3").bfloat16().eval()  # all of its layers are too small
    models.serve(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path).lm_head.weight, model.lm_head.weight)
