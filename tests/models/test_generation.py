"""generate() of a patched model: the tokens of transformers' own loop, in every form that decodes over our cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rtkernels import models

pytest.importorskip("transformers", minversion="5.0")

from support.generation import KINDS, both, check, model_of, padded, patched, programs
from support.tiny_models import tokens
from transformers import (
    MinPLogitsWarper,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from rtkernels.models.generation import follow, loop

pytestmark = pytest.mark.one_in(3)  # whole models: a second each


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


class Behind(follow.Ring):
    """A ring as on a device that is slow: nothing has arrived before the host waits for it."""

    waited: list[int]

    def put(self, number: int, result: Tensor) -> None:
        assert number - len(self.waited) < follow.DEPTH, "a result is overwritten before it was read"
        super().put(number, result)

    def get(self, number: int, wait: bool) -> Tensor | None:
        if not wait:
            return None
        self.waited.append(number)
        return super().get(number, wait)


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "Ring", Behind)
    own = loop._Call._ring
    monkeypatch.setattr(loop._Call, "_ring", lambda self: _emptied(own(self)))


def _emptied(ring: Behind) -> Behind:
    ring.waited = []
    return ring


@pytest.mark.parametrize("step", [*range(follow.DEPTH + 2), None])
def test_the_host_is_behind(step: int | None, behind: None) -> None:
    """Steps that were issued behind the end of the text are cut off, at every place of the ring."""
    model, prompt = model_of(), tokens(1, 9)
    stop = None if step is None else stop_at(model, prompt, (0, step))
    wanted, got = both(model, prompt, max_new_tokens=20, do_sample=False, eos_token_id=stop)
    assert torch.equal(got, wanted) and not models.report(model).not_captured
    issued = programs(model)[0].count + 1
    assert issued == 20 if step is None else wanted.shape[1] - 9 <= issued <= wanted.shape[1] - 9 + follow.DEPTH


def test_the_host_is_behind_a_batch_with_a_streamer(behind: None) -> None:
    model, prompt = model_of(), tokens(3, 9)
    stop, found = stop_at(model, prompt, (0, 2), (1, 5), (2, 9)), []
    for _ in range(2):
        streamer = Streamer()
        out = model.generate(
            prompt, max_new_tokens=16, do_sample=False, eos_token_id=stop, pad_token_id=1, streamer=streamer
        )
        found.append((out.tolist(), streamer.values))
        patched(model)
    assert found[0] == found[1]


def test_random_numbers_of_surplus_steps_are_taken_back(behind: None) -> None:
    """Calls that end at a stop token leave the generator as transformers' loop does."""
    model, prompt, found = model_of(), tokens(2, 9), []
    for _ in range(2):
        torch.manual_seed(0)
        options = {"max_new_tokens": 16, "do_sample": True, "eos_token_id": [*range(3, 50)], "pad_token_id": 1}
        calls = [model.generate(prompt, **options).tolist() for _ in range(3)]
        found.append((calls, torch.rand(2).tolist()))
        patched(model)
    assert found[0] == found[1]
    assert not models.report(model).not_captured


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3_text", "mistral", "gpt_oss", "qwen3_moe"])
def test_256_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left padding, windows far behind the prompt, and five capacities."""
    monkeypatch.setattr(loop, "FIRST_CAPACITY", 16)
    monkeypatch.setattr(loop, "SOON", 1)
    model = model_of(kind)
    check(model, tokens(3, 9), max_new_tokens=256, do_sample=False, eos_token_id=None, **padded())
    assert [program.cache.capacity for program in programs(model)] == [16, 32, 64, 128, 256, 512]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_tokens(count: int) -> None:
    check(model_of(), tokens(2, 9), max_new_tokens=count, do_sample=False)


class AtLength(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs) -> Tensor:
        return torch.tensor([input_ids.shape[1] >= 12 + row for row in range(input_ids.shape[0])])


def test_a_criterion_of_the_user() -> None:
    options = {"stopping_criteria": StoppingCriteriaList([AtLength()]), "max_time": 600.0}
    check(model_of(), tokens(3, 9), max_new_tokens=16, do_sample=False, **options)


class Raises(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs) -> Tensor:
        if input_ids.shape[1] == 8:
            raise RuntimeError("a criterion failed")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def test_a_criterion_that_raises_leaves_nothing_behind() -> None:
    model, prompt = model_of(), tokens(1, 9)
    wanted = model.generate(prompt, max_new_tokens=8, do_sample=False)
    patched(model)
    with pytest.raises(RuntimeError, match="a criterion failed"):
        model.generate(tokens(1, 5), max_new_tokens=8, stopping_criteria=StoppingCriteriaList([Raises()]))
    assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), wanted)
    assert not models.report(model).not_captured


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


def test_the_distribution_of_sampled_tokens() -> None:
    """Chi-square of 100000 draws against transformers' probabilities; none is outside of the kept set."""
    from rtkernels.models.generation.select import Selection

    torch.manual_seed(0)
    given = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(20), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)]
    logits = torch.randn(1, 64)
    scores = logits
    for processor in given:
        scores = processor(None, scores)
    wanted = torch.softmax(scores, -1)[0].double()
    rows, counts = 1000, torch.zeros(64, dtype=torch.float64)
    selection = Selection(given, True, [], None, rows, 64, torch.device("cpu"))
    for _ in range(100):
        counts += torch.bincount(selection(logits.expand(rows, -1)), minlength=64)
    kept = wanted > 0
    assert 2 < int(kept.sum()) < 20 and counts[~kept].sum() == 0
    chi = float(((counts - wanted * counts.sum())[kept] ** 2 / (wanted * counts.sum())[kept]).sum())
    freedom = int(kept.sum()) - 1
    assert chi < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations


def test_a_step_that_cannot_be_captured_runs_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no memory for a graph: all steps are plain calls, and the report says why."""
    from rtkernels.models.generation.step import Program

    class Graph:
        def __init__(self) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model, prompt = model_of(), tokens(2, 9)
    wanted = model.generate(prompt, max_new_tokens=8, do_sample=False)
    report, own = patched(model), Program.run
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(Program, "run", lambda self, model, pool=None: own(self, model, "pool"))
    with pytest.warns(UserWarning, match="goes on without a graph"):
        assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), wanted)
    assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), wanted)
    ((reason, count),) = report.not_captured.items()
    assert reason.startswith("a step could not be captured: ") and "CUDA out of memory" in reason
    assert count == 1 and not report.captures


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
