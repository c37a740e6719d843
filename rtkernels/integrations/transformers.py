"""Patch the model of a transformers ``Trainer``: ``Trainer(..., callbacks=[RtkernelsCallback()])``."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from rtkernels import models
from rtkernels.errors import RtkError


class RtkernelsCallback(TrainerCallback):
    """Calls :func:`rtkernels.models.patch` on the model of a ``Trainer`` when the trainer has been created.

    With ``model_init``, the trainer builds a new model for each run, which is patched when training begins. The
    report is logged by nobody: read ``callback.report``.

    Args:
        **options: Options of :func:`rtkernels.models.patch`. TRL's trainers have a head of their own: call
            :func:`rtkernels.models.use_fused_head` for them when they have been built.

    Raises:
        RtkError: In a trainer with ``use_liger_kernel=True``, which replaces the same modules; or as ``patch`` raises.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.report: models.PatchReport | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Patch the trainer's model."""
        if getattr(args, "use_liger_kernel", False):
            raise RtkError("use_liger_kernel=True replaces the modules that RtkernelsCallback replaces: turn one off")
        if model is not None:
            self.report = models.patch(model, **self.options)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Patch a model that was built since the trainer was created."""
        if model is not None and models.report(getattr(model, "_orig_mod", model)) is None:
            self.report = models.patch(model, **self.options)
