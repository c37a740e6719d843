"""A sample of the zoo: model types that no other test names. ``python -m bench zoo`` tries all of them."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", minversion="5.0")

from bench import zoo


@pytest.mark.parametrize("kind", ["apertus", "exaone4", "hunyuan_v1_moe", "minimax_m2", "nemotron", "starcoder2"])
def test_keeps_loss_and_gradients(kind: str) -> None:
    result = zoo.compare(kind)
    assert not isinstance(result, str), result  # it can be built small
    assert zoo.kept(result), result
    assert sum(result["replaced"]) >= 4


def test_table_in_the_guide() -> None:
    document = (zoo.meta.ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert document.count(zoo.MARK) == 2
    twice = zoo.written(zoo.written(document, ["one"]), ["| two |"])
    assert f"{zoo.MARK}\n| two |\n{zoo.MARK}" in twice and "one" not in twice.split(zoo.MARK)[1]
