"""Distributions of sizes that real models span; every function takes a seeded ``random.Random``."""

from __future__ import annotations

import math
import random

MAX_ROWS, MAX_HEADS = 16384, 64
HIDDEN = (512, 16384)
HEAD_SIZES = (32, 256)
EXPERTS = (8, 384)
VOCABULARY = (1000, 262144)
STEP = 8
# Of one tensor: what plain torch, which computes some ops in fp32, holds several times.
MAX_ELEMENTS = 1 << 29


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    """Return an integer of both limits and between them; each doubling is as likely as any other."""
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def rows(rng: random.Random, cols: int = 1) -> int:
    """Return a number of rows or tokens; of wide rows at most as many as fit into `MAX_ELEMENTS`."""
    return min(log_uniform(rng, 1, MAX_ROWS), max(1, MAX_ELEMENTS // cols))


def hidden(rng: random.Random) -> int:
    """Return a hidden size, in steps of 8: half of them are no multiple of 16."""
    return STEP * log_uniform(rng, HIDDEN[0] // STEP, HIDDEN[1] // STEP)


def head_size(rng: random.Random) -> int:
    """Return the width of a head, in steps of 8."""
    return STEP * rng.randint(HEAD_SIZES[0] // STEP, HEAD_SIZES[1] // STEP)


def heads(rng: random.Random) -> tuple[int, int]:
    """Return heads of q, and heads of k and v, which divide them."""
    q = rng.randint(1, MAX_HEADS)
    return q, rng.choice([n for n in range(1, q + 1) if q % n == 0])


def experts(rng: random.Random) -> int:
    """Return a number of experts, three of four times a multiple of 8."""
    count = rng.randint(*EXPERTS)
    return count - count % STEP if rng.random() < 0.75 else count


def vocabulary(rng: random.Random) -> int:
    """Return a size of a vocabulary, three of four times a multiple of 8."""
    size = log_uniform(rng, *VOCABULARY)
    return size - size % STEP if rng.random() < 0.75 else size


def sequences(rng: random.Random) -> tuple[int, int]:
    """Return a batch and a length of at most `MAX_ROWS` tokens together."""
    length = log_uniform(rng, 1, MAX_ROWS)
    return log_uniform(rng, 1, min(64, MAX_ROWS // length)), length
