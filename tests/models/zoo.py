"""Every causal language model of the installed transformers that can be built small, patched and compared.

    python tests/models/zoo.py [--only NAME ...] [--every N]

prints a Markdown table: what was replaced, and how far loss and gradients are from those of the model as it was. A
model that cannot be built small, or does not repeat its own loss, is counted and left out.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from support.tiny_models import build, largest_error, loss_and_gradients, tokens  # noqa: E402

from rtkernels import models  # noqa: E402

KINDS = ("norm", "mlp", "rope", "experts", "loss")
LARGEST_PARAMETERS = 20_000_000


def names() -> list[str]:
    """Return the model types that have a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def compare(kind: str) -> dict[str, Any] | str:
    """Return what patching a model type did, or why it could not be tried."""
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in build(kind).parameters())
        if size > LARGEST_PARAMETERS:
            return f"{size / 1e6:.0f} M parameters"
        model = build(kind)
        (loss, gradients), (repeated, _) = (loss_and_gradients(model, tokens()) for _ in range(2))
    except Exception as error:  # of a library that we do not own
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
    if loss != repeated:
        return "does not repeat its own loss"
    report = models.patch(model)
    patched, patched_gradients = loss_and_gradients(model, tokens())
    return {
        "replaced": [report.replaced[k] for k in KINDS],
        "left": sorted({f"{site.module}: {site.reason}" for site in report.left_alone}),
        "loss": abs(patched - loss) / abs(loss),
        "gradients": largest_error(patched_gradients, gradients),
    }


def main(argv: list[str] | None = None) -> int:
    """Print the table; return 1 if a model's loss or gradients changed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="model types")
    parser.add_argument("--every", type=int, default=1, help="only every N-th model type")
    chosen = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    failed, tried, left_out = [], 0, []
    print(f"| model type | {' | '.join(KINDS)} | loss | gradients | left alone |")
    print("|---" * (len(KINDS) + 4) + "|")
    for kind in chosen.only or names()[:: chosen.every]:
        result = compare(kind)
        if isinstance(result, str):
            left_out.append(f"{kind} ({result})")
            continue
        tried += 1
        counts = " | ".join(map(str, result["replaced"]))
        print(f"| {kind} | {counts} | {result['loss']:.0e} | {result['gradients']:.0e} | {'; '.join(result['left'])} |")
        sys.stdout.flush()
        if not (result["loss"] <= 1e-5 and result["gradients"] <= 1e-4):
            failed.append(kind)
    print(f"\n{tried} model types tried, {len(failed)} changed: {', '.join(failed) or 'none'}")
    print(f"{len(left_out)} not tried: {'; '.join(left_out)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
