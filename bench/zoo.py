"""Every causal language model of the installed transformers that can be built small, patched and compared.

    python -m bench zoo [--only NAME ...] [--every N] [--out FILE]

prints a Markdown table: what was replaced, and how far loss and gradients are from those of the model as it was. A
model that cannot be built small, or does not repeat its own loss, is counted and left out.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from typing import Any

import torch

from bench import meta

sys.path.insert(0, str(meta.ROOT / "tests"))  # the models are those of the tests

from support.tiny_models import build, largest_error, loss_and_gradients, tokens

from rtkernels import models

KINDS = ("norm", "mlp", "rope", "experts", "loss")
MARK = "<!-- zoo -->"
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
        model.config.use_cache = False  # caches of hybrid models want an attention among the first layers
        (loss, gradients), (repeated, _) = (loss_and_gradients(model, tokens()) for _ in range(2))
    except Exception as error:  # of a library that we do not own
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
    if loss != repeated:
        return "does not repeat its own loss"
    try:
        report = models.patch(model)
        patched, patched_gradients = loss_and_gradients(model, tokens())
    except Exception as error:  # counts as a change
        return {"replaced": [0] * len(KINDS), "left": [repr(error)[:120]], "loss": math.inf, "gradients": math.inf}
    return {
        "replaced": [report.replaced[k] for k in KINDS],
        "left": sorted({f"{site.kind} {site.module}: {site.reason}" for site in report.left_alone}),
        "loss": abs(patched - loss) / abs(loss),
        "gradients": largest_error(patched_gradients, gradients),
    }


def kept(result: dict[str, Any]) -> bool:
    """Return True if a model kept its loss and its gradients."""
    return result["loss"] <= 1e-5 and result["gradients"] <= 1e-4


def written(document: str, lines: list[str]) -> str:
    """Return docs/models.md with another table."""
    before, _, rest = document.partition(MARK)
    _, _, after = rest.partition(MARK)
    return f"{before}{MARK}\n" + "\n".join(lines) + f"\n{MARK}{after}"


def main(argv: list[str] | None = None) -> int:
    """Print the table; return 1 if a model's loss or gradients changed."""
    import transformers

    parser = argparse.ArgumentParser(prog="python -m bench zoo", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="model types")
    parser.add_argument("--every", type=int, default=1, help="only every N-th model type")
    parser.add_argument("--write", action="store_true", help="put the table into docs/models.md")
    chosen = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    failed, left_out, lines = [], [], []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    say(f"| model type | {' | '.join(KINDS)} | loss | gradients | left alone |")
    say("|---" * (len(KINDS) + 4) + "|")
    for kind in chosen.only or names()[:: chosen.every]:
        result = compare(kind)
        if isinstance(result, str):
            left_out.append(f"{kind} ({result})")
            continue
        counts = " | ".join(map(str, result["replaced"]))
        say(f"| {kind} | {counts} | {result['loss']:.0e} | {result['gradients']:.0e} | {'; '.join(result['left'])} |")
        if not kept(result):
            failed.append(kind)
    say(
        f"\ntransformers {transformers.__version__}: {len(lines) - 2} model types tried, {len(failed)} changed "
        f"({', '.join(failed) or 'none'}); {len(left_out)} could not be built small, or do not repeat their own loss."
    )
    print("; ".join(left_out), file=sys.stderr)
    if chosen.write:
        path = meta.ROOT / "docs" / "models.md"
        path.write_text(written(path.read_text(encoding="utf-8"), lines), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
