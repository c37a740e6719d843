"""openpi's LoRA layers with fp8 products in JAX, against plain einsums; returns-to-go against a loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from rtkernels.errors import ArgumentError

jax = pytest.importorskip("jax")
jnp = jax.numpy
openpi = pytest.importorskip("rtkernels.integrations.openpi")
# openpi's equations for queries, keys with values, all three, and the output projection.
EQUATIONS = {
    "BTD,NDH->BTNH": ((2, 3, 32), (4, 32, 16)), "BSD,2KDH->2BSKH": ((2, 3, 32), (2, 1, 32, 16)),
    "BSD,3KDH->3BSKH": ((2, 3, 32), (3, 4, 32, 16)), "BTNH,NHD->BTD": ((2, 3, 4, 16), (4, 16, 32)),
}  # fmt: skip


def _array(*shape: int, seed: int = 0, dtype: str = "bfloat16") -> Any:
    return jnp.asarray(numpy.random.default_rng(seed).standard_normal(shape), dtype=dtype)


def _error(got: Any, want: Any) -> float:
    got, want = (numpy.asarray(t, numpy.float64) for t in (got, want))
    return float(numpy.linalg.norm(got - want) / numpy.linalg.norm(want))


@pytest.mark.parametrize("equation", EQUATIONS)
def test_einsum_with_an_adapter(equation: str) -> None:
    of_x, of_w = EQUATIONS[equation]
    x, w = _array(*of_x), _array(*of_w, seed=1, dtype="float32")
    a, b = _array(*of_w[:-1], 4, seed=2, dtype="float32"), _array(*of_w[:-2], 4, of_w[-1], seed=3, dtype="float32")

    def plain(x: Any, w: Any, a: Any, b: Any) -> Any:
        return jnp.einsum(equation, x, w + 0.5 * jnp.einsum("...dr,...rh->...dh", a, b))

    def ours(x: Any, w: Any, a: Any, b: Any) -> Any:
        return openpi.lora_einsum(equation, x, w, (a, b), scale=0.5)

    result = jax.jit(ours)(x, w, a, b)
    exact = [t.astype(jnp.float32) for t in (x, w, a, b)]
    want = plain(*exact)
    assert result.dtype == x.dtype and result.shape == want.shape
    if equation != "BTNH,NHD->BTD":  # an adapter of heads has its own sum over them
        assert _error(result, want) < 0.05
    assert _error(openpi.lora_einsum(equation, x, w), jnp.einsum(equation, exact[0], exact[1])) < 0.05
    of = jax.grad(lambda *t: (ours(*t).astype(jnp.float32) ** 2).sum(), argnums=(0, 1, 2, 3))
    gradients = jax.jit(of)(x, w, a, b)
    assert [g.dtype for g in gradients] == [t.dtype for t in (x, w, a, b)]
    if equation != "BTNH,NHD->BTD":
        wanted = jax.grad(lambda *t: (plain(*t) ** 2).sum(), argnums=(0, 1, 2, 3))(*exact)
        for got, expected in zip(gradients, wanted, strict=True):
            assert _error(got, expected) < 0.08


def test_what_is_no_product_with_a_weight() -> None:
    x, w = _array(2, 3), _array(3, 4)
    for equation in ("ab,bc", "ab,bc,cd->ad", "aa,ab->b", "ab,ac->abc", "ab,bc->a", "ab,cd->abcd", "abc,cd->abd",
                     "...b,bc->...c"):  # fmt: skip
        with pytest.raises(ArgumentError, match="expected"):
            openpi.fp8_einsum(equation, x, w)
    with pytest.raises(ArgumentError, match=r"\(2, 3\) and \(4, 3\)"):
        openpi.fp8_dot(x, _array(4, 3))
    with pytest.raises(ArgumentError, match="equal sizes"):
        openpi.fp8_einsum("ab,cb->ac", x, _array(4, 5))


def _lora_module() -> Any:
    """Return the two classes of ``openpi.models.lora`` without flax: parameters, and the methods that are replaced."""

    class Einsum:
        def __init__(self, w: Any, lora: Any = None, config: Any = None) -> None:
            self.w, self.lora_config = w, config
            self.w_a, self.w_b = lora or (None, None)

        def __call__(self, eqn: str, x: Any) -> Any:
            return jnp.einsum(eqn, x, self.w.astype(x.dtype))

    class FeedForward:
        def __init__(self, gating: Any, linear: Any) -> None:
            self.gating, self.linear = gating, linear

        def _dot(self, x: Any, w: Any, lora_weights: Any) -> Any:
            base = jnp.dot(x, w.astype(x.dtype))
            return base if lora_weights is None else base + jnp.dot(jnp.dot(x, lora_weights[0]), lora_weights[1])

        def __call__(self, x: Any, lora: Any = None) -> Any:
            gate = jax.nn.gelu(self._dot(x, self.gating[0], lora))
            return self._dot(gate * self._dot(x, self.gating[1], lora), self.linear, None)

    return SimpleNamespace(Einsum=Einsum, FeedForward=FeedForward)


def test_openpis_layers() -> None:
    lora = _lora_module()
    x, gating, linear = _array(2, 5, 32), _array(2, 32, 64, seed=1) / 5, _array(64, 32, seed=2) / 8
    adapter = _array(32, 4, seed=3) / 8, _array(4, 64, seed=4) / 8
    layer, einsum = lora.FeedForward(gating, linear), lora.Einsum(_array(4, 32, 16, seed=5))
    adapted = lora.Einsum(einsum.w, (_array(4, 32, 2, seed=6), _array(4, 2, 16, seed=7)),
                          SimpleNamespace(scaling_value=0.25, axes=(-2, -1)))  # fmt: skip
    before = layer(x), layer(x, adapter), einsum("BTD,NDH->BTNH", x)
    openpi.patch(lora)
    openpi.patch(lora)  # once is enough
    after = layer(x), layer(x, adapter), einsum("BTD,NDH->BTNH", x)
    for got, want in zip(after, before, strict=True):
        error = _error(got, want)
        assert 0.001 < error < 0.08  # another product, and the same result
    full = jnp.einsum("BTD,NDH->BTNH", x, einsum.w + 0.25 * jnp.einsum("ndr,nrh->ndh", adapted.w_a, adapted.w_b))
    assert _error(adapted("BTD,NDH->BTNH", x), full) < 0.05
    openpi.unpatch(lora)
    assert _error(layer(x), before[0]) == 0.0
    with pytest.raises(ArgumentError, match="has no _dot"):
        openpi.patch(SimpleNamespace(Einsum=lora.Einsum, FeedForward=object))
    openpi.unpatch(SimpleNamespace(Einsum=lora.Einsum, FeedForward=lora.FeedForward))


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_returns_to_go(discount: float) -> None:
    generator = numpy.random.default_rng(0)
    rewards, last = generator.standard_normal((3, 17)), generator.random((3, 17)) < 0.2
    value = generator.standard_normal(3)
    want = numpy.zeros_like(rewards)
    for row in range(3):
        later = value[row]
        for t in reversed(range(17)):
            later = want[row, t] = rewards[row, t] + (0.0 if last[row, t] else discount * later)
    got = jax.jit(lambda r, e, v: openpi.return_to_go(r, e, discount=discount, bootstrap=v))(rewards, last, value)
    numpy.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert openpi.return_to_go(rewards[:, :0], last[:, :0], bootstrap=value).shape == (3, 0)
    steps = numpy.array([3, 0, 16])
    plain = numpy.asarray(openpi.return_to_go(rewards[0], last[0], discount=discount))
    scaled = openpi.return_to_go_batch(rewards[0], last[0], steps, discount=discount)
    numpy.testing.assert_allclose(scaled, (plain[steps] - plain.min()) / (plain.max() - plain.min()), atol=1e-6)
    bins = openpi.return_to_go_batch(rewards[0], last[0], steps, discount=discount, low=-1.0, high=1.0, bins=5)
    assert bins.dtype == jnp.int32
    numpy.testing.assert_array_equal(bins, numpy.minimum((numpy.clip((plain[steps] + 1) / 2, 0, 1) * 5).astype(int), 4))
    for arguments, message in (((rewards, last[0]), "shapes"), ((rewards, rewards), "expected bool")):
        with pytest.raises(ArgumentError, match=message):
            openpi.return_to_go(*arguments)
    with pytest.raises(ArgumentError, match="bins is 0"):
        openpi.return_to_go_batch(rewards[0], last[0], steps, bins=0)
