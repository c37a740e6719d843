"""OpenRLHF's actor with our forward, against its own. Its file is loaded by itself: DeepSpeed and others are stubs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rtkernels.models.lazy_logits import LazyLogits

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
PACKAGE = "openrlhf.models"


def _load(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    about = importlib.util.spec_from_file_location(f"{PACKAGE}.{name}", folder / f"{name}.py")
    module = importlib.util.module_from_spec(about)
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.{name}", module)
    about.loader.exec_module(module)
    setattr(sys.modules[PACKAGE], name, module)
    return module


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    spec = importlib.util.find_spec("openrlhf")
    if spec is None:
        pytest.skip("OpenRLHF is not installed")
    folder = Path(spec.origin).parent / "models"
    for name in ("openrlhf", PACKAGE, "deepspeed", f"{PACKAGE}.ring_attn_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    packing = sys.modules[f"{PACKAGE}.ring_attn_utils"]  # flash-attn's; these are the same for one process
    packing.unpad_and_slice_tensor, packing.gather_and_pad_tensor = _unpad, _pad
    _load("utils", folder, monkeypatch)
    module = _load("actor", folder, monkeypatch)
    monkeypatch.delitem(sys.modules, "rtkernels.integrations.openrlhf", raising=False)
    yield module
    sys.modules.pop("rtkernels.integrations.openrlhf", None)


def _unpad(sequences: Any, mask: Any, group: Any) -> tuple[Any, ...]:
    kept = mask.bool()
    positions = (mask.long().cumsum(-1) - 1)[kept]
    rolled = torch.roll(sequences, shifts=-1, dims=1)
    return sequences[kept][None], positions[None], rolled[kept][None], 0, kept.flatten().nonzero()[:, 0]


def _pad(x: Any, group: Any, padding: int, indices: Any, batch: int, length: int) -> Any:
    return x.new_zeros(batch * length).index_copy(0, indices, x.flatten()).view(batch, length)


def _actor(module: Any, packs: bool) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    model.lm_head.weight.data.mul_(20)
    found = module.Actor(model, temperature=0.7)
    found.temperature, found.packing_samples = 0.7, packs
    return found


@pytest.mark.parametrize("packs", [False, True])
def test_the_same_as_openrlhf(packs: bool, actor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = torch.randint(0, 61, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(sequences)
    mask[0, :2] = mask[1, :1] = 0  # padding on the left
    actions = torch.ones(3, 4)
    actions[2, 3:] = 0
    calls: list[dict[str, Any]] = [
        {"action_mask": actions}, {"action_mask": actions, "return_output": True, "return_entropy": True},
        {"return_logprobs": True}, {"return_logprobs": True, "return_output": True},
    ]  # fmt: skip

    def results(of: Any, **given: Any) -> list[torch.Tensor]:
        found = of(sequences, attention_mask=mask, **given)
        log_probs, output = found if isinstance(found, tuple) else (found, None)
        total = (log_probs * torch.linspace(0.5, 1.5, log_probs.numel()).view(log_probs.shape)).sum()
        more = [output.entropy] if given.get("return_entropy") else []
        total = total + sum(e[:, -4:].sum() for e in more)
        return [log_probs, *more, *torch.autograd.grad(total, list(of.parameters()), allow_unused=True)]

    one = _actor(actor, packs)
    theirs = [results(one, **given) for given in calls]
    logits = one(sequences, attention_mask=mask, return_output=True).logits
    import rtkernels.integrations.openrlhf as adapter

    assert actor.Actor.forward is adapter.forward
    assert torch.equal(one(sequences, attention_mask=mask, return_output=True).logits, logits)  # asks for logits

    def never(self: Any) -> Any:
        raise AssertionError("logits were computed")

    monkeypatch.setattr(LazyLogits, "_make", never)
    for given, wanted in zip(calls, theirs, strict=True):
        for mine, other in zip(results(one, **given), wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
    monkeypatch.undo()
