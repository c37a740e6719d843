# ruff: noqa: E741
"""Losses against formulas written out for one pair, completion or token in Python's own floats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rtkernels import losses
from rtkernels.errors import ArgumentError

B, T = 4, 6
BETA, E, TAU = 0.3, 0.1, 0.05


def sg(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def ls(x: float) -> float:
    return math.log(sg(x))


def tokens(*shape: int, scale: float = 1.0) -> Tensor:
    return -scale * torch.rand(*shape, dtype=torch.float64)


def masks(sequences: int = B, length: int = T) -> Tensor:
    return (torch.arange(length) < torch.randint(1, length + 1, (sequences, 1))).long()


def rows(x: Tensor, mask: Tensor) -> list[list[float]]:
    """Return the values that count, sequence by sequence."""
    return [[v for v, m in zip(a, b, strict=True) if m] for a, b in zip(x.tolist(), mask.tolist(), strict=True)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


def equal(ours: Tensor, wanted: float) -> None:
    assert ours.dtype == torch.float64 and ours.shape == ()
    assert ours.item() == pytest.approx(wanted, rel=1e-10, abs=1e-12)


# of log-ratios r of chosen and rejected completions, and their lengths
PAIRS: dict[str, Callable[[float, float, int, int], float]] = {
    "sigmoid": lambda w, l, n, k: -ls(BETA * (w - l)),
    "sigmoid_norm": lambda w, l, n, k: -ls(BETA * (w / n - l / k)),
    "hinge": lambda w, l, n, k: max(0.0, 1 - BETA * (w - l)),
    "ipo": lambda w, l, n, k: (w / n - l / k - 1 / (2 * BETA)) ** 2,
    "robust": lambda w, l, n, k: (-(1 - E) * ls(BETA * (w - l)) + E * ls(-BETA * (w - l))) / (1 - 2 * E),
    "exo_pair": lambda w, l, n, k: (
        sg(BETA * (w - l)) * (ls(BETA * (w - l)) - math.log(1 - E))
        + sg(-BETA * (w - l)) * (ls(-BETA * (w - l)) - math.log(E))
    ),
    "nca_pair": lambda w, l, n, k: -ls(BETA * w) - ls(-BETA * w) / 2 - ls(-BETA * l) / 2,
    "bco_pair": lambda w, l, n, k: -ls(BETA * w) - ls(-BETA * l),
    "sppo_hard": lambda w, l, n, k: (w - 1 / (2 * BETA)) ** 2 + (l + 1 / (2 * BETA)) ** 2,
    "apo_zero": lambda w, l, n, k: 1 - sg(BETA * w) + sg(BETA * l),
    "apo_down": lambda w, l, n, k: sg(BETA * w) + 1 - sg(BETA * (w - l)),
    "discopop": lambda w, l, n, k: (
        -ls(BETA * (w - l)) * (1 - sg(BETA * (w - l) / TAU))
        + math.exp(-BETA * (w - l)) * sg(BETA * (w - l) / TAU)
    ),
}  # fmt: skip


class Preferences:
    """Random pairs."""

    def __init__(self) -> None:
        self.w, self.l, self.ref_w, self.ref_l = (tokens(B, T, scale=2) for _ in range(4))
        self.mask_w, self.mask_l = masks(), masks()
        self.given = {"chosen_mask": self.mask_w, "rejected_mask": self.mask_l, "beta": BETA, "label_smoothing": E}

    def ratios(self) -> tuple[list[float], list[float]]:
        def of(x: Tensor, ref: Tensor, mask: Tensor) -> list[float]:
            return [sum(a) - sum(b) for a, b in zip(rows(x, mask), rows(ref, mask), strict=True)]

        return of(self.w, self.ref_w, self.mask_w), of(self.l, self.ref_l, self.mask_l)

    def dpo(self, **options: Any) -> Tensor:
        return losses.dpo(self.w, self.l, self.ref_w, self.ref_l, **{**self.given, **options})


@pytest.mark.parametrize("loss_type", PAIRS)
def test_dpo_types(loss_type: str) -> None:
    p = Preferences()
    lengths = p.mask_w.sum(1).tolist(), p.mask_l.sum(1).tolist()
    each = [PAIRS[loss_type](*of) for of in zip(*p.ratios(), *lengths, strict=True)]
    equal(p.dpo(loss_type=loss_type), statistics.mean(each))
    sums = [(x * m).sum(1) for x, m in ((p.w, p.mask_w), (p.l, p.mask_l), (p.ref_w, p.mask_w), (p.ref_l, p.mask_l))]
    given = {"chosen_lengths": p.mask_w.sum(1), "rejected_lengths": p.mask_l.sum(1)}
    by_sums = losses.dpo(*sums, loss_type=loss_type, beta=BETA, label_smoothing=E, **given)
    equal(by_sums, statistics.mean(each))


def test_dpo_sorted_and_likelihood() -> None:
    p = Preferences()
    w, l = map(sorted, p.ratios())
    each = [-(1 - E) * ls(BETA * (a - b)) - E * ls(-BETA * (a - b)) for a, b in zip(w, l, strict=True)]
    equal(p.dpo(loss_type="aot_unpaired"), statistics.mean(each))
    own = sorted(sum(a) - sum(b) for a, b in zip(rows(p.w, p.mask_w), rows(p.l, p.mask_l), strict=True))
    ref = sorted(sum(a) - sum(b) for a, b in zip(rows(p.ref_w, p.mask_w), rows(p.ref_l, p.mask_l), strict=True))
    each = [-(1 - E) * ls(BETA * (a - b)) - E * ls(-BETA * (a - b)) for a, b in zip(own, ref, strict=True)]
    equal(p.dpo(loss_type="aot"), statistics.mean(each))
    chosen = [v for row in rows(p.w, p.mask_w) for v in row]
    equal(p.dpo(loss_type="sft"), -statistics.mean(chosen))
    both = p.dpo(loss_type=["sft", "aot"], loss_weights=[0.5, 2.0])
    equal(both, -0.5 * statistics.mean(chosen) + 2 * statistics.mean(each))


SCORES: dict[str, Callable[[float], float]] = {
    "forward_kl": lambda r: 1 - math.exp(-r),
    "js_divergence": lambda r: math.log(2) + ls(r),
    "alpha_divergence": lambda r: (math.exp((0.4 - 1) * r) - 1) / (0.4 - 1),
}


@pytest.mark.parametrize("divergence", SCORES)
def test_dpo_scores(divergence: str) -> None:
    p = Preferences()
    score = SCORES[divergence]
    each = [-ls(BETA * (score(w) - score(l))) for w, l in zip(*p.ratios(), strict=True)]
    equal(p.dpo(f_divergence=divergence, f_alpha=0.4), statistics.mean(each))


def test_dpo_of_long_completions_and_weights() -> None:
    p = Preferences()
    shorter = [min(a, b) for a, b in zip(p.mask_w.sum(1).tolist(), p.mask_l.sum(1).tolist(), strict=True)]

    def sums(x: Tensor, mask: Tensor) -> list[float]:
        return [sum(v[:n]) + 0.3 * sum(v[n:]) for v, n in zip(rows(x, mask), shorter, strict=True)]

    of = [sums(*x) for x in ((p.w, p.mask_w), (p.ref_w, p.mask_w), (p.l, p.mask_l), (p.ref_l, p.mask_l))]
    equal(p.dpo(ld_alpha=0.3), statistics.mean(-ls(BETA * (a - b - c + d)) for a, b, c, d in zip(*of, strict=True)))
    sq_w, sq_l = tokens(B, T), tokens(B, T)
    of = (p.w - sq_w, p.mask_w), (p.l - sq_l, p.mask_l)
    probable = [[math.exp(statistics.mean(v)) for v in rows(*x)] for x in of]
    each = [-ls(BETA * (w - l)) * a * b for w, l, a, b in zip(*p.ratios(), *probable, strict=True)]
    equal(p.dpo(chosen_log_sum_sq=sq_w, rejected_log_sum_sq=sq_l), statistics.mean(each))


def test_kto() -> None:
    lp, ref, mask = tokens(B, T), tokens(B, T), masks()
    kl, kl_ref = tokens(B), tokens(B) - 0.4
    good = torch.tensor([1, 0, 0, 1])
    k = max(0.0, statistics.mean((kl - kl_ref).tolist()))
    r = [sum(a) - sum(b) for a, b in zip(rows(lp, mask), rows(ref, mask), strict=True)]
    each = [1.5 * (1 - sg(BETA * (x - k))) if g else 1 - sg(BETA * (k - x)) for x, g in zip(r, good, strict=True)]
    given = {"kl_logprobs": kl, "kl_ref": kl_ref, "desirable_weight": 1.5, "beta": BETA}
    equal(losses.kto(lp, ref, good, mask=mask, **given), statistics.mean(each))
    each = [1 - sg(BETA * x) if g else sg(BETA * x) for x, g in zip(r, good, strict=True)]
    equal(losses.kto(lp, ref, good, mask=mask, beta=BETA, loss_type="apo_zero_unpaired"), statistics.mean(each))
    ref[2] = math.nan  # a completion without a reference does not count
    each = [x for i, x in enumerate(each) if i != 2]
    equal(losses.kto(lp, ref, good, mask=mask, beta=BETA, loss_type="apo_zero_unpaired"), statistics.mean(each))


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_cpo_and_simpo(alpha: float) -> None:
    p = Preferences()
    w, l = rows(p.w, p.mask_w), rows(p.l, p.mask_l)

    def score(y: float) -> float:
        return (1 - math.exp(-alpha * y)) / alpha if alpha else y

    nll = -statistics.mean(v for row in w for v in row)
    x = [score(sum(a)) - score(sum(b)) for a, b in zip(w, l, strict=True)]
    m = [score(statistics.mean(a)) - score(statistics.mean(b)) for a, b in zip(w, l, strict=True)]

    def smoothed(u: float) -> float:
        return -(1 - E) * ls(u) - E * ls(-u)

    wanted = {
        "sigmoid": [smoothed(BETA * v) for v in x],
        "hinge": [max(0.0, 1 - BETA * v) for v in x],
        "ipo": [(v - 1 / (2 * BETA)) ** 2 for v in m],
        "simpo": [smoothed(BETA * v - 0.5) for v in m],
    }
    for loss_type, each in wanted.items():
        ours = losses.cpo(p.w, p.l, loss_type=loss_type, alpha=alpha, cpo_alpha=0.7, **p.given)
        equal(ours, statistics.mean(each) + 0.7 * nll)
    if not alpha:
        equal(losses.simpo(p.w, p.l, gamma=0.5, **p.given), statistics.mean(wanted["simpo"]))


def test_orpo() -> None:
    p = Preferences()
    means = [[statistics.mean(v) for v in rows(x, m)] for x, m in ((p.w, p.mask_w), (p.l, p.mask_l))]
    odds = [w - l - math.log(1 - math.exp(w)) + math.log(1 - math.exp(l)) for w, l in zip(*means, strict=True)]
    ours = losses.orpo(
        p.w, p.l, torch.tensor(1.25, dtype=torch.float64), chosen_mask=p.mask_w, rejected_mask=p.mask_l, beta=0.4
    )
    equal(ours, 1.25 - 0.4 * statistics.mean(map(ls, odds)))


class Rollout:
    """Random completions with advantages of both signs."""

    def __init__(self) -> None:
        self.lp, self.mask = tokens(B, T), masks()
        self.old, self.ref = (self.lp + 0.4 * torch.randn(B, T, dtype=torch.float64) for _ in range(2))
        self.a = torch.tensor([1.0, -0.5, 0.25, -2.0], dtype=torch.float64)

    def each(self, token: Callable[[float, float, float], float], sequence: bool = False) -> list[list[float]]:
        """Return the loss of each token from its ratio, advantage and log-probability."""
        result = []
        of = zip(rows(self.lp, self.mask), rows(self.old, self.mask), self.a.tolist(), strict=True)
        for lp, old, a in of:
            q = [math.exp(x - y) for x, y in zip(lp, old, strict=True)]
            if sequence:
                q = [math.exp(statistics.mean(x - y for x, y in zip(lp, old, strict=True)))] * len(lp)
            result.append([token(r, a, x) for r, x in zip(q, lp, strict=True)])
        return result


def clipped(q: float, a: float, lp: float) -> float:
    return -min(q * a, min(max(q, 0.8), 1.28) * a)


REDUCED: dict[str, Callable[[list[list[float]]], float]] = {
    "grpo": lambda x: statistics.mean(statistics.mean(v) for v in x),
    "bnpo": lambda x: statistics.mean(v for row in x for v in row),
    "dr_grpo": lambda x: sum(map(sum, x)) / (B * 20),
    "dapo": lambda x: sum(map(sum, x)) / 13,
    "luspo": lambda x: statistics.mean(map(sum, x)),
}


@pytest.mark.parametrize("loss_type", REDUCED)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_grpo_reductions(loss_type: str, level: str) -> None:
    r = Rollout()
    given = {"old": r.old, "mask": r.mask, "epsilon_high": 0.28, "importance_sampling_level": level}
    ours = losses.grpo(r.lp, r.a, loss_type=loss_type, num_items=13, max_completion_length=20, **given)
    equal(ours, REDUCED[loss_type](r.each(clipped, level == "sequence")))


def test_grpo_tokens() -> None:
    r = Rollout()
    given = {"old": r.old, "mask": r.mask, "num_items": torch.tensor(13)}
    cispo = r.each(lambda q, a, lp: -min(q, 1.1) * a * lp)
    equal(losses.grpo(r.lp, r.a, loss_type="cispo", epsilon_high=1.1, **given), REDUCED["dapo"](cispo))
    sapo = r.each(lambda q, a, lp: -4 / (t := 1.0 if a > 0 else 1.05) * sg(t * (q - 1)) * a)
    equal(losses.grpo(r.lp, r.a, loss_type="sapo", **given), REDUCED["grpo"](sapo))
    vespo = []
    for lp, old, a in zip(rows(r.lp, r.mask), rows(r.old, r.mask), r.a.tolist(), strict=True):
        w = math.exp(sum(lp) - sum(old))
        k, g = (2, 3) if a >= 0 else (3, 2)
        vespo.append([-math.exp(g + k * math.log(w) - g * w) * a * x for x in lp])
    equal(losses.grpo(r.lp, r.a, loss_type="vespo", **given), REDUCED["dapo"](vespo))
    delta = r.each(lambda q, a, lp: -min(min(q, 1.3) * a, min(max(q, 0.8), 1.2) * a))
    equal(losses.grpo(r.lp, r.a, delta=1.3, **given), REDUCED["dapo"](delta))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("times_ratio", [True, False])
def test_grpo_kl(kind: str, times_ratio: bool) -> None:
    r = Rollout()
    of = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - d - 1}[kind]
    wanted = r.each(clipped)
    for row, lp, old, ref in zip(wanted, *(rows(x, r.mask) for x in (r.lp, r.old, r.ref)), strict=True):
        for i in range(len(row)):
            row[i] += 0.2 * of(ref[i] - lp[i]) * (math.exp(lp[i] - old[i]) if times_ratio else 1)
    given = {"old": r.old, "ref": r.ref, "mask": r.mask, "epsilon_high": 0.28, "kl_times_ratio": times_ratio}
    ours = losses.grpo(r.lp, r.a, loss_type="bnpo", beta=0.2, kl=kind, accumulation_steps=4, **given)
    equal(ours, REDUCED["bnpo"](wanted) / 4)


def test_kl_is_bounded_on_request() -> None:
    lp, ref = torch.zeros(1, 2), torch.tensor([[50.0, -1.0]])
    bounded = losses.kl_penalty(lp, ref, max_log_ratio=20.0, max_kl=10.0)
    torch.testing.assert_close(bounded, torch.tensor([[10.0, math.exp(-1)]]))


def test_sampler_ratio_and_masks() -> None:
    old = torch.zeros(2, 3)
    sampler = torch.tensor([[-2.0, 0.0, math.nan], [-0.5, -0.25, 7.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    e = math.e
    of = lambda mode: losses.sampler_ratio(old, sampler, mask=mask, mode=mode)  # noqa: E731
    torch.testing.assert_close(of("token_truncate"), torch.tensor([[3.0, 1, 1], [e**0.5, e**0.25, 1]]))
    torch.testing.assert_close(of("token_mask"), torch.tensor([[0.0, 1, 1], [e**0.5, e**0.25, 1]]))
    torch.testing.assert_close(of("sequence_truncate"), torch.tensor([[3.0], [e**0.75]]))
    torch.testing.assert_close(of("sequence_mask"), torch.tensor([[0.0], [e**0.75]]))
    lp = torch.tensor([[-3.0, -3.0, 0.0], [-3.0, -3.0, 0.0]])
    kept = losses.off_policy_mask(lp, old, torch.tensor([1.0, -1.0]), 0.5, mask=mask)
    assert kept.tolist() == [[1.0], [0.0]]
    entropy = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 99.0]])
    assert losses.entropy_mask(entropy, 0.5, mask=mask).tolist() == [[False, False, True], [True, True, False]]


def test_rloo() -> None:
    r = Rollout()
    q = [math.exp(sum(a) - sum(b)) for a, b in zip(rows(r.lp, r.mask), rows(r.old, r.mask), strict=True)]
    wanted = statistics.mean(clipped(x, a, 0.0) for x, a in zip(q, r.a.tolist(), strict=True))
    equal(losses.rloo(r.lp, r.old, r.a, mask=r.mask, epsilon_high=0.28), wanted)
    equal(losses.rloo(r.lp, (r.old * r.mask).sum(1), r.a, mask=r.mask, epsilon_high=0.28), wanted)


def test_advantages() -> None:
    rewards = torch.tensor([1.0, 2.0, 6.0, 5.0, math.nan, 4.0], dtype=torch.float64)
    groups = [[1.0, 2.0, 6.0], [5.0, 4.0]]
    centred = [x - statistics.mean(g) for g in groups for x in g]
    centred.insert(4, 0.0)
    assert losses.group_advantages(rewards, 3, scale="none").tolist() == pytest.approx(centred)
    by_group = [(x - statistics.mean(g)) / (statistics.stdev(g) + 1e-4) for g in groups for x in g]
    by_group.insert(4, 0.0)
    assert losses.group_advantages(rewards, 3).tolist() == pytest.approx(by_group)
    everything = statistics.stdev(groups[0] + groups[1]) + 1e-4
    by_batch = [x / everything for x in centred]
    assert losses.group_advantages(rewards, 3, scale="batch").tolist() == pytest.approx(by_batch)
    others = [1 - 4, 2 - 3.5, 6 - 1.5, 1.0, 0.0, -1.0]
    assert losses.leave_one_out_advantages(rewards, 3).tolist() == pytest.approx(others)
    kept = [others[i] for i in (0, 1, 2, 3, 5)]
    mean, std = statistics.mean(kept), statistics.stdev(kept) + 1e-4
    wanted = [0.0 if i == 4 else (x - mean) / std for i, x in enumerate(others)]
    assert losses.leave_one_out_advantages(rewards, 3, normalize=True).tolist() == pytest.approx(wanted)
    assert losses.leave_one_out_advantages(rewards[:2], 1).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("beta", [0.0, 0.25, 1.0])
def test_topk_distillation(beta: float) -> None:
    q, p = (torch.randn(3, 9, dtype=torch.float64).log_softmax(-1)[:, :4] for _ in range(2))
    mask, wanted = [1, 0, 1], []
    for a, b, m in zip(q.exp().tolist(), p.exp().tolist(), mask, strict=True):
        a, b = [*a, 1 - sum(a)], [*b, 1 - sum(b)]
        mixed = [(1 - beta) * x + beta * y for x, y in zip(a, b, strict=True)]
        towards = mixed if 0 < beta < 1 else None
        of_p = sum(y * math.log(y / z) for y, z in zip(b, towards or a, strict=True))
        of_q = sum(x * math.log(x / z) for x, z in zip(a, towards or b, strict=True))
        wanted += [{0.0: of_p, 1.0: of_q}.get(beta, beta * of_p + (1 - beta) * of_q)] if m else []
    given = {"mask": torch.tensor(mask), "beta": beta}
    equal(losses.topk_distillation(q, p, **given), statistics.mean(wanted))
    equal(losses.topk_distillation(q, p, num_items=7, **given), sum(wanted) / 7)


def test_gradients_are_those_of_differences() -> None:
    p, r = Preferences(), Rollout()
    lp = r.lp.clone().requires_grad_()
    given = {"old": r.old, "ref": r.ref, "mask": r.mask, "beta": 0.2}
    for loss_type in ("grpo", "sapo"):
        assert torch.autograd.gradcheck(lambda x, t=loss_type: losses.grpo(x, r.a, loss_type=t, **given), (lp,))
    w, l = p.w.requires_grad_(), p.l.requires_grad_()
    options = {**p.given, "loss_type": ["sigmoid", "ipo", "exo_pair", "sft"]}
    assert torch.autograd.gradcheck(lambda x, y: losses.dpo(x, y, p.ref_w, p.ref_l, **options), (w, l))
    nll = torch.tensor(1.0, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, y: losses.orpo(x, y, nll), (w, l))


def test_what_is_masked_has_no_influence() -> None:
    r, p = Rollout(), Preferences()
    lp = r.lp.requires_grad_()
    given = {"mask": r.mask, "beta": 0.1}
    before = losses.grpo(lp, r.a, old=r.old, ref=r.ref, **given)
    hidden = [torch.where(r.mask != 0, x, math.nan) for x in (lp, r.old, r.ref)]
    after = losses.grpo(hidden[0], r.a, old=hidden[1], ref=hidden[2], **given)
    (gradient,) = torch.autograd.grad(after, lp)
    assert after == before and gradient.isfinite().all() and not gradient[r.mask == 0].any()
    w = torch.where(p.mask_w != 0, p.w, math.inf)
    assert losses.dpo(w, p.l, p.ref_w, p.ref_l, **p.given) == p.dpo()


def test_nothing_counts() -> None:
    lp = torch.zeros(2, 3, requires_grad=True)
    for loss_type in ("grpo", "bnpo", "dapo", "luspo", "cispo", "sapo", "vespo"):
        loss = losses.grpo(lp, torch.ones(2), mask=torch.zeros(2, 3), loss_type=loss_type)
        (gradient,) = torch.autograd.grad(loss, lp)
        assert loss == 0 and not gradient.any()
    assert losses.topk_distillation(torch.zeros(2, 3), torch.zeros(2, 3), mask=torch.zeros(2)) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_dtypes_are_summed_in_fp32(dtype: torch.dtype) -> None:
    p = Preferences()
    given = [x.to(dtype) for x in (p.w, p.l, p.ref_w, p.ref_l)]
    ours = losses.dpo(*given, **p.given)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, losses.dpo(*(x.float() for x in given), **p.given))


X = torch.zeros(2, 3)
ONE = torch.zeros(2)
WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: losses.dpo(X, X, X, X, loss_type="sigmod"), "loss_type is 'sigmod'.*did you mean 'sigmoid'"),
    (lambda: losses.dpo(X, X, X, X, loss_type=[]), "loss_weights has 0 values"),
    (lambda: losses.dpo(X, X, X, X, loss_type=["ipo", "sft"], loss_weights=[1.0]), "loss_weights has 1 values"),
    (lambda: losses.dpo(X, X, X, X, beta=0.0), "beta is 0.0; expected a number above 0"),
    (lambda: losses.dpo(X, X, X, X, loss_type="exo_pair"), "label_smoothing is 0.0; expected a number above 0"),
    (lambda: losses.dpo(X, X, X, X, label_smoothing=0.5), "label_smoothing is 0.5; expected .* below 0.5"),
    (lambda: losses.dpo(X, X[:1], X, X), "rejected has shape"),
    (lambda: losses.dpo(X, X, X[:, :2], X), "ref_chosen has shape"),
    (lambda: losses.dpo(X, X, X, X, chosen_mask=ONE), "chosen_mask has shape"),
    (lambda: losses.dpo(X.long(), X, X, X), "chosen has dtype int64"),
    (lambda: losses.dpo(ONE, ONE, ONE, ONE, loss_type="sft"), "chosen has shape .*'sft' needs"),
    (lambda: losses.dpo(ONE, ONE, ONE, ONE, loss_type="ipo"), "chosen_lengths is None"),
    (lambda: losses.kto(X, X, ONE, kl_logprobs=ONE), "kl_ref is None"),
    (lambda: losses.kto(X, X, X), "desirable has shape"),
    (lambda: losses.cpo(ONE, ONE), "nll is None"),
    (lambda: losses.cpo(X, X[:1]), "rejected has 1 sequences"),
    (lambda: losses.orpo(X, X, ONE), "nll has 1 dimensions"),
    (lambda: losses.grpo(X, ONE, beta=0.1), "ref is None"),
    (lambda: losses.grpo(X, ONE, loss_type="dr_grpo"), "max_completion_length is None"),
    (lambda: losses.grpo(X, torch.zeros(3)), "advantages has shape"),
    (lambda: losses.grpo(ONE, ONE), "logprobs has 1 dimensions"),
    (lambda: losses.grpo(X, ONE, keep=torch.zeros(2, 2)), "keep has shape"),
    (lambda: losses.grpo(X, ONE, num_items=ONE), "num_items has shape"),
    (lambda: losses.grpo(X, ONE, epsilon="0.2"), "epsilon is '0.2'"),
    (lambda: losses.rloo(X, X, X), "advantages has 2 dimensions"),
    (lambda: losses.group_advantages(torch.zeros(5), 2), "num_generations is 2; expected a divisor of the 5"),
    (lambda: losses.sampler_ratio(X, X, mode="token"), "mode is 'token'"),
    (lambda: losses.topk_distillation(X, X, beta=1.5), "beta is 1.5"),
    (lambda: losses.topk_distillation(X, None), "teacher is a NoneType"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_wrong_arguments_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


def test_no_graph_breaks() -> None:
    r = Rollout()
    compiled = torch.compile(losses.grpo, backend="eager", fullgraph=True)
    assert compiled(r.lp, r.a, old=r.old, mask=r.mask) == losses.grpo(r.lp, r.a, old=r.old, mask=r.mask)
