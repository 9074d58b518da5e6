"""Where a parameter that an optimizer is given comes from: which tensor of which sharded module it is a part of."""

import weakref
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ._reduction import Slot
from ._runtime import Runtime
from ._unit import Unit


@dataclass(frozen=True, eq=False)
class Home:
    """What a rank's part of a parameter belongs to.

    Attributes:
      runtime: of the sharded module.
      unit: the bucket.
      slot: the parameter in it.
    """

    runtime: Runtime
    unit: Unit
    slot: Slot


_PLACES = WeakTensorKeyDictionary()  # by parameter: its runtime, weakly, and where it is there


def register(runtime: Runtime) -> None:
    """Makes the parameters of a sharded module known to `home_of`."""
    for i, unit in enumerate(runtime.units):
        for j, slot in enumerate(unit.slots):
            _PLACES[slot.shard] = weakref.ref(runtime), i, j


def home_of(parameter: torch.Tensor) -> Home | None:
    """Where a parameter comes from; None for one that no `fully_shard` made."""
    if (place := _PLACES.get(parameter)) is None or (runtime := place[0]()) is None:
        return None
    unit = runtime.units[place[1]]
    return Home(runtime, unit, unit.slots[place[2]])
