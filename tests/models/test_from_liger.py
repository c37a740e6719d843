"""Every call of docs/how_to/migrate_from_liger.md, executed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rtkernels
from rtkernels import models

pytest.importorskip("transformers", minversion="5.0")

from support.tiny_models import VOCABULARY, build, loss_and_gradients, tokens

DOCUMENT = (Path(__file__).parents[2] / "docs" / "how_to" / "migrate_from_liger.md").read_text(encoding="utf-8")
REPORT = (Path(__file__).parents[2] / "docs" / "how_to" / "patch_a_model.md").read_text(encoding="utf-8")
CALLS = re.findall(r"^\| (.+?) \| `(rtk\..+?)`.*\|$", DOCUMENT, re.MULTILINE)


def _names(path: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    model, generator = build("qwen3"), torch.Generator().manual_seed(0)
    model.save_pretrained(path)
    x, residual, gate, up = (torch.randn(3, 5, 64, generator=generator) for _ in range(4))
    q, k = torch.randn(2, 4, 5, 16, generator=generator), torch.randn(2, 2, 5, 16, generator=generator)
    angles = torch.randn(2, 5, 8, generator=generator).repeat(1, 1, 2)
    logits, hidden = torch.randn(15, VOCABULARY, generator=generator), torch.randn(15, 64, generator=generator)
    teacher, teacher_head = torch.randn(15, 32, generator=generator), torch.randn(VOCABULARY, 32, generator=generator)
    return {
        "teacher": teacher, "teacher_head": teacher_head,
        "rtk": rtkernels, "AutoModelForCausalLM": AutoModelForCausalLM, "model": model, "config": model.config,
        "path": path, "moe_model": build("qwen3_moe"), "x": x, "residual": residual, "gate": gate, "up": up,
        "weight": torch.ones(64), "q": q, "k": k, "cos": angles.cos(), "sin": angles.sin(), "logits": logits,
        "labels": tokens(1, 15)[0], "hidden": hidden, "head": torch.randn(VOCABULARY, 64, generator=generator),
        "log_p": logits.log_softmax(-1), "log_q": logits.flip(0).log_softmax(-1), "ids": tokens(1, 15)[0],
    }  # fmt: skip


def _wanted(here: str, t: dict[str, Any]) -> Any:
    """Return what plain torch gives for a call, None where the call returns no numbers."""
    f = nn.functional
    rotated = [
        h * t["cos"].unsqueeze(1) + torch.cat((-h[..., 8:], h[..., :8]), -1) * t["sin"].unsqueeze(1)
        for h in (t["q"], t["k"])
    ]
    capped = 30 * torch.tanh(t["logits"] / 30)
    z = 1e-4 * capped.logsumexp(-1).square().mean()
    mean = torch.log((t["log_p"].exp() + t["log_q"].exp()) / 2)
    halves = [f.kl_div(mean, log, reduction="batchmean", log_target=True) / 2 for log in (t["log_p"], t["log_q"])]
    student, teacher = ((t[a] @ t[b].t()).softmax(-1) for a, b in (("hidden", "head"), ("teacher", "teacher_head")))
    both = torch.log((student + teacher) / 2)
    answers = {
        "rtk.linear_divergence": sum(f.kl_div(both, p, reduction="batchmean") / 2 for p in (student, teacher)),
        "rtk.nn.RMSNorm": f.rms_norm(t["x"], (64,), eps=1e-6),
        "rtk.rms_norm(x, weight, eps": 2 * f.rms_norm(t["x"], (64,), eps=1e-6),
        "rtk.nn.LayerNorm": f.layer_norm(t["x"], (64,)),
        "rtk.rms_norm(x, weight, residual": f.rms_norm(t["x"] + t["residual"], (64,), eps=1e-6),
        "rtk.glu(gate, up)": f.silu(t["gate"]) * t["up"],
        'rtk.glu(gate, up, act="gelu_tanh")': f.gelu(t["gate"], approximate="tanh") * t["up"],
        'rtk.glu(gate, up, act="relu2")': f.relu(t["gate"]).square() * t["up"],
        "rtk.rope": rotated[0],
        "rtk.softmax": t["x"].softmax(-1),
        "rtk.cross_entropy(logits, labels)": f.cross_entropy(t["logits"], t["labels"]),
        "rtk.cross_entropy(logits, labels, z_loss": f.cross_entropy(capped, t["labels"], label_smoothing=0.1) + z,
        "rtk.cross_entropy(logits, labels, return": f.cross_entropy(t["logits"], t["labels"]),
        "rtk.linear_logprob": -f.cross_entropy(t["hidden"] @ t["head"].t(), t["labels"], reduction="none"),
        "rtk.linear_cross_entropy": f.cross_entropy(t["hidden"] @ t["head"].t(), t["labels"]),
        "rtk.kl_div": f.kl_div(t["log_p"], t["log_q"], reduction="batchmean", log_target=True),
        "rtk.jsd": sum(halves),
        "rtk.embedding": t["head"][t["ids"]],
    }
    return next((answer for start, answer in answers.items() if here.startswith(start)), None)


def test_every_row(tmp_path: Path) -> None:
    loss = loss_and_gradients(build("qwen3"))[0]
    assert len(CALLS) == DOCUMENT.count("\n| ") - 1 >= 25  # every row of the table has a call
    t = _names(tmp_path)
    for there, here in CALLS:
        if "model" in here:
            models.unpatch(t["model"])
        result = eval(here, t)
        if isinstance(result, nn.Module):
            assert models.report(result) is not None, here
            assert result(input_ids=tokens(), labels=tokens()).loss.isfinite()
        elif isinstance(result, models.PatchReport):
            left = [kind for kind in ("norm", "mlp", "rope", "loss") if f"{kind}=False" in here]
            assert all(not result.replaced[kind] for kind in left) and sum(result.replaced.values()) >= 5, here
            assert loss_and_gradients(t["model"])[0] == pytest.approx(loss, rel=1e-5)
        elif isinstance(result, int):
            assert result == 2
        elif result is not None:
            got, wanted = result[0] if isinstance(result, tuple) else result, _wanted(here, t)
            assert isinstance(wanted, Tensor), f"{there}: {here} has nothing to be compared with"
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5, msg=lambda m, h=here: f"{h}: {m}")


def test_report_in_the_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # else it has measured gains
    printed = REPORT.split("```text\n")[1].split("```")[0]
    found = str(models.patch(build("nemotron_h")))
    # The class has its own name in the newest transformers, that of a relative in others.
    assert found.replace("Zamba2RMSNormGated", "NemotronHRMSNormGated") == printed.rstrip("\n")
