"""Optimizers with coded moments on 1, 2 and 4 processes: the same bits, checkpoints, and states that change shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import joined, spawn
from torch import Tensor
from torch.nn import Parameter

from rtkernels.errors import ArgumentError
from rtkernels.optim import AdamW, Lion, Muon, moments

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")

KINDS = ("fp32", "8bit", "fp8", "4bit")
ALIGNED, UNEVEN, FEW = (64, 128), (131, 64), (2, 2500)  # shards are whole blocks; they are not; two of four have any


def _joined(rank: int, world: int, test: Any, path: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    with joined(rank, path, world):
        test(init_device_mesh("cpu", (world,)), path)


def _parameter(shape: tuple[int, ...], mesh: Any = None, dtype: torch.dtype = torch.bfloat16) -> Parameter:
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return Parameter(whole if mesh is None else distribute_tensor(whole, mesh, [Shard(0)]))


def _step(optimizer: Any, step: int) -> None:
    from torch.distributed.tensor import distribute_tensor

    g = torch.Generator().manual_seed(step)
    for p in optimizer.param_groups[0]["params"]:
        grad = torch.randn(p.shape, generator=g).to(p.dtype)
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if hasattr(p, "device_mesh") else grad
    optimizer.step()


def _whole(t: Any) -> Tensor:
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach()


def _dense(optimizer: Any, p: Parameter, count: int = 2) -> list[Tensor]:
    found = moments.loaded(p, optimizer.state[p], "fp32", count)
    return [_whole(t) for t in found.values()]


def _same_bits(mesh: Any, path: str) -> None:
    for make, kinds in ((AdamW, KINDS), (Lion, Lion._kinds)):
        for kind in kinds:
            for shape in (ALIGNED, UNEVEN, FEW):
                options = {"lr": 1e-2, "state": kind, "master": False, "stochastic": True, "seed": 5}
                alone, shared = (make([_parameter(shape, m)], **options) for m in (None, mesh))
                for step in range(3):
                    _step(alone, step)
                    _step(shared, step)
                (p,), (q,) = alone.param_groups[0]["params"], shared.param_groups[0]["params"]
                if shape == ALIGNED or kind in ("fp32", "bf16"):
                    assert torch.equal(_whole(q), p.detach()), (make, kind, shape)
                else:  # other blocks, other scales
                    assert (_whole(q).float() - p.detach().float()).abs().mean() < 0.02, (make, kind, shape)
                for name, value in shared.state[q].items():
                    if hasattr(value, "placements") and name not in moments.SCALES.get(kind, ()):
                        assert value.placements == q.placements


def _changing_shards(mesh: Any, path: str) -> None:
    """States of a tensor are loaded by shards and the other way round; codes and scales of shards are kept."""
    for kind in KINDS:
        for shape in (ALIGNED, UNEVEN, FEW):
            alone, shared = (AdamW([_parameter(shape, m)], lr=1e-2, state=kind) for m in (None, mesh))
            for optimizer in (alone, shared):
                for step in range(2):
                    _step(optimizer, step)
            (p,), (q,) = alone.param_groups[0]["params"], shared.param_groups[0]["params"]
            limit = 0.4 if kind == "4bit" else 0.05
            for source, given, target in ((alone, p, mesh), (shared, q, None), (shared, q, mesh)):
                exact = _dense(source, given)
                again = AdamW([_parameter(shape, target)], state=kind)
                (r,) = again.param_groups[0]["params"]
                if (source is shared) and target is None and kind == "4bit":
                    with pytest.raises(
                        ArgumentError, match=r"packed codes of a state dict have shape .* expected that"
                    ):
                        again.load_state_dict(source.state_dict())
                    saved = source.export_state_dict("torch")
                    saved["param_groups"][0]["state"] = kind
                    again.load_state_dict(saved)
                else:
                    again.load_state_dict(source.state_dict())
                for found, wanted in zip(_dense(again, r), exact, strict=True):
                    same = kind == "fp32" or (target is not None) == (source is shared)
                    assert (found - wanted).norm() <= (0.0 if same else limit) * wanted.norm(), (kind, shape)
                assert torch.equal(_whole(again.state[r]["master"]), _whole(source.state[given]["master"]))
    muon = Muon([_parameter(UNEVEN)], lr=0.1)
    _step(muon, 0)
    again = Muon([_parameter(UNEVEN, mesh)])
    again.load_state_dict(muon.state_dict())
    (p,), (q,) = muon.param_groups[0]["params"], again.param_groups[0]["params"]
    assert torch.equal(_whole(again.state[q]["momentum_buffer"]), muon.state[p]["momentum_buffer"])


def _gathered(mesh: Any, path: str) -> None:
    """What torch gathers from the shards cannot be mistaken for codes of the whole."""
    for kind in KINDS[1:]:
        shared = AdamW([_parameter(ALIGNED, mesh)], state=kind)
        _step(shared, 0)
        saved = shared.state_dict()
        state = dict(saved["state"][0])
        for name, t in state.items():
            if isinstance(t, Tensor) and t.dtype == torch.float8_e4m3fn:  # which gloo does not know
                state[name] = torch.zeros(ALIGNED, dtype=torch.uint8).view(t.dtype)
            elif isinstance(t, Tensor):
                state[name] = _whole(t)
        assert mesh.size() == 1 or state[moments.SCALES[kind][0]].shape[0] == mesh.size()
        with pytest.raises(ArgumentError, match=r"(scales|packed codes) of a state dict have shape \("):
            AdamW([_parameter(ALIGNED)], state=kind).load_state_dict({**saved, "state": {0: state}})


def _torchao(mesh: Any, path: str) -> None:
    """Shards as TorchAO keeps them: a DTensor whose shards are its tensors."""
    torchao = pytest.importorskip("torchao.optim")
    torch.compile = lambda function, **_: function
    for kind, name in (("8bit", "AdamW8bit"), ("fp8", "AdamWFp8"), ("4bit", "AdamW4bit")):
        if mesh.size() == 2:
            ours = AdamW([_parameter(ALIGNED, mesh, torch.float32)], lr=1e-2, state=kind)
            _step(ours, 0)
            theirs = getattr(torchao, name)([_parameter(ALIGNED, mesh, torch.float32)])
            (p,), (q,) = ours.param_groups[0]["params"], theirs.param_groups[0]["params"]
            with torch.no_grad():
                q.copy_(p)
            theirs.load_state_dict(ours.export_state_dict("torchao"))
            _step(ours, 1)
            _step(theirs, 1)
            torch.testing.assert_close(q.full_tensor(), p.full_tensor(), rtol=1e-4, atol=1e-5)
            back = AdamW([_parameter(ALIGNED, mesh, torch.float32)], state=kind)
            back.load_state_dict(theirs.state_dict())
            (r,) = back.param_groups[0]["params"]
            for one, other in zip(_dense(back, r), _dense(ours, p), strict=True):
                torch.testing.assert_close(one, other, rtol=0.2, atol=1e-2)


def _checkpoints(mesh: Any, path: str) -> None:
    """Two processes save, codes and what `export_state_dict` returns; all others load the latter."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    for kind in KINDS:
        optimizer = AdamW([_parameter(UNEVEN, mesh)], lr=1e-2, state=kind)
        (p,) = optimizer.param_groups[0]["params"]
        folder = f"{path}/{kind}"
        if mesh.size() == 2:
            for step in range(2):
                _step(optimizer, step)
            exact = [*_dense(optimizer, p), _whole(optimizer.state[p]["master"])]
            if mesh.get_rank() == 0:
                torch.save(exact, f"{folder}.pt")
            native = {k: v for k, v in optimizer.state_dict()["state"][0].items() if isinstance(v, Tensor)}
            dcp.save({"native": native}, checkpoint_id=f"{folder}-native")
            dcp.save({"torch": optimizer.export_state_dict("torch")["state"][0]}, checkpoint_id=folder)
            again = AdamW([_parameter(UNEVEN, mesh)], state=kind)
            _step(again, 7)
            state = again.state_dict()
            given = {k: v for k, v in state["state"][0].items() if isinstance(v, Tensor)}
            dcp.load({"native": given}, checkpoint_id=f"{folder}-native")
            state["state"][0] |= given
            again.load_state_dict(state)
            (q,) = again.param_groups[0]["params"]
            for found, wanted in zip([*_dense(again, q), _whole(again.state[q]["master"])], exact, strict=True):
                assert torch.equal(found, wanted), kind
            continue
        _step(optimizer, 7)
        if kind != "fp32":
            given = {k: v for k, v in optimizer.state_dict()["state"][0].items() if isinstance(v, Tensor)}
            with pytest.raises(CheckpointException, match="Size mismatch"):
                dcp.load({"native": given}, checkpoint_id=f"{folder}-native")
        saved = optimizer.export_state_dict("torch")
        dcp.load({"torch": saved["state"][0]}, checkpoint_id=folder)
        saved["param_groups"][0]["state"] = kind
        optimizer.load_state_dict(saved)
        exact = torch.load(f"{folder}.pt")
        found = [*_dense(optimizer, p), _whole(optimizer.state[p]["master"])]
        for one, wanted in zip(found, exact, strict=True):
            limit = {"fp32": 0.0, "4bit": 0.4}.get(kind, 0.05) if one is not found[-1] else 0.0
            assert (one - wanted).norm() <= limit * wanted.norm(), kind
        assert float(optimizer.state[p]["step"]) == 2.0


def _muon(mesh: Any, path: str) -> None:
    """Owners are dealt matrices: more processes than rows, and more matrices than processes."""
    for shape in (UNEVEN, (3, 40)):
        alone, shared = (Muon([_parameter(shape, m) for _ in range(3)], lr=0.1) for m in (None, mesh))
        for step in range(2):
            _step(alone, step)
            _step(shared, step)
        for p, q in zip(alone.param_groups[0]["params"], shared.param_groups[0]["params"], strict=True):
            torch.testing.assert_close(_whole(q), p.detach(), rtol=2e-2, atol=2e-2)
            mine, theirs = (one.state[r]["momentum_buffer"] for one, r in ((alone, p), (shared, q)))
            torch.testing.assert_close(_whole(theirs), mine, rtol=1e-6, atol=1e-7)


def _everything(mesh: Any, path: str) -> None:
    for check in (_same_bits, _muon, _changing_shards, _gathered, _checkpoints):
        check(mesh, path)


@pytest.mark.one_in(3)
def test_on_1_2_and_4_processes(tmp_path: Any) -> None:
    for world in (2, 1, 4):
        spawn(_joined, world, _everything, str(tmp_path), world=world)


@pytest.mark.one_in(3)
def test_shards_of_torchao(tmp_path: Any) -> None:
    pytest.importorskip("torchao.optim")
    spawn(_joined, 2, _torchao, str(tmp_path), world=2)
