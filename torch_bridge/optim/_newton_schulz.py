"""Newton-Schulz in torch, and on the stored elements that hold matrices."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ragged_jax.optim._forms import Form
from ragged_jax.optim._muon_reference import Scale, scale_factor

# Elements of matrices that are multiplied in one call. More would only leave a CPU's cache.
_TOGETHER_ON_CPU, _TOGETHER = 2**17, 2**26


@dataclass(frozen=True)
class NewtonSchulz:
    """Orthogonalises matrices and scales the result by their shape.

    Attributes:
      rows: `(a, b, c)` of each step.
      dtype: of the products; norms are taken in float32 in any case.
      scale: see `ragged_jax.optim.muon`.
    """

    rows: tuple[tuple[float, float, float], ...]
    dtype: torch.dtype
    scale: Scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Of `[batch, fan_in, fan_out]`, in float32."""
        fan_in, fan_out = x.shape[-2:]
        x = normalised(x).to(self.dtype)
        x = x.mT if fan_in > fan_out else x
        for a, b, c in self.rows:
            gram = x @ x.mT
            inner = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, inner, x, beta=a)
        x = x.mT if fan_in > fan_out else x
        return x.float().mul_(scale_factor(self.scale, fan_in, fan_out))


def normalised(x: torch.Tensor) -> torch.Tensor:
    """Matrices of Frobenius norm 1, in float32; those of zeros stay so.

    The largest element is divided out first, so that no square over- or underflows: what comes out does not depend
    on the scale of what came in.
    """
    x = x.float()
    largest = x.abs().amax((-2, -1), keepdim=True)
    shrink = torch.where(largest > 2.0**64, 2.0**-64, 1.0)  # the inverse of a very large number is not normal either
    x, largest = x * shrink, largest * shrink
    is_zero = largest < torch.finfo(torch.float32).tiny
    x.div_(torch.where(is_zero, torch.inf, largest))
    squares = x.square().sum((-2, -1), keepdim=True)
    return x.mul_(torch.where(is_zero, 1.0, squares).rsqrt())


def each_matrix(
    form: Form, function: Callable[[torch.Tensor], torch.Tensor], items: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """`function` of every matrix `[batch, rows, cols]` of some items, on the stored elements of each.

    Small matrices are handed over together, so that a kernel runs once for many.
    """
    most = _TOGETHER_ON_CPU if items[0].device.type == "cpu" else _TOGETHER
    step = max(1, most // max(1, form.numel))
    for i in range(0, len(items), step):
        some = items[i : i + step]
        yield from _each_matrix(form, function, torch.stack([*some]) if len(some) > 1 else some[0][None])


def _each_matrix(form: Form, function: Callable[[torch.Tensor], torch.Tensor], stored: torch.Tensor) -> torch.Tensor:
    """Of `[items, numel]`."""
    stored_order = form.item.axis_order or tuple(range(len(form.shape)))
    rest = tuple(d for d in range(len(form.shape)) if d not in form.reduction + form.output)
    order = (0, *(1 + stored_order.index(d) for d in rest + form.reduction + form.output))
    x = stored.view(-1, *(form.shape[d] for d in stored_order)).permute(order)
    inner = x.shape
    parts = x.reshape(-1, form.rows, sum(form.columns)).split(list(form.columns), -1)
    made = [function(part) for part in parts]
    x = made[0] if len(made) == 1 else torch.cat(made, -1)
    return x.reshape(inner).permute(_inverse(order)).reshape(stored.shape)


def likeness(form: Form) -> Hashable:
    """What is equal for items whose matrices can be handed over together."""
    return form.shape, form.item.axis_order, form.reduction, form.output, form.columns


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(order.index(d) for d in range(len(order)))
