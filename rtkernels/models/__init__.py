"""Models of the ``transformers`` library on our ops, by one line: ``rtkernels.models.patch(model)``.

What a module computes is proved by running it beside ours (``recognize``, ``proof``, ``probe``), not read from its
name; what is recognised gets our forward by a change of the instance's class (``replace``). Rotary embeddings are
replaced in a view of the modelling file's globals (``rope_view``), the loss by logits that are computed if somebody
looks at them (``lazy_logits``, ``loss``). ``fused_layers`` has layers with fewer steps, ``fp8`` and ``fp8_linear``
those that multiply codes, ``fp8_checkpoint`` models whose weights are codes. Nothing global changes.
``docs/models.md`` is the guide. ``transformers`` is imported when a model is patched.
"""

from rtkernels.models.fp8_checkpoint import export_fp8, serve_fp8
from rtkernels.models.fp8_linear import Recipe as Fp8Recipe
from rtkernels.models.patch import PatchReport, loss_only, patch, patched, report, unpatch

__all__ = ["Fp8Recipe", "PatchReport", "export_fp8", "loss_only", "patch", "patched", "report", "serve_fp8", "unpatch"]
