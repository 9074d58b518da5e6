"""Runs of units: what devices copy in an exchange, as tables that are far smaller than what is copied.

Index tables with an entry for each element would be as large as the model. Exchanges are counted in *units* instead:
the largest run of elements that every range, on both sides, is a multiple of (a row, where tensors are cut by rows).
What a device copies is a list of runs of units, which it expands to one index a unit when it needs it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from ..layout import Segment
from ..planner import HardwareProfile, hardware

_PROFILES = {"cpu": "cpu", "tpu": "v5p"}


@dataclass(frozen=True, eq=False)
class Runs:
    """For each device, which unit of a pool each unit of a buffer is.

    Attributes:
      size: of the buffer, in units.
      pool: of what is copied from; an index beyond it means nothing, and reads as zero.
      starts, shifts: of shape [devices, most runs]; unit `u` of the run that starts at or last before it is unit
        `u + shift` of the pool.
    """

    size: int
    pool: int
    starts: np.ndarray
    shifts: np.ndarray

    @classmethod
    def of(cls, size: int, pool: int, num_devices: int, copies: Iterable[tuple[int, int, int, int]]) -> "Runs":
        """From copies `(device, to, from, units)`."""
        by_device: list[list[tuple[int, int, int]]] = [[] for _ in range(num_devices)]
        for device, to, source, numel in copies:
            by_device[device].append((to, source, numel))
        table = [_runs(sorted(device), size, pool) for device in by_device]
        width = max(map(len, table), default=1)
        full = np.array([[*runs, *[(size, pool)] * (width - len(runs))] for runs in table], np.int32)
        return cls(size, pool, full[..., 0], full[..., 1])

    @cached_property
    def _key(self) -> tuple:
        return self.size, self.pool, self.starts.shape, self.starts.tobytes(), self.shifts.tobytes()

    def __hash__(self):
        return hash(self._key)

    def __eq__(self, other):
        return isinstance(other, Runs) and self._key == other._key


def _runs(copies: list[tuple[int, int, int]], size: int, pool: int) -> list[tuple[int, int]]:
    """`(start, shift)` of one device, gaps included."""
    runs, end = [], 0
    for to, source, numel in copies:
        if to > end:
            runs.append((end, pool))
        if not runs or to > end or runs[-1][1] != source - to:
            runs.append((to, source - to))
        end = to + numel
    return [*runs, (end, pool)] if end < size or not runs else runs


def granule_of(held: Iterable[Iterable[Segment]], wanted: Iterable[Iterable[Segment]], sizes: Iterable[int]) -> int:
    """Elements of a unit: what all ranges, and these other sizes, are multiples of."""
    places = {n for device in (*held, *wanted) for s in device for n in (s.start, s.stop, s.offset)}
    return math.gcd(*places, *sizes) or 1


def in_units(devices: Iterable[Iterable[Segment]], granule: int) -> list[list[Segment]]:
    """Ranges of elements as ranges of units."""
    return [
        [Segment(s.tensor, s.start // granule, s.stop // granule, s.buffer, s.offset // granule) for s in device]
        for device in devices
    ]


def profile_of(mesh: Mesh) -> HardwareProfile:
    """What the planner takes a mesh's devices for."""
    return hardware(_PROFILES.get(mesh.devices.flat[0].platform, "h100"))


def places(runs: Runs, axis: str, start: jax.Array | int, size: int) -> jax.Array:
    """Inside `shard_map`: which unit of the pool each of `size` units of this device's buffer is, from `start` on."""
    at = lax.axis_index(axis)
    here = start + jnp.arange(size, dtype=jnp.int32)
    starts, shifts = jnp.asarray(runs.starts)[at], jnp.asarray(runs.shifts)[at]
    return here + shifts[jnp.searchsorted(starts, here, side="right") - 1]


def taken(runs: Runs, pool: jax.Array, axis: str) -> jax.Array:
    """Inside `shard_map`: `[size, granule]` units of the pool, zero where the runs have nothing."""
    return jnp.take(pool, places(runs, axis, 0, runs.size), axis=0, mode="fill", fill_value=0)
