"""verl's fused head with our forward, against verl's own. The file is loaded by itself: verl as a whole needs ray."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FILE = "verl.utils.experimental.torch_functional"


@pytest.fixture
def functional(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    spec = importlib.util.find_spec("verl")
    if spec is None:
        pytest.skip("verl is not installed")
    path = Path(spec.origin).parent.joinpath(*FILE.split(".")[1:]).with_suffix(".py")
    for end in range(1, 4):
        name = ".".join(FILE.split(".")[:end])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    about = importlib.util.spec_from_file_location(FILE, path)
    module = importlib.util.module_from_spec(about)
    monkeypatch.setitem(sys.modules, FILE, module)
    about.loader.exec_module(module)
    monkeypatch.delitem(sys.modules, "rtkernels.integrations.verl", raising=False)
    yield module


def test_the_same_as_verl(functional: Any) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 5, 16, requires_grad=True), torch.randn(33, 16, requires_grad=True)
    ids = torch.randint(0, 33, (2, 5))
    head = functional.FusedLinearForPPO()

    def results() -> list[torch.Tensor]:
        logprob, entropy = head(hidden, weight, ids, temperature=0.7)
        grads = torch.autograd.grad((logprob * 2 + entropy).sum(), (hidden, weight))
        return [logprob, entropy, *grads]

    theirs = results()
    import rtkernels.integrations.verl as adapter

    assert functional.FusedLinearForPPO.forward is adapter.forward
    for ours, wanted in zip(results(), theirs, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
    rows = torch.full((2, 5), 0.7)
    torch.testing.assert_close(head(hidden, weight, ids, temperature=rows)[0], theirs[0], rtol=1e-5, atol=1e-5)
