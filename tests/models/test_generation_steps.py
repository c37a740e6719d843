"""Decoding steps as a whole: bits that depend on nothing but a row, errors against fp32, memory, waits, long texts."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rtkernels
from rtkernels import models

pytest.importorskip("transformers", minversion="5.0")

from support.generation import model_of, patched, programs
from support.tiny_models import build, tokens

from rtkernels.models.generation.step import Program

pytestmark = pytest.mark.one_in(3)  # whole models: a second each


def _program(model: nn.Module, ids: Tensor) -> Program:
    """Return a program whose next step reads the last tokens."""
    model.generate(ids[:, :-1], max_new_tokens=2, do_sample=False, eos_token_id=None)
    program = programs(model)[-1]
    program.rows.length.fill_(ids.shape[1] - 1)
    program.rows.position.fill_(ids.shape[1] - 1)
    program.rows.token.copy_(ids[:, -1:])
    program.prepare()
    return program


def test_bits_of_a_row() -> None:
    """Equal rows of a batch have equal bits, in every run and whatever order blocks run in."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    model = build("qwen3", **sizes).to(torch.bfloat16).eval()
    models.patch(model, attention=True, fused_layers=True)
    program = _program(model, tokens(1, 7).expand(3, -1).contiguous())
    found = []
    for order in ("forward", "reverse", 3, "forward"):
        with torch.no_grad(), rtkernels.emulate("sm_90", order=order):
            found.append(program.logits(model))
    assert all(torch.equal(logits, found[0]) for logits in found)
    assert torch.equal(found[0], found[0][:1].expand(3, -1))


def test_errors_are_no_larger_than_those_of_transformers() -> None:
    """Steps of a patched model in 16 bits: error and divergence of logits from fp32, beside transformers'."""
    ours, theirs = [0.0, 0.0], [0.0, 0.0]
    for seed in range(4):
        torch.manual_seed(seed)
        model = model_of("qwen3", torch.bfloat16)
        for parameter in model.parameters():
            parameter.data.mul_(1 + 0.3 * torch.randn_like(parameter))
        ids, exact = tokens(3, 12), copy.deepcopy(model).float()
        with torch.no_grad():
            wanted, plain = exact(ids).logits[:, -1], model(ids).logits[:, -1].float()
            models.patch(model, attention=True, fused_layers=True)
            got = _program(model, ids).logits(model).float()
        for found, total in ((got, ours), (plain, theirs)):
            total[0] += float((found - wanted).norm() / wanted.norm())
            total[1] += float(F.kl_div(found.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="sum"))
    assert ours[0] <= 1.15 * theirs[0] and ours[1] <= 1.3 * theirs[1], (ours, theirs)


def _tensors() -> int:
    gc.collect()
    return sum(issubclass(type(found), Tensor) for found in gc.get_objects())


def test_100_calls_leave_memory_flat() -> None:
    model, prompt = model_of(), tokens(2, 5)
    patched(model)

    def calls(count: int) -> int:
        for i in range(count):
            model.generate(prompt, max_new_tokens=3, do_sample=bool(i % 2), eos_token_id=None)
        return _tensors()

    before = calls(10)
    assert calls(100) <= before and len(programs(model)) == 2


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_100_calls_leave_memory_of_the_device_flat() -> None:
    model, prompt = model_of("qwen3", torch.bfloat16).cuda(), tokens(2, 5).cuda()
    models.patch(model, attention=True, fused_layers=True)
    found = []
    for count in (10, 100):
        for i in range(count):
            model.generate(prompt, max_new_tokens=8, do_sample=bool(i % 2), eos_token_id=None)
        torch.cuda.synchronize()
        found.append(torch.cuda.memory_allocated())
    assert found[1] <= found[0]


@pytest.mark.gpu
@pytest.mark.parametrize("sampled", [False, True])
def test_steps_wait_for_nothing(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third step on, the host issues replays and reads the ring."""
    model, prompt = model_of("gemma3_text", torch.bfloat16).cuda(), tokens(2, 9).cuda()
    models.patch(model, attention=True, fused_layers=True)
    own, seen = Program.run, []

    def run(self, *args):
        if self.count < 2:
            return own(self, *args)
        seen.append(self.count)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return own(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Program, "run", run)
    model.generate(prompt, max_new_tokens=24, do_sample=sampled, eos_token_id=None)
    assert len(seen) == 21 and models.report(model).captures == 1


@pytest.mark.gpu
def test_bits_with_and_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a captured step are those of a plain call, in every run."""
    model, ids = model_of("qwen3", torch.bfloat16).cuda(), tokens(1, 9).expand(3, -1).contiguous().cuda()
    models.patch(model, attention=True, fused_layers=True)
    program = _program(model, ids)
    with torch.no_grad():
        plain = [program.logits(model) for _ in range(3)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = program.logits(model)
        for _ in range(2):
            captured.zero_()
            graph.replay()
            assert torch.equal(captured, plain[0])
    assert all(torch.equal(logits, plain[0]) for logits in plain)
    assert torch.equal(plain[0], plain[0][:1].expand(3, -1))


@pytest.mark.gpu
def test_20000_tokens() -> None:
    """Five capacities; the tokens are those that one pass over the whole text finds, but for ties."""
    model, prompt = model_of("qwen3").cuda(), tokens(1, 9).cuda()
    patched(model)
    found = model.generate(prompt, max_new_tokens=20000, do_sample=False, eos_token_id=None)
    assert [program.cache.capacity for program in programs(model)] == [1024 << i for i in range(6)]
    models.unpatch(model)
    with torch.no_grad():
        wanted = model(found[:, :-1]).logits[:, 8:].argmax(-1)
    assert found.shape[1] == 20009 and float((wanted == found[:, 9:]).float().mean()) > 0.999


@pytest.mark.gpu
def test_calls_in_two_streams() -> None:
    """Steps that were issued behind the end of a call are over before a call in another stream writes its cache."""
    model, prompts = model_of("qwen3").cuda(), [tokens(2, n).cuda() for n in (5, 9)]
    wanted = [model.generate(prompt, max_new_tokens=16, do_sample=False, eos_token_id=None) for prompt in prompts]
    patched(model)
    streams = [torch.cuda.Stream() for _ in prompts]
    torch.cuda.synchronize()
    for _ in range(10):
        for prompt, stream, tokens_of in zip(prompts, streams, wanted, strict=True):
            with torch.cuda.stream(stream):
                got = model.generate(prompt, max_new_tokens=16, do_sample=False, eos_token_id=None)
            stream.synchronize()
            assert torch.equal(got, tokens_of)
    assert not models.report(model).not_captured
