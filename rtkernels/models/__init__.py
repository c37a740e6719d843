"""Run models of the ``transformers`` library on our ops: ``rtkernels.models.patch(model)``.

A module is recognised by what it computes, not by its name: its forward and ours run side by side on the same inputs
(``recognize``, ``proof``, ``probe``). A recognised module gets our forward through a change of the instance's class
(``replace``). Rotary embeddings are replaced in a view of the modelling file's globals (``rope_view``). The loss is
replaced by logits that are computed only when they are read (``lazy_logits``, ``loss``). ``fused_head`` puts our head
into TRL's trainers, with ``trl_pairs`` and ``trl_distillation`` for some of them. ``fused_layers`` has decoder layers
with fewer launches, ``fp8`` and ``fp8_linear`` the layers that multiply fp8 codes, ``serve`` models with weights of 8
or 4 bits, and ``fp8_checkpoint`` their files. Nothing global changes. ``docs/models.md`` is the guide. ``transformers``
is imported when a model is patched.
"""

from rtkernels.models.by_name import register
from rtkernels.models.fp8_checkpoint import export_fp8
from rtkernels.models.fp8_linear import Recipe as Fp8Recipe
from rtkernels.models.fused_head import use_fused_head
from rtkernels.models.patch import PatchReport, loss_only, patch, patched, report, unpatch
from rtkernels.models.serve import ServeReport, serve, serve_fp8, serve_report

__all__ = [
    "Fp8Recipe", "PatchReport", "ServeReport", "export_fp8", "loss_only", "patch", "patched", "register", "report",
    "serve", "serve_fp8", "serve_report", "unpatch", "use_fused_head",
]  # fmt: skip
