"""States of ours in optimizers of torch and TorchAO, and theirs in ours; TorchAO itself where it is installed."""

from __future__ import annotations

import copy
import sys
import zlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from rtkernels.errors import ArgumentError
from rtkernels.ops.multi import dynamic_codes
from rtkernels.optim import AdamW, moments

CODED = ("8bit", "fp8", "4bit")
NAMES = ("exp_avg", "exp_avg_sq")
# Elements: a coded tensor, one whose last block is short, a small one.
SHAPES = ((64, 128), (4097,), (30,))


def stepped(kind: str, **options: Any) -> tuple[list[Parameter], AdamW]:
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = AdamW(params, lr=1e-2, state=kind, **options)
    for _ in range(2):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return params, optimizer


def numbers(optimizer: AdamW, p: Parameter) -> list[Tensor]:
    """Moments of ours as fp32."""
    kind = optimizer.param_groups[0]["state"]
    return list(moments.loaded(p, optimizer.state[p], "fp32").values()) if kind != "fp32" else [
        optimizer.state[p][name] for name in NAMES
    ]  # fmt: skip


def clones(params: list[Parameter]) -> list[Parameter]:
    return [Parameter(p.detach().clone()) for p in params]


@pytest.mark.parametrize("kind", ("fp32", *CODED))
def test_torch_goes_on_where_ours_was(kind: str) -> None:
    params, ours = stepped(kind)
    theirs = clones(params)
    reference = torch.optim.AdamW(theirs)
    reference.load_state_dict(ours.export_state_dict("torch"))
    assert reference.param_groups[0]["lr"] == 1e-2
    for p, q in zip(params, theirs, strict=True):
        for name, value in zip(NAMES, numbers(ours, p), strict=True):
            assert torch.equal(reference.state[q][name], value)
        p.grad = q.grad = torch.randn_like(p)
    ours.step()
    reference.step()
    for p, q in zip(params, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ("fp32", *CODED))
def test_exports_are_loaded_by_ours(kind: str) -> None:
    params, ours = stepped(kind)
    low = [Parameter(p.detach().bfloat16()) for p in params]
    for to in ("torch", "bitsandbytes"):
        saved = ours.export_state_dict(to)
        before = copy.deepcopy(ours.state_dict())
        other = AdamW(low, state="8bit")
        other.load_state_dict(saved)
        assert other.param_groups[0]["state"] == {"torch": "fp32", "bitsandbytes": "8bit"}[to]
        for p, q in zip(params, low, strict=True):
            assert float(other.state[q]["step"]) == 2.0
            for i, (found, wanted) in enumerate(zip(numbers(other, q), numbers(ours, p), strict=True)):
                limit = 0.0 if to == "torch" or kind == "8bit" else 0.02 if p.numel() >= 4096 else 0.0
                assert (found - wanted).norm() <= limit * wanted.norm(), (to, i)
        for one, same in zip(ours.state_dict()["state"].values(), before["state"].values(), strict=True):
            assert all(torch.equal(one[name], same[name]) for name in one if name != "step")
    if kind == "8bit":
        saved = ours.export_state_dict("bitsandbytes")
        assert type(saved["state"][0]["step"]) is int and set(saved["state"][0]) == {
            "step", "state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2"
        }  # fmt: skip


def test_wrong_exports() -> None:
    _, ours = stepped("8bit", maximize=True)
    with pytest.raises(ArgumentError, match="to is 'apex'; expected 'torch', 'bitsandbytes', 'torchao'"):
        ours.export_state_dict("apex")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="maximize is True, which optimizers of torchao do not have"):
        ours.export_state_dict("torchao")
    assert ours.export_state_dict("torch")["param_groups"][0]["maximize"]


# ---- TorchAO --------------------------------------------------------------------------------------------------------


def test_torchao_goes_on_where_ours_was_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same codes and scales on both sides, and updates that agree to the rounding of codes."""
    torchao = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # its step is compiled
    for kind, name in (("8bit", "AdamW8bit"), ("fp8", "AdamWFp8"), ("4bit", "AdamW4bit")):
        for dtype in (torch.float32, torch.bfloat16):
            params, ours = stepped(kind)
            mine = [Parameter(p.detach().to(dtype)) for p in params]
            loaded = AdamW(mine, state=kind, master=False)
            loaded.load_state_dict(copy.deepcopy(ours.state_dict()))
            theirs = clones(mine)
            reference = getattr(torchao, name)(theirs)
            reference.load_state_dict(loaded.export_state_dict("torchao"))
            assert type(reference.state[theirs[0]]["exp_avg"]).__name__.startswith("OptimState")
            for p, q in zip(mine, theirs, strict=True):
                for moment, value in zip(NAMES, numbers(loaded, p), strict=True):
                    state = reference.state[q][moment]
                    found = state.dequantize() if hasattr(state, "dequantize") and hasattr(state, "codes") else state
                    rtol = 4e-3 if found.dtype == torch.bfloat16 else 1e-6  # without codes they have p's dtype
                    torch.testing.assert_close(found.float(), value, rtol=rtol, atol=0)
                p.grad = torch.randn_like(p)
                q.grad = p.grad.clone()
            loaded.step()
            reference.step()
            for p, q in zip(mine, theirs, strict=True):
                torch.testing.assert_close(p, q, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-4)
            back = AdamW(clones(mine), state=kind, master=False)
            back.load_state_dict(reference.state_dict())
            state, found = reference.state[theirs[0]], back.state[back.param_groups[0]["params"][0]]
            assert float(found["step"]) == 3.0 and back.param_groups[0]["state"] == kind
            for i, moment in enumerate(NAMES):
                codes = found[moments.NAMES[kind][i]].view(torch.uint8)
                assert torch.equal(codes, state[moment].codes.view(torch.uint8))
                assert torch.equal(found[moments.SCALES[kind][i]], state[moment].scale)


# How the classes of TorchAO 0.18 are called, and the states of its optimizers after one step from zeros with
# `recorded_gradient`: shapes of codes and scales, the first 16 bytes of codes, their CRC-32, the first three scales.
class _Recorded(SimpleNamespace):
    """A state of TorchAO, as far as its names go."""


class OptimState8bit(_Recorded):
    def __init__(self, codes: Tensor, scale: Tensor, qmap: Tensor, signed: bool, dtype: Any = None) -> None:
        super().__init__(codes=codes, scale=scale, qmap=qmap, signed=signed, shape=codes.shape)


class OptimStateFp8(_Recorded):
    def __init__(self, codes: Tensor, scale: Tensor, dtype: Any = None) -> None:
        super().__init__(codes=codes, scale=scale, shape=codes.shape)


class OptimState4bit(_Recorded):
    def __init__(self, codes: Tensor, scale: Tensor, qmap: Tensor, signed: bool, shape: Any, dtype: Any = None) -> None:
        super().__init__(codes=codes, scale=scale, qmap=qmap, signed=signed, shape=torch.Size(shape))


CLASSES = {"8bit": OptimState8bit, "fp8": OptimStateFp8, "4bit": OptimState4bit}


def recorded_gradient() -> Tensor:
    """4096 numbers of every magnitude, without ties between codes."""
    place = torch.arange(4096, dtype=torch.float64)
    return (torch.sin(place * 0.7) * torch.exp(place % 37 / 5 - 4)).float().reshape(32, 128)


RECORDED = {
    ("8bit", "exp_avg"): (
        (32, 128), (16,), [127, 139, 142, 143, 139, 114, 109, 108, 109, 133, 147, 153, 153, 146, 105, 94], 3156301626,
        [2.452075719833374, 2.4511327743530273, 2.4106240272521973],
    ),
    ("8bit", "exp_avg_sq"): (
        (32, 128), (16,), [0, 1, 2, 2, 1, 1, 4, 6, 4, 0, 7, 10, 10, 6, 7, 16], 2576156721,
        [0.6012676358222961, 0.6008052229881287, 0.5811108350753784],
    ),
    ("fp8", "exp_avg"): (
        (32, 128), (16,), [0, 40, 48, 48, 40, 170, 183, 187, 184, 17, 61, 68, 69, 60, 192, 204], 1106972949,
        [0.0054733832366764545, 0.0054712784476578236, 0.005380857270210981],
    ),
    ("fp8", "exp_avg_sq"): (
        (32, 128), (16,), [0, 0, 0, 0, 0, 0, 1, 2, 1, 0, 3, 10, 11, 2, 5, 26], 3470514260,
        [0.0013421152252703905, 0.001341083087027073, 0.0012971224496141076],
    ),
    ("4bit", "exp_avg"): (
        (2048,), (32,), [119, 119, 119, 118, 119, 136, 136, 102, 102, 121, 153, 133, 68, 72, 171, 186], 1094575046,
        [2.452075719833374, 1.9988692998886108, 2.4511327743530273],
    ),
    ("4bit", "exp_avg_sq"): (
        (2048,), (32,), [0] * 16, 3869046210, [0.6012676358222961, 0.39954787492752075, 0.6008052229881287],
    ),
}  # fmt: skip


@pytest.fixture
def recorded_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with the names of TorchAO's, whose states are those of above."""
    packages = [ModuleType(name) for name in ("torchao", "torchao.optim")]
    for kind, own in CLASSES.items():
        packages.append(ModuleType(f"torchao.optim.subclass_{kind}"))
        setattr(packages[-1], own.__name__, own)
        setattr(packages[1], f"subclass_{kind}", packages[-1])
    for package in packages:
        monkeypatch.setitem(sys.modules, package.__name__, package)


@pytest.mark.parametrize("kind", CODED)
def test_exports_are_what_torchao_had(recorded_torchao: None, kind: str) -> None:
    p = Parameter(torch.zeros(32, 128))
    ours = AdamW([p], lr=torch.tensor(2e-3), state=kind)
    p.grad = recorded_gradient()
    ours.step()
    saved = ours.export_state_dict("torchao")
    (group,) = saved["param_groups"]
    assert set(group) == {"lr", "betas", "eps", "weight_decay", "amsgrad", "params"} and group["params"] == [0]
    assert group["lr"].dtype == torch.float32 and group["lr"].item() == pytest.approx(2e-3)  # it takes only tensors
    state = saved["state"][0]
    assert state["step"].item() == 1.0 and set(state) == {"step", *NAMES}
    for i, name in enumerate(NAMES):
        found = state[name]
        codes, scales, first, crc, first_scales = RECORDED[kind, name]
        assert type(found) is CLASSES[kind] and found.shape == p.shape
        raw = found.codes.view(torch.uint8).flatten()
        assert found.codes.shape == codes and found.codes.dtype == (
            torch.uint8 if kind != "fp8" else torch.float8_e4m3fn
        )
        assert raw[:16].tolist() == first and zlib.crc32(raw.numpy().tobytes()) == crc
        assert found.scale.shape == scales and found.scale[:3].tolist() == pytest.approx(first_scales, rel=1e-6)
        if kind != "fp8":
            assert found.signed == (i == 0)
            torch.testing.assert_close(found.qmap, dynamic_codes.code_map(kind, i == 0))


@pytest.mark.parametrize("kind", CODED)
def test_states_of_torchao_are_loaded_to_the_bit(recorded_torchao: None, kind: str) -> None:
    p, q = Parameter(torch.zeros(32, 128)), Parameter(torch.zeros(32, 128))
    ours, other = AdamW([p], state=kind), AdamW([q], state=kind)
    p.grad = recorded_gradient()
    ours.step()
    given = ours.export_state_dict("torchao")["state"][0]
    found = moments.loaded(q, given, kind)
    assert all(torch.equal(_raw(found[name]), _raw(ours.state[p][name])) for name in found)
    given["exp_avg"].block_size = 64  # an option of TorchAO's
    given["exp_avg"].scale = given["exp_avg"].scale.repeat_interleave(dynamic_codes.BLOCKS[kind] // 64)
    for to in ("fp32", kind):
        again = moments.loaded(q, given, to)
        whole, wanted = (moments.loaded(q, one, "fp32")["exp_avg"] for one in (again, found))
        assert (whole - wanted).norm() <= (0.0 if to == "fp32" else 0.1) * wanted.norm()
    if kind != "fp8":
        given["exp_avg"].qmap = given["exp_avg"].qmap * 2
        with pytest.raises(ArgumentError, match="qmap1 of a state dict is another map than that of"):
            moments.loaded(q, given, kind)
    assert not other.state


def _raw(t: Tensor) -> Tensor:
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t


@pytest.mark.parametrize("kind", CODED)
def test_permuted_parameters_and_short_blocks(recorded_torchao: None, kind: str) -> None:
    """TorchAO's blocks are of rows, ours of memory; it has no codes for a last block that is short."""
    base = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    for p in (
        Parameter(base.t().contiguous().t()),
        Parameter(base[:33].contiguous()),
        Parameter(base.flatten()[:4097]),
    ):
        ours = AdamW([p], state=kind)
        p.grad = torch.empty_like(p).copy_(p.detach() * 0.1)
        ours.step()
        exact = moments.loaded(p, ours.state[p], "fp32")
        state = ours.export_state_dict("torchao")["state"][0]
        assert (type(state["exp_avg"]) is CLASSES[kind]) == (p.numel() % dynamic_codes.BLOCKS[kind] == 0)
        found = moments.loaded(Parameter(p.detach().contiguous()), state, "fp32")
        for i, name in enumerate(NAMES):
            error = (found[name] - exact[name]).norm() / exact[name].norm()
            assert error <= (0.3 if kind == "4bit" else 0.05) and (p.is_contiguous() <= (error == 0)), i


def test_torchao_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = stepped("8bit")
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ArgumentError, match=r"torchao\.optim cannot be imported; install torchao"):
        ours.export_state_dict("torchao")


# ---- state dicts that cannot be converted ---------------------------------------------------------------------------


def test_state_dicts_that_cannot_be_converted() -> None:
    params, ours = stepped("8bit")
    other = AdamW(clones(params), state="8bit")
    (large, *_) = ours.state_dict()["state"].values()
    for change, message in (
        ({"absmax1": torch.ones(7)}, "a moment of a state dict has 7 scales for 8192 numbers; expected 32"),
        ({"absmax1": torch.ones(1, 32)}, r"scales of a state dict have shape \(1, 32\); expected one dimension"),
        ({"state2": None}, "expected two moments"),
        ({"state1": torch.ones(8192, dtype=torch.int8)}, r"packed codes of a state dict have shape \(8192,\)"),
        (
            {"state1": torch.ones(3, dtype=torch.uint8), "absmax1": torch.ones(1)},
            r"has shape \(3,\); expected \(64, 128\)",
        ),
        ({"qmap1": torch.ones(256)}, "qmap1 of a state dict is another map"),
    ):
        state = ours.state_dict()
        state["state"][0] = {**large, **change}
        with pytest.raises(ArgumentError, match=message):
            other.load_state_dict(state)
    state = ours.state_dict()
    state["state"][0] = {name: value for name, value in large.items() if not name.startswith("absmax")}
    with pytest.raises(ArgumentError, match="a moment of a state dict is uint8 without scales"):
        other.load_state_dict(state)
    state["state"][0] = {name: value for name, value in large.items() if name != "step"}
    with pytest.raises(ArgumentError, match="expected step, too"):
        other.load_state_dict(state)


def test_a_kind_that_is_changed_between_steps() -> None:
    params, ours = stepped("8bit")
    ours.param_groups[0]["state"] = "4bit"
    with pytest.raises(
        ArgumentError, match=r"state is '4bit', and a parameter has step, state1.*load_state_dict converts"
    ):
        ours.step()
    saved = ours.state_dict()
    ours.load_state_dict(saved)
    ours.step()
    assert ours.state[params[0]]["exp_avg"].dtype == torch.int8
