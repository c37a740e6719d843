"""Models of the ``transformers`` library on our ops, by one line: ``rtkernels.models.patch(model)``.

What a module computes is found out by trying it (``recognize``), not from its name; what is recognised gets our forward
by a change of the instance's class (``replace``). Rotary embeddings are replaced in a view of the modelling file's
globals (``rope_view``), the loss by logits that are computed if somebody looks at them (``lazy_logits``, ``loss``).
Nothing global changes. ``docs/models.md`` is the guide. ``transformers`` is imported when a model is patched.
"""

from rtkernels.models.patch import PatchReport, loss_only, patch, patched, report, unpatch

__all__ = ["PatchReport", "loss_only", "patch", "patched", "report", "unpatch"]
