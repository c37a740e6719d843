"""generate() of a patched model: the tokens of transformers' own loop, in every form that decodes over our cache."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from rtkernels import models

pytest.importorskip("transformers", minversion="5.0")

from support.tiny_models import build, tokens
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation import LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from rtkernels.models.generation import STATE, follow, loop

ONLY_ATTENTION = dict.fromkeys(("norm", "mlp", "rope", "loss", "experts"), False)
WINDOW = {"sliding_window": 6}
KINDS = {
    "llama": {},
    "qwen3": {},
    "mistral": WINDOW,
    "gemma3_text": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": {},
    "gpt_oss": WINDOW,
}


def model_of(kind: str = "llama", dtype: torch.dtype = torch.float32) -> nn.Module:
    return build(kind, **KINDS[kind]).to(dtype).eval()


def padded(batch: int = 3, length: int = 9) -> dict[str, Tensor]:
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(batch - 1):
        mask[row, : 4 - 3 * row] = 0
    return {"attention_mask": mask}


def patched(model: nn.Module) -> models.PatchReport:
    return models.patch(model, attention=True, **ONLY_ATTENTION)


def both(model: nn.Module, prompt: Tensor, **options) -> tuple[Tensor, Tensor]:
    """Return what the model generates before and after it is patched, from the same random numbers."""
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(model.generate(prompt, **options))
        patched(model)
    return results[0], results[1]


def programs(model: nn.Module) -> list:
    return loop.steps_of(model)


def check(model: nn.Module, prompt: Tensor, **options) -> None:
    """Compare the tokens, and require that the steps ran over our cache."""
    wanted, got = both(model, prompt, **options)
    assert torch.equal(got, wanted)
    assert not models.report(model).not_captured
    assert sum(program.runs for program in programs(model)) == wanted.shape[1] - prompt.shape[1] - 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ["one", "batch", "padded"])
def test_greedy(kind: str, rows: str) -> None:
    prompt = tokens(1 if rows == "one" else 3, 9)
    check(model_of(kind), prompt, max_new_tokens=16, do_sample=False, **(padded() if rows == "padded" else {}))


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "gpt_oss"])
def test_sixteen_bits(kind: str) -> None:
    """Our attention rounds differently from torch's, so the reference is the patched model in transformers' loop."""
    model = model_of(kind, torch.bfloat16)
    patched(model)
    options = {"max_new_tokens": 10, "do_sample": False, **padded()}
    wanted = model.generate(tokens(3, 9), return_dict_in_generate=True, **options).sequences
    assert torch.equal(model.generate(tokens(3, 9), **options), wanted) and programs(model)


def test_a_prompt_shorter_than_the_window() -> None:
    check(model_of("mistral"), tokens(2, 3), max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize("length", [5, 6, 7])
def test_a_prompt_as_long_as_the_window(length: int) -> None:
    check(model_of("gemma3_text"), tokens(2, length), max_new_tokens=4, do_sample=False)


SAMPLED = {
    "temperature": {"temperature": 0.6, "top_k": 0},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.02},
    "typical": {"typical_p": 0.6, "epsilon_cutoff": 0.01},
    "penalty": {"repetition_penalty": 1.7, "min_new_tokens": 9},
    "suppressed": {"suppress_tokens": [5, 6, 7], "renormalize_logits": True, "min_length": 15},
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampling(name: str) -> None:
    """The random numbers are those of torch.multinomial, so even the tokens are the same."""
    check(model_of(), tokens(3, 9), max_new_tokens=12, do_sample=True, **SAMPLED[name], **padded())


def test_greedy_with_a_penalty() -> None:
    check(model_of(), tokens(2, 9), max_new_tokens=12, do_sample=False, repetition_penalty=1.4, min_new_tokens=5)


def test_several_sequences_of_a_prompt() -> None:
    check(model_of(), tokens(1, 5), max_new_tokens=6, do_sample=True, num_return_sequences=3)


def stop_at(model: nn.Module, prompt: Tensor, *places: tuple[int, int]) -> list[int]:
    """Return the tokens that greedy decoding gives in some rows at some steps."""
    free = model.generate(prompt, max_new_tokens=16, do_sample=False, eos_token_id=None)[:, prompt.shape[1] :]
    return [int(free[row, step]) for row, step in places]


def test_rows_stop_at_different_steps() -> None:
    model, prompt = model_of(), tokens(3, 9)
    stop = stop_at(model, prompt, (0, 2), (1, 5), (2, 9))
    check(model, prompt, max_new_tokens=16, do_sample=False, eos_token_id=stop, pad_token_id=1)


@pytest.mark.parametrize("step", range(follow.DEPTH + 2))
def test_stop_at_every_place_of_the_ring(step: int) -> None:
    model, prompt = model_of(), tokens(1, 9)
    check(model, prompt, max_new_tokens=16, do_sample=False, eos_token_id=stop_at(model, prompt, (0, step)))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_tokens(count: int) -> None:
    check(model_of(), tokens(2, 9), max_new_tokens=count, do_sample=False)


class AtLength(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs) -> Tensor:
        return torch.tensor([input_ids.shape[1] >= 12 + row for row in range(input_ids.shape[0])])


def test_a_criterion_of_the_user() -> None:
    options = {"stopping_criteria": StoppingCriteriaList([AtLength()]), "max_time": 600.0}
    check(model_of(), tokens(3, 9), max_new_tokens=16, do_sample=False, **options)


class Streamer(BaseStreamer):
    def __init__(self) -> None:
        self.values: list = []

    def put(self, value: Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.values.append("end")


def test_a_streamer_gets_the_same_tokens() -> None:
    model, streamers = model_of(), [Streamer(), Streamer()]
    for streamer in streamers:
        model.generate(tokens(1, 9), max_new_tokens=6, do_sample=False, streamer=streamer)
        patched(model)
    assert streamers[1].values == streamers[0].values and streamers[0].values[-1] == "end"
    assert len(programs(model)) == 1


class Broken(Streamer):
    def put(self, value: Tensor) -> None:
        super().put(value)
        if len(self.values) == 4:
            raise KeyboardInterrupt


def test_an_interrupted_call_leaves_nothing_behind() -> None:
    model, prompt = model_of(), tokens(1, 9)
    wanted = model.generate(prompt, max_new_tokens=8, do_sample=False)
    patched(model)
    with pytest.raises(KeyboardInterrupt):
        model.generate(tokens(1, 5), max_new_tokens=8, do_sample=False, streamer=Broken())
    assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), wanted)
    assert len(programs(model)) == 1


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_capacities_grow(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "FIRST_CAPACITY", 4)
    monkeypatch.setattr(loop, "SOON", 1)
    model = model_of(kind)
    check(model, tokens(3, 7), max_new_tokens=30, do_sample=False, **padded(3, 7))
    assert [program.cache.capacity for program in programs(model)] == [8, 16, 32, 64]
    repeated = model.generate(tokens(3, 7), max_new_tokens=30, do_sample=False, **padded(3, 7))
    assert len(programs(model)) == 4 and repeated.shape[1] == 37


def test_random_numbers_go_on_as_in_transformers() -> None:
    model, prompt = model_of(), tokens(1, 9)
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        calls = [model.generate(prompt, max_new_tokens=5, do_sample=True) for _ in range(3)]
        results.append(torch.cat([call[0] for call in calls]).tolist() + torch.rand(2).tolist())
        patched(model)
    assert results[0] == results[1]


def test_nan_is_an_error_as_in_transformers() -> None:
    """The next call does not see NaN that an earlier one left in the cache."""
    model, prompt = model_of(), tokens(1, 9)
    wanted = model.generate(prompt, max_new_tokens=4, do_sample=False)
    patched(model)
    weight = model.model.embed_tokens.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
        with pytest.raises(RuntimeError, match="nan"):
            model.generate(tokens(1, 30), max_new_tokens=4, do_sample=True)
        model.generate(tokens(1, 30), max_new_tokens=4, do_sample=False)
        weight.copy_(kept)
    assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), wanted)
    assert not models.report(model).not_captured


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
    wanted, got = both(model_of(), tokens(2, 9), max_new_tokens=4, do_sample=False, num_beams=2)
    assert torch.equal(got, wanted)


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


def test_a_step_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the first step gives other logits than transformers' step, the call is transformers'."""
    model = model_of()
    monkeypatch.setattr(loop.FixedCache, "load", lambda *_: None)
    wanted, got = both(model, tokens(2, 9), max_new_tokens=6, do_sample=True)
    assert torch.equal(got, wanted) and "other logits" in next(iter(models.report(model).not_captured))
    model.generate(tokens(2, 9), max_new_tokens=6, do_sample=True)
    assert sum(models.report(model).not_captured.values()) == 2


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


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_steps_are_captured(kind: str) -> None:
    model, prompt = model_of(kind).cuda(), tokens(2, 9).cuda()
    wanted, got = both(model, prompt, max_new_tokens=24, do_sample=False)
    assert torch.equal(got, wanted)
    assert models.report(model).captures == 1 and not models.report(model).not_captured
    assert torch.equal(model.generate(prompt, max_new_tokens=24, do_sample=False), wanted)
    assert models.report(model).captures == 1


@pytest.mark.gpu
def test_replayed_sampling_repeats() -> None:
    model, prompt, results = model_of("qwen3").cuda(), tokens(2, 9).cuda(), []
    patched(model)
    for _ in range(3):
        torch.manual_seed(5)
        found = model.generate(prompt, max_new_tokens=24, do_sample=True, top_k=20)
        results.append(found.tolist() + torch.rand(3, device="cuda").tolist())
    assert results[0] == results[1] == results[2]
