"""Every model class of transformers and diffusers that can be built small, patched and compared with itself.

    python -m bench zoo [--only CLASS ...] [--kind KIND ...] [--every N] [--jobs N] [--seconds S] [--json FILE]

`build` makes transformers' models (`small` their configurations, `inputs` what they read), `diffusion` those of
diffusers; `compare` patches them, `steps` says how far results may be apart, `products` computes those of bf16 fast
where torch does not, `run` shares classes among processes, `table` counts.
"""

from __future__ import annotations


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    from bench.zoo import run

    return run.main(argv)
