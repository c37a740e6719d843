"""The report of patch: a table, with gains that were measured and nothing else."""

from __future__ import annotations

import pytest
import torch

from rtkernels.models import expected
from rtkernels.models.patch_report import Gain, PatchReport, Site

FUSED = ("norm", "mlp", "rope", "loss", "attention", "fused")


def report(*kinds: str, asked: tuple[str, ...] = (), left: tuple[str, ...] = ()) -> PatchReport:
    sites = [Site(kind, f"layers.{i}", "Module", None) for kind in kinds for i in range(2)]
    sites += [Site(kind, "other", "Odd", "it computes none of our ops") for kind in left]
    return PatchReport(sites, asked or kinds, {})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_without_a_gpu_there_is_nothing_to_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert str(report("norm", "mlp", left=("mlp",))).splitlines() == [
        "kind      replaced  left alone",
        "norm             2           0",
        "mlp              2           1",
        "  mlp: 1 x Odd: it computes none of our ops",
    ]


def test_every_gain_is_that_of_a_record(gpu: None) -> None:
    found = report(*FUSED, asked=(*FUSED, "experts"))
    assert set(found.gains) == {*FUSED} & set(expected.OPS) and "experts" not in found.gains, "nothing was replaced"
    lines = str(found).splitlines()
    factor, baseline, what, name, date = expected.OPS["norm"]
    assert lines[0].endswith("left alone  measured gain")
    assert lines[1] == f"norm             2           0  {factor:5.2f} x {baseline}: {what} ({name[7:]}, {date})"
    assert lines[-2].startswith("measured with the same options: ") and expected.MODELS[2][-1] in lines[-1]


@pytest.mark.parametrize("record", expected.MODELS, ids=lambda record: f"{record[2]}, {record[0]}")
def test_a_whole_model_is_found_by_what_was_replaced(record: tuple) -> None:
    model, kinds, work, factor, memory, gpu, date = record
    wanted = Gain(factor, "transformers", f"{work}, {model}", gpu, date, memory)
    assert report(*kinds).expected == wanted
    more = tuple(kind for kind in kinds if kind not in ("attention", "fused"))
    assert report(*more).expected == wanted._replace(options=("attention", "fused_layers"))


def test_no_expectation_without_a_record(gpu: None) -> None:
    assert report("norm").expected is None, "neither MLP nor experts"
    assert report("mlp", "rope", "loss").expected is None, "norms make a difference"
    assert report(*FUSED[:-1], asked=FUSED).expected is None, "asked for, and left alone"
    without_loss = tuple(kind for kind in FUSED if kind != "loss")
    assert report(*without_loss, asked=FUSED).expected is None, "training with another loss"
    assert "prefill" in report(*without_loss).expected.what
    assert "measured with" not in str(report("norm"))
    assert report("head").gains == {} and "head             2           0" in str(report("head"))


def test_records_are_complete() -> None:
    for factor, baseline, what, gpu, date in expected.OPS.values():
        assert factor > 0 and baseline and what and gpu.startswith("NVIDIA") and len(date) == 10
    for _, kinds, _, factor, memory, _, date in expected.MODELS:
        assert factor > 0 and 0 < memory < 2 and len(date) == 10 and {"norm", "rope"} <= {*kinds}
