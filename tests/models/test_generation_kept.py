"""generate() of a patched model: calls that transformers decodes, and what drops the graphs that a model keeps."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import Tensor, nn

from rtkernels import models

pytest.importorskip("transformers", minversion="5.0")

from support.generation import both, model_of, patched, programs
from support.tiny_models import build, tokens
from torch.utils.flop_counter import FlopCounterMode
from transformers.generation import LogitsProcessor, LogitsProcessorList

from rtkernels.models.generation import STATE, loop
from rtkernels.models.generation.cache import FixedCache

pytestmark = pytest.mark.one_in(3)  # whole models: a second each

# ---- calls that transformers decodes --------------------------------------------------------------------------------


class Louder(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores * 2


FALLBACKS = {
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "return_dict_in_generate is set"),
    "static": ({"cache_implementation": "static"}, "StaticCache"),
    "no cache": ({"use_cache": False}, "use_cache is off"),
    "processor": ({"logits_processor": LogitsProcessorList([Louder()])}, "Louder"),
    "ngrams": ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor"),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_fallbacks(name: str) -> None:
    options, reason = FALLBACKS[name]
    wanted, got = both(model_of(), tokens(2, 9), max_new_tokens=4, do_sample=False, **options)
    tensors = [r if isinstance(r, Tensor) else r.sequences for r in (wanted, got)]
    assert torch.equal(*tensors)
    model = model_of()
    report = patched(model)
    model.generate(tokens(2, 9), max_new_tokens=4, do_sample=False, **options)
    assert len(report.not_captured) == 1 and reason in next(iter(report.not_captured)) and not programs(model)
    assert reason in str(models.report(model))


def test_beams_are_left_to_transformers() -> None:
    model = model_of()
    wanted, got = both(model, tokens(2, 9), max_new_tokens=4, do_sample=False, num_beams=2)
    assert torch.equal(got, wanted) and "beam search" in str(models.report(model))


def test_assisted_generation_is_left_to_transformers() -> None:
    model, assistant = model_of(), model_of()
    wanted, got = both(model, tokens(1, 9), max_new_tokens=4, do_sample=False, assistant_model=assistant)
    assert torch.equal(got, wanted) and "assisted generation" in str(models.report(model))


def test_no_memory_for_a_second_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("full")

    model = model_of()
    monkeypatch.setattr(loop, "FixedCache", full)
    wanted, got = both(model, tokens(1, 9), max_new_tokens=4, do_sample=True)
    assert torch.equal(got, wanted) and "no memory" in str(models.report(model))


def test_holes_in_a_mask() -> None:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 3] = 0
    model = model_of()
    wanted, got = both(model, tokens(2, 9), max_new_tokens=4, do_sample=False, attention_mask=mask)
    assert torch.equal(got, wanted) and "left padding" in next(iter(models.report(model).not_captured))


def test_a_returned_cache_is_continued() -> None:
    model, prompt = model_of(), tokens(1, 9)
    results = []
    for _ in range(2):
        first = model.generate(prompt, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
        cache = first.past_key_values
        results.append(model.generate(first.sequences, past_key_values=cache, max_new_tokens=3, do_sample=False))
        patched(model)
    assert torch.equal(*results) and "past_key_values is given" in models.report(model).not_captured


def test_hooks_see_every_step() -> None:
    model, calls = model_of(), []
    patched(model)
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    model.generate(tokens(1, 9), max_new_tokens=4, do_sample=False)
    assert len(calls) == 4 and "has hooks" in next(iter(models.report(model).not_captured))


def test_a_call_within_a_call() -> None:
    """The memory of a step belongs to one call at a time, whether the other is in this thread or in another."""
    model, prompt = model_of(), tokens(1, 9)
    wanted = model.generate(prompt, max_new_tokens=4, do_sample=False)
    patched(model)
    with model.__dict__[STATE].lock:
        assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), wanted)
    assert "another generate() of this model has not ended" in models.report(model).not_captured


def test_a_step_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the first step gives other logits than transformers' step, the call is transformers'."""
    model = model_of()
    monkeypatch.setattr(FixedCache, "load", lambda *_: None)
    wanted, got = both(model, tokens(2, 9), max_new_tokens=6, do_sample=True)
    assert torch.equal(got, wanted) and "other logits" in next(iter(models.report(model).not_captured))
    model.generate(tokens(2, 9), max_new_tokens=6, do_sample=True)
    assert sum(models.report(model).not_captured.values()) == 2


def test_a_model_with_a_cache_of_its_own() -> None:
    model = build("minimax").eval()
    wanted, got = both(model, tokens(2, 9), max_new_tokens=4, do_sample=False)
    assert torch.equal(got, wanted) and "the model has a cache of its own" in models.report(model).not_captured


def _counted(model: nn.Module, prompt: Tensor) -> Tensor:
    with FlopCounterMode(display=False):
        return model.generate(prompt, max_new_tokens=4, do_sample=False)


STATES = {
    "a layer trains": (lambda model: model.model.layers[1].train(), None, "model.layers.1 is in training mode"),
    "a layer is compiled": (
        lambda model: model.model.layers[0].compile(backend="eager"),
        None,
        "model.layers.0 is compiled",
    ),
    "a dispatch mode": (lambda model: None, _counted, "a dispatch mode is active, which would not see replays"),
}


@pytest.mark.parametrize("name", STATES)
def test_states_of_the_model(name: str) -> None:
    change, call, reason = STATES[name]
    model, prompt = model_of(), tokens(2, 9)
    change(model)
    wanted = model.generate(prompt, max_new_tokens=4, do_sample=False)
    patched(model)
    got = (call or (lambda m, p: m.generate(p, max_new_tokens=4, do_sample=False)))(model, prompt)
    assert torch.equal(got, wanted) and list(models.report(model).not_captured) == [reason] and not programs(model)


# ---- what a captured step depends on --------------------------------------------------------------------------------


def _replaced_weight(model: nn.Module) -> None:
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(model.model.layers[0].mlp.up_proj.weight.detach() * 2)


def _assigned_weights(model: nn.Module) -> None:
    model.load_state_dict({name: t + 0.01 for name, t in model.state_dict().items()}, assign=True)


def _other_layer(model: nn.Module) -> None:
    model.model.layers[1] = copy.deepcopy(model.model.layers[0])
    model.model.layers[1].self_attn.layer_idx = 1


CHANGES = {
    "weight": _replaced_weight,
    "state": _assigned_weights,
    "layer": _other_layer,
    "dtype": lambda model: model.to(torch.float64),
    "configuration": lambda model: setattr(model.config, "rms_norm_eps", 0.5),
    "setting": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 3.0),
    "data": lambda model: model.model.norm.weight.__setattr__("data", model.model.norm.weight.data * 2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_drop_programs(name: str) -> None:
    model, prompt = model_of(), tokens(1, 9)
    patched(model)
    options = {"max_new_tokens": 6, "do_sample": False}
    model.generate(prompt, **options)
    before = programs(model)
    model.generate(prompt, **options)
    assert programs(model) == before
    CHANGES[name](model)
    got = model.generate(prompt, **options)
    assert programs(model) and programs(model)[0] is not before[0]
    models.unpatch(model)
    assert torch.equal(got, model.generate(prompt, **options))


def test_settings_of_torch_drop_programs() -> None:
    model, prompt, options = model_of(), tokens(1, 9), {"max_new_tokens": 6, "do_sample": False}
    patched(model)
    model.generate(prompt, **options)
    (before,) = programs(model)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        model.generate(prompt, **options)
        assert programs(model)[0] is not before
    finally:
        torch.use_deterministic_algorithms(False)


def test_two_models_in_threads() -> None:
    """Each model has its own memory; calls of one model that overlap are transformers'."""
    found, pairs = [], [(model_of(kind), tokens(2, 9)) for kind in ("llama", "qwen3")]
    options = {"max_new_tokens": 8, "do_sample": False}
    wanted = [model.generate(prompt, **options) for model, prompt in pairs]
    for model, _ in pairs:
        patched(model)

    def work(i: int) -> None:
        model, prompt = pairs[i % 2]
        found.extend(torch.equal(model.generate(prompt, **options), wanted[i % 2]) for _ in range(3))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 12
    for model, _ in pairs:
        assert {*models.report(model).not_captured} <= {"another generate() of this model has not ended"}


def test_values_written_in_place_keep_programs() -> None:
    model, prompt = model_of(), tokens(1, 9)
    patched(model)
    model.generate(prompt, max_new_tokens=6, do_sample=False)
    before = programs(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    got = model.generate(prompt, max_new_tokens=6, do_sample=False)
    assert programs(model) == before
    models.unpatch(model)
    assert torch.equal(got, model.generate(prompt, max_new_tokens=6, do_sample=False))


def test_adapters() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(model_of(), config).eval()
    prompt, options = tokens(1, 9), {"max_new_tokens": 6, "do_sample": False}
    results = []
    for _ in range(2):
        found = [model.generate(input_ids=prompt, **options)]
        with model.disable_adapter():
            found.append(model.generate(input_ids=prompt, **options))
        model.merge_adapter()
        found.append(model.generate(input_ids=prompt, **options))
        model.unmerge_adapter()
        results.append(torch.cat(found))
        patched(model)
    assert torch.equal(*results)
    assert not models.report(model).not_captured and programs(model.get_base_model())


def test_unpatch_copy_and_pickle() -> None:
    model, prompt = model_of(), tokens(1, 9)
    cls, options = type(model), {"max_new_tokens": 4, "do_sample": False}
    wanted = model.generate(prompt, **options)
    patched(model)
    model.generate(prompt, **options)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not programs(other) and torch.equal(other.generate(prompt, **options), wanted) and programs(other)
    models.unpatch(model)
    assert type(model) is cls and STATE not in model.__dict__
    assert torch.equal(model.generate(prompt, **options), wanted)


def test_inference_mode_and_then_none() -> None:
    model, prompt, options = model_of(), tokens(1, 9), {"max_new_tokens": 4, "do_sample": False}
    patched(model)
    with torch.inference_mode():
        first = model.generate(prompt, **options).clone()
    assert torch.equal(model.generate(prompt, **options), first) and not models.report(model).not_captured


def test_at_most_eight_programs() -> None:
    model = model_of()
    patched(model)
    for k in range(1, 11):
        model.generate(tokens(1, 5), max_new_tokens=3, do_sample=True, top_k=k)
    assert len(programs(model)) == 8
