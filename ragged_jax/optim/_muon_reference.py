"""Muon in numpy, slow and obvious: what the transforms of JAX and the torch bridge are held against."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

Coefficients = str | Sequence[float] | Sequence[Sequence[float]]
Scale = Literal["spectral", "spectral_unclamped", "match_rms_adamw"] | None

PRESETS: dict[str, tuple[tuple[float, float, float], ...]] = {
    # One quintic for every step. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
    "quintic": ((3.4445, -4.7750, 2.0315),),
    # A quintic for each of five steps. Ahn et al., "Dion: Distributed Orthonormalized Updates", arXiv:2504.05295.
    "five_rows": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # The best quintics for singular values from 0.001 to 1. Amsel et al., "The Polar Express", arXiv:2505.16932.
    "polar_express": (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        (1.875, -1.25, 0.375),
    ),
}


def coefficient_rows(coefficients: Coefficients, steps: int) -> tuple[tuple[float, float, float], ...]:
    """The coefficients `(a, b, c)` of each step; the last row repeats where there are more steps than rows.

    Args:
      coefficients: the name of a preset (`quintic`, `five_rows`, `polar_express`), one triple or several.
      steps: how many.

    Raises:
      ValueError: an unknown preset, rows that are not triples, or no step.
    """
    if isinstance(coefficients, str):
        if coefficients not in PRESETS:
            raise ValueError(f"no coefficients called {coefficients!r}; choose from {', '.join(PRESETS)}")
        rows = np.array(PRESETS[coefficients])
    else:
        rows = np.atleast_2d(np.array(coefficients, np.float64))
    if rows.ndim != 2 or rows.shape[1] != 3 or steps < 1:
        raise ValueError(f"coefficients are rows of three for at least one step, got {coefficients!r}, steps={steps}")
    return tuple(tuple(map(float, rows[min(i, len(rows) - 1)])) for i in range(steps))  # type: ignore


def newton_schulz_reference(x: np.ndarray, coefficients: Coefficients = "quintic", steps: int = 5) -> np.ndarray:
    """A matrix with its singular values brought near 1, in double precision.

    Args:
      x: of shape [rows, cols].
      coefficients, steps: the polynomials `a x + b x^3 + c x^5` applied to its singular values in turn.

    Example:
      >>> x = np.diag([3.0, 2.0, 1.0])
      >>> np.round(np.linalg.svd(newton_schulz_reference(x, "polar_express", 8))[1], 3)
      array([1., 1., 1.])
    """
    x = np.asarray(x, np.float64)
    largest = np.abs(x).max(initial=0)
    if largest == 0:
        return np.zeros_like(x)
    x = x / largest
    x = x / np.linalg.norm(x)
    for a, b, c in coefficient_rows(coefficients, steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def scale_factor(scale: Scale, fan_in: int, fan_out: int) -> float:
    """What an orthogonalised update of a `fan_in` x `fan_out` matrix is multiplied with.

    Args:
      scale: `spectral`, `sqrt(max(1, fan_out / fan_in))`, with which learning rates carry over between widths;
        `spectral_unclamped` without the maximum; `match_rms_adamw`, `0.2 sqrt(max(fan_in, fan_out))`, with which
        those of AdamW can be used (Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982); or None.
      fan_in, fan_out: sizes of the matrix.

    Raises:
      ValueError: no such scale.
    """
    if scale is None:
        return 1.0
    if scale == "match_rms_adamw":
        return 0.2 * max(fan_in, fan_out) ** 0.5
    if scale in ("spectral", "spectral_unclamped"):
        ratio = fan_out / fan_in
        return (max(1.0, ratio) if scale == "spectral" else ratio) ** 0.5
    raise ValueError(f"no scale {scale!r}; choose from 'spectral', 'spectral_unclamped', 'match_rms_adamw' or None")


def muon_reference(
    gradients: Sequence[np.ndarray],
    *,
    coefficients: Coefficients = "quintic",
    steps: int = 5,
    beta: float = 0.95,
    nesterov: bool = True,
    bias_correction: bool = False,
    scale: Scale = "spectral",
) -> list[np.ndarray]:
    """The updates of `scale_by_muon` for one matrix [fan_in, fan_out] under a sequence of gradients.

    Args:
      gradients: one a step.
      coefficients, steps: see `newton_schulz_reference`.
      beta: decay of the momentum, a mean of gradients.
      nesterov: mix the gradient into its momentum once more.
      bias_correction: divide by what the weights of the mean add up to, momentum and gradient each on its own.
      scale: see `scale_factor`.

    Returns:
      The updates, to be multiplied with minus the learning rate.
    """
    momentum, updates = np.zeros_like(gradients[0], np.float64), []
    for count, gradient in enumerate(gradients, 1):
        momentum = beta * momentum + (1 - beta) * gradient
        here, ahead = (1 - beta**count, 1 - beta ** (count + 1)) if bias_correction else (1.0, 1.0)
        mixed = beta * momentum / ahead + (1 - beta) * gradient / here if nesterov else momentum / here
        update = newton_schulz_reference(mixed, coefficients, steps)
        updates.append(update * scale_factor(scale, *gradient.shape))
    return updates
