"""Values for a module that was made on `meta`: layer by layer, so that no more than one layer is ever whole."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ._agreement import check_same
from ._fully_shard import runtime_of
from ._reduction import Slot
from ._runtime import Runtime

Init = Callable[[nn.Module], object]
_METHODS = ("reset_parameters", "_reset_parameters")  # the second is what MultiheadAttention calls it


def init_parameters(module: nn.Module, init: Init | None = None) -> None:
    """Initialises what has no values yet of a fully sharded module that was made on `meta`.

    Each submodule in turn, children first, is given its own parameters whole, is initialised, and every rank keeps
    its part. All ranks draw the same numbers, so seed them alike. With layers that initialise themselves in
    `reset_parameters`, as torch's do, the values are those of the module made with the same seed on one device.

    Args:
      module: the fully sharded module.
      init: initialises the parameters and buffers that a module has itself, not those of its children; by default
        its `reset_parameters`.

    Raises:
      TypeError: submodules that cannot initialise themselves, when there is no `init`; all of them named.
      ValueError: the ranks' random generators differ, or `init` left something without a value.

    Example:
      >>> import torch.distributed as dist
      >>> import torch_bridge as tb
      >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
      >>> with torch.device("meta"):
      ...     model = nn.Linear(3, 2)
      >>> tb.init_parameters(tb.fully_shard(model))
      >>> model(torch.ones(3)).shape
      torch.Size([2])
      >>> dist.destroy_process_group()
    """
    (runtime := runtime_of(module)).notice_values()
    slots = {(id(m), name): slot for unit in runtime.units for slot in unit.slots for m, name in slot.uses}
    missing = {name for unit in runtime.units for name in unit.missing}
    waiting = [
        (path, child)
        for path, child in _children_first("", module)
        if any(slots[id(child), name].placement.tensor.name in missing for name in _own(child, slots))
        or any(_join(path, name) in runtime.missing_buffers for name in child._buffers)
    ]
    helpless = [path or "(root)" for path, child in waiting if init is None and _method(child) is None]
    if helpless:
        raise TypeError(
            f"these modules have parameters or buffers and no reset_parameters: {', '.join(helpless)}. "
            "Give `init_parameters` a function that initialises them"
        )
    check_same("what the ranks would draw", _seeds(), runtime.units[0].groups, runtime.units[0].device)
    for path, child in waiting:
        _init_one(runtime, path, child, {n: slots[id(child), n] for n in _own(child, slots)}, missing, init)
    for unit in runtime.units:
        unit.missing &= missing


def _init_one(
    runtime: Runtime, path: str, child: nn.Module, own: dict[str, Slot], missing: set[str], init: Init | None
) -> None:
    device = runtime.units[0].device
    wholes = {}
    for name, slot in own.items():
        whole = torch.empty(slot.seen.shape, dtype=slot.shard.dtype, device=device)
        wholes[name] = whole.fill_(float("nan")) if whole.is_floating_point() else whole.zero_()
        child._parameters[name] = nn.Parameter(whole, slot.shard.requires_grad)
    try:
        (init or _method(child))(child)  # pyright: ignore[reportOptionalCall]
        made: dict[str, Any] = {name: child._parameters[name] for name in own}
    finally:
        for slot in own.values():
            slot.show(slot.shard)
    left = [_join(path, name) for name, x in made.items() if x.is_floating_point() and x.isnan().any()]
    if left:
        raise ValueError(f"{type(child).__name__} was initialised, but these have no values: {', '.join(left)}")
    for name, slot in own.items():
        if slot.name in missing:  # a tied parameter keeps what its first use gave it
            slot.take(made[name])
            missing.discard(slot.name)
    runtime.missing_buffers -= {_join(path, name) for name in child._buffers}


def _method(child: nn.Module) -> Init | None:
    found = next((m for m in _METHODS if callable(getattr(type(child), m, None))), None)
    return None if found is None else lambda module: getattr(module, found)()


def _own(child: nn.Module, slots: dict[tuple[int, str], Slot]) -> list[str]:
    return [name for name in child._parameters if (id(child), name) in slots]


def _children_first(path: str, module: nn.Module, seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for name, child in module.named_children():
        yield from _children_first(_join(path, name), child, seen)
    yield path, module


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _seeds() -> dict[str, str]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    digest = hashlib.sha256(b"".join(state.numpy().tobytes() for state in states)).hexdigest()[:16]
    return {"random generators, which `torch.manual_seed` sets alike": digest}
