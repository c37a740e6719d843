"""RtkernelsCallback in a Trainer, and accelerate's fp8 beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rtkernels import models
from rtkernels.errors import RtkError

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")

import accelerate
import transformers
from support.tiny_models import build, tokens

from rtkernels.integrations.transformers import RtkernelsCallback

pytestmark = pytest.mark.one_in(3)  # whole models: a second each


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = tokens(1, 12, seed=i)[0]
        return {"input_ids": ids, "labels": ids}


def trainer(path: Path, *callbacks: Any, model: Any = None, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(path), per_device_train_batch_size=2, max_steps=2, learning_rate=1e-3, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=0, **options,
    )  # fmt: skip
    given = {"model_init": model} if model is not None and not isinstance(model, nn.Module) else {"model": model}
    return transformers.Trainer(args=arguments, train_dataset=Texts(), callbacks=list(callbacks), **given)


def losses(trained: Any) -> list[float]:
    trained.train()
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def test_the_callback_patches_and_losses_stay(tmp_path: Path) -> None:
    wanted = losses(trainer(tmp_path, model=build("qwen3")))
    callback = RtkernelsCallback(attention=True)
    run = trainer(tmp_path, callback, model=build("qwen3"))
    assert callback.report is models.report(run.model) and callback.report.replaced["attention"] == 1
    assert losses(run) == pytest.approx(wanted, rel=1e-4) and len(wanted) == 2


def test_models_that_the_trainer_builds(tmp_path: Path) -> None:
    callback = RtkernelsCallback(norm=True)
    run = trainer(tmp_path, callback, model=lambda: build("qwen3", num_hidden_layers=1))
    first = models.report(run.model)
    assert len(losses(run)) == 2
    assert first is not None and models.report(run.model) is callback.report


def test_liger_beside_it_is_rejected(tmp_path: Path) -> None:
    arguments = type("Arguments", (), {"use_liger_kernel": True})()
    with pytest.raises(RtkError, match="use_liger_kernel=True"):
        RtkernelsCallback().on_init_end(arguments, None, None, model=build("qwen3"))


def test_options_are_checked_by_patch(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="atention"):
        trainer(tmp_path, RtkernelsCallback(atention=True), model=build("qwen3", num_hidden_layers=1))


# ---- accelerate -----------------------------------------------------------------------------------------------------


def test_fp8_of_accelerate_beside_ours_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    state = accelerate.state.AcceleratorState
    monkeypatch.setitem(state._shared_state, "_mixed_precision", "bf16")
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    monkeypatch.setattr(models.fp8, "_SMALLEST_GAIN", 0)
    before = build("qwen3", **sizes).bfloat16()
    models.patch(before, fp8=True)
    monkeypatch.setitem(state._shared_state, "_mixed_precision", "fp8")
    with pytest.raises(RtkError, match=r'mixed_precision="fp8".*mixed_precision="bf16" with patch\(fp8=True\)'):
        models.patch(build("qwen3", **sizes), fp8=True)
    with pytest.raises(RtkError, match='mixed_precision="fp8"'):  # prepared after patch
        before(input_ids=tokens())
    models.patch(build("qwen3", **sizes))  # everything but the products


def test_patch_before_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3", num_hidden_layers=1)
    report = models.patch(model)
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    loss = prepared(input_ids=tokens(), labels=tokens()).loss
    accelerator.backward(loss)
    optimizer.step()
    assert models.report(accelerator.unwrap_model(prepared)) is report
