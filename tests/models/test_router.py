"""patch(router=True): the same experts with the same probabilities, logits that others may read, and a way back."""

from __future__ import annotations

import pytest
import torch

from rtkernels import models

pytest.importorskip("transformers", minversion="5.0")

from support.tiny_models import build, largest_error, loss_and_gradients, tokens

# Softmax and renormalisation, probabilities in the model's dtype; sigmoid, correction and groups from fp32 logits; a
# bias and a softmax of the chosen ones; the same from logits that become fp32 after the product, in another order.
ROUTERS = {"qwen3_moe": 2, "deepseek_v3": 1, "gpt_oss": 2, "granitemoe": 2}


@pytest.mark.parametrize(("kind", "count"), ROUTERS.items(), ids=ROUTERS)
def test_loss_and_gradients_stay(kind: str, count: int) -> None:
    model = build(kind)
    loss, gradients = loss_and_gradients(model)
    report = models.patch(model, norm=False, mlp=False, rope=False, loss=False, experts=False, router=True)
    assert report.replaced["router"] == count and not report.left_alone, str(report)
    patched_loss, patched_gradients = loss_and_gradients(model)
    assert patched_loss == pytest.approx(loss, rel=1e-5) and largest_error(patched_gradients, gradients) <= 1e-5
    models.unpatch(model)
    assert loss_and_gradients(model)[0] == loss


@pytest.mark.parametrize("kind", ROUTERS)
def test_results_have_the_dtypes_and_the_order_of_the_router(kind: str) -> None:
    model = build(kind).bfloat16()
    (name, router) = next((n, m) for n, m in model.named_modules() if hasattr(m, "top_k") and hasattr(m, "weight"))
    x = torch.randn(19, router.weight.shape[1]).bfloat16()
    wanted = router(x)
    models.patch(model, router=True)
    got = model.get_submodule(name)(x)
    assert [t.dtype for t in got] == [t.dtype for t in wanted] and [t.shape for t in got] == [t.shape for t in wanted]
    experts = router.weight.shape[0]
    logits = [next(t for t in result if t.shape == (19, experts)) for result in (got, wanted)]
    assert torch.equal(*logits)


def test_it_is_off_unless_asked_for() -> None:
    model = build("qwen3_moe")
    report = models.patch(model)
    assert "router" not in report.asked and report.replaced["router"] == 0
    model(input_ids=tokens())
