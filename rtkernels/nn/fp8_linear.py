"""Linear layers that multiply fp8 codes; their parameters are those of ``torch.nn.Linear``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm import fp8_linear_smooth
from rtkernels.ops.gemm.fp8_linear import RECIPES, fp8_linear, fp8_weight
from rtkernels.ops.gemm.fp8_linear_checks import check_linear
from rtkernels.ops.quant.column_absmax import column_absmax
from rtkernels.ops.quant.smooth_quant import smooth_factors
from rtkernels.runtime.torch_private import TENSOR_TYPES, is_dynamo_compiling


class KeepsCodes:
    """A module that quantises its weights in every call, or only once inside :func:`fixed_weights`."""

    _kept: dict[str, tuple[Any, Any]] | None = None

    def codes_of(
        self, name: str, weight: Tensor, make: Callable[[Tensor, bool], Any], version: tuple[int, ...] | None = None
    ) -> Any:
        """Return ``make(weight, transposed)``, cached from an earlier call if possible; None outside ``fixed_weights``.

        `version` replaces weight's own version counter if weight is a combination of other tensors.
        """
        if self._kept is None or is_dynamo_compiling() or type(weight) not in TENSOR_TYPES:
            return None
        if version is None:
            if weight.is_inference():  # counts no changes
                return None
            version = (weight._version,)
        key = (weight.data_ptr(), version)
        transposed = torch.is_grad_enabled()
        known, found = self._kept.get(name, (None, None))
        if known not in ((*key, True), (*key, transposed)):
            found = make(weight, transposed)
            self._kept[name] = ((*key, transposed), found)
        return found


@contextmanager
def fixed_weights(module: torch.nn.Module) -> Iterator[None]:
    """Within this context, the fp8 layers of a module quantise their weights once instead of in every call.

    For micro-batches between two optimizer steps, and for inference. The weights must not change in this context.
    Changes that torch's version counter records (in place, by an optimizer) are detected, and the weight is quantised
    again; changes through ``.data`` are not detected. Layers inside ``torch.compile`` still quantise in every call.

    Args:
        module: A model. Its ``Fp8Linear``, ``Fp8GroupedLinear`` and ``Fp8MoE`` layers keep the codes of their weights
            until the end of the context, by rows and, if gradients are enabled, transposed: up to two bytes per
            element.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, KeepsCodes)]
    for layer in layers:
        layer._kept = {}
    try:
        yield
    finally:
        for layer in layers:
            layer._kept = None


def main_grad_of(weight: Tensor) -> Tensor | None:
    """Return the fp32 tensor in which a trainer accumulates weight's gradient, None if there is none."""
    return getattr(weight, "main_grad", None)


class Fp8Linear(torch.nn.Linear, KeepsCodes):
    """``x @ weight.T + bias`` from fp8 codes, forward and backward; replaces ``torch.nn.Linear``.

    Parameters and state dict are the same as torch's. The parameters are quantised in every call (see
    :func:`fixed_weights`), so optimizers, FSDP2, DTensor tensor parallelism, checkpointing and ``torch.compile`` see an
    ordinary layer. The input is ``[..., in_features]`` in bfloat16, float16 or float32, or codes as
    :func:`rtkernels.fp8_linear` takes them. The result has the input's dtype, also inside ``torch.autocast``.
    Parameters may have another dtype.

    If the weight has an attribute ``main_grad``, its gradient is added to that float32 tensor instead of ``grad``. If
    the weight has an attribute ``grad_added_to_main_grad``, it is set to True.

    Args:
        in_features: Columns of the weight.
        out_features: Rows of the weight.
        bias: Whether the layer has a bias.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        recipe: "block", "row", "tensor" or "hadamard", see :func:`rtkernels.fp8_linear`. "row" has one scale per token
            and one per output channel.
        grad_dtype: fp8 dtype of the incoming gradient's codes. Default: that of the recipe.
        pow2_scale: Round scales up to powers of two.
        rotation: Size of the Hadamard matrix, for recipe "hadamard".
        save_weight: Quantise the weight again in the backward pass instead of saving its transposed codes. For FSDP
            with ``reshard_after_forward``.
        wgrad: "bf16" computes the weight gradient from dy and x in 16 bits; x is then saved instead of its codes.
        backend: Backend of the products, as for :func:`rtkernels.scaled_mm`.

    Raises:
        ArgumentError: `recipe` is not one of these.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None,
        dtype: torch.dtype | None = None, *, recipe: str = "block", grad_dtype: torch.dtype | None = None,
        pow2_scale: bool = False, rotation: int = 64, save_weight: bool = False, wgrad: str = "fp8",
        backend: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, device, dtype)
        if recipe not in self._recipes():
            raise ArgumentError(f"recipe is {recipe!r}; expected one of {', '.join(map(repr, self._recipes()))}")
        self.recipe, self.grad_dtype, self.pow2_scale = recipe, grad_dtype, pow2_scale
        self.rotation, self.save_weight, self.wgrad, self.backend = rotation, save_weight, wgrad, backend

    @classmethod
    def _recipes(cls) -> tuple[str, ...]:
        return tuple(RECIPES)

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, **options: Any) -> Fp8Linear:
        """Return a layer that shares the parameters of another.

        Args:
            linear: A ``torch.nn.Linear``.
            options: Keyword arguments of the class.

        Raises:
            ArgumentError: `linear` is not a ``torch.nn.Linear``.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise ArgumentError(f"linear is a {type(linear).__name__}; expected a torch.nn.Linear")
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta", **options)
        layer._move_buffers(linear.weight.device)
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer.train(linear.training)

    def _move_buffers(self, device: torch.device) -> None:
        pass

    def _make_codes(self, weight: Tensor, transposed: bool) -> Any:
        options = {"recipe": self.recipe, "pow2_scale": self.pow2_scale, "rotation": self.rotation}
        return fp8_weight(weight, **options, transposed=transposed)

    def forward(self, x: Any, scale_layout: str = "row") -> Tensor:
        """Return ``[..., out_features]``. `scale_layout` describes the scales if x is given as codes."""
        return fp8_linear(
            x, self.weight, self.bias, recipe=self.recipe, main_grad=main_grad_of(self.weight),
            grad_dtype=self.grad_dtype, pow2_scale=self.pow2_scale, rotation=self.rotation, scale_layout=scale_layout,
            weight_codes=self.codes_of("weight", self.weight, self._make_codes), save_weight=self.save_weight,
            wgrad=self.wgrad, backend=self.backend,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Return the arguments of the module as text."""
        return f"{super().extra_repr()}, recipe={self.recipe!r}"


class Fp8HadamardLinear(Fp8Linear):
    """:class:`Fp8Linear` with recipe "hadamard": rotations spread outliers and cancel in every product.

    Args:
        in_features: Columns of the weight, a multiple of `rotation`.
        out_features: Rows of the weight, a multiple of `rotation`.
        bias: Whether the layer has a bias.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        rotation: Size of the Hadamard matrix: 32, 64, 128 or 256.
        options: Other keyword arguments of Fp8Linear.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None,
        dtype: torch.dtype | None = None, *, rotation: int = 64, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            in_features, out_features, bias, device, dtype, recipe="hadamard", rotation=rotation, **options
        )
        if in_features % rotation or out_features % rotation:
            raise ArgumentError(
                f"in_features and out_features are {in_features} and {out_features}; expected multiples of rotation, "
                f"{rotation}"
            )


class Fp8SmoothLinear(Fp8Linear):
    """:class:`Fp8Linear` with factors that move the spread of x's channels into the weight (SmoothQuant).

    ``x * smooth`` and ``weight / smooth`` are quantised with one scale per row. In training, the module records the
    largest magnitude of each input channel. :meth:`refresh` computes the factors from these and from the weight: call
    it after the first batch, then about every 16 steps, between a backward pass and the next forward pass. Only
    ``refresh`` changes the factors, so a checkpointed layer is recomputed with the same factors. They are initially 1.

    Args:
        in_features: Columns of the weight.
        out_features: Rows of the weight.
        bias: Whether the layer has a bias.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        alpha: Fraction of the spread that goes to the weight, 0 to 1.
        grad_dtype: As for Fp8Linear.
        pow2_scale: As for Fp8Linear.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None,
        dtype: torch.dtype | None = None, *, alpha: float = 0.5, grad_dtype: torch.dtype | None = None,
        pow2_scale: bool = False,
    ) -> None:  # fmt: skip
        options = {"recipe": "smooth", "grad_dtype": grad_dtype, "pow2_scale": pow2_scale}
        super().__init__(in_features, out_features, bias, device, dtype, **options)
        if not 0.0 <= alpha <= 1.0:
            raise ArgumentError(f"alpha is {alpha}; expected 0 to 1")
        self.alpha = alpha
        self.register_buffer("smooth", torch.ones(in_features, dtype=torch.float32, device=device))
        self.register_buffer("amax", torch.zeros(in_features, dtype=torch.float32, device=device))

    @classmethod
    def _recipes(cls) -> tuple[str, ...]:
        return ("smooth",)

    def _move_buffers(self, device: torch.device) -> None:
        self.smooth = torch.ones(self.in_features, dtype=torch.float32, device=device)
        self.amax = torch.zeros(self.in_features, dtype=torch.float32, device=device)

    def reset_parameters(self) -> None:
        """Initialise the parameters as torch.nn.Linear does, and set the factors to 1."""
        super().reset_parameters()
        if hasattr(self, "smooth"):  # not while the base class is initialised
            torch.nn.init.ones_(self.smooth)
            torch.nn.init.zeros_(self.amax)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in ("smooth", "amax"):  # a torch.nn.Linear has none
            state_dict.setdefault(prefix + name, getattr(self, name))
        super()._load_from_state_dict(state_dict, prefix, *args)

    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute the factors from the inputs since the last call; channels that were always 0 keep theirs."""
        factors = smooth_factors(self.amax.float(), column_absmax(self.weight), alpha=self.alpha)
        self.smooth.copy_(torch.where(self.amax > 0, factors, self.smooth))
        self.amax.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., out_features]``."""
        main_grad, calibrate = main_grad_of(self.weight), self.training and torch.is_grad_enabled()
        check_linear(x.shape, x.dtype, x.get_device(), self.weight, self.bias, main_grad)
        y, amax = fp8_linear_smooth.linear(
            x, self.weight, self.bias, main_grad, self.smooth.float(), self.grad_dtype or torch.float8_e4m3fn, x.dtype,
            self.pow2_scale, calibrate,
        )  # fmt: skip
        if calibrate:
            with torch.no_grad():
                self.amax.copy_(torch.maximum(self.amax, amax))
        return y
