"""A fully sharded module's parameters and its optimizer's state as ragged tensors: for DCP and other tools."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from ragged_jax import layout

from ._fully_shard import runtime_of
from ._geometry import order_of
from ._placement import RaggedShard
from ._ragged_tensor import RaggedTensor
from ._reduction import Slot
from ._state import state_of


def ragged_state_dict(module: nn.Module, mesh: DeviceMesh | None = None) -> dict[str, torch.Tensor]:
    """The state dict of a fully sharded module, its parameters as ragged tensors in their whole shapes.

    They share memory with the module: what is loaded into them, as `torch.distributed.checkpoint.load` does, is
    loaded into the module. Tied parameters are there under every name, and buffers as they are.

    Args:
      module: a fully sharded module.
      mesh: by default that of `fully_shard`.

    Example:
      `torch.distributed.checkpoint.save(tb.ragged_state_dict(model), checkpoint_id=path)`
    """
    mesh = mesh or _mesh(module)
    slots = runtime_of(module).slots.values()
    made = {slot: _ragged(module, slot, slot.shard.detach(), mesh) for slot in slots}
    return state_of(module, made.__getitem__)


def ragged_optimizer_state_dict(
    module: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None = None
) -> dict[str, Any]:
    """The state of an optimizer of a fully sharded module, by parameter name, one dict for each.

    What has an entry for each of this rank's elements of the parameter, such as a moment, is a ragged tensor that
    shares memory with it. Other tensors and numbers are as they are. Of a tied parameter the first name is used.

    Raises:
      ValueError: the optimizer has parameters that are not the module's, as when it was made before
        `fully_shard`, or state which is neither an entry for each element nor a scalar.
    """
    mesh = mesh or _mesh(module)
    slots = runtime_of(module).slots
    names = {id(x): name for name, x in module.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if foreign := [tuple(p.shape) for p in parameters if id(p) not in names]:
        raise ValueError(f"the optimizer has parameters that are not the module's, of shapes {foreign}; make it last")
    made: dict[str, Any] = {}
    for p in parameters:
        if id(p) not in slots or p not in optimizer.state:
            continue
        state = made[names[id(p)]] = dict(optimizer.state[p])
        for key, value in state.items():
            if torch.is_tensor(value) and value.shape == p.shape:
                state[key] = _ragged(module, slots[id(p)], value, mesh)
            elif torch.is_tensor(value) and value.ndim:
                raise ValueError(
                    f"{key} of {names[id(p)]} has a shape {tuple(value.shape)}, the parameter {p.numel()} elements "
                    "here: it is neither an entry for each element nor a scalar, so nothing says whose part it is"
                )
    return made


def _ragged(module: nn.Module, slot: Slot, local: torch.Tensor, mesh: DeviceMesh) -> RaggedTensor:
    """As torch sees it, which may be another order of the dims than the layout's."""
    shape, strides = tuple(slot.whole.shape), slot.whole.stride()
    numels = [high - low for low, high in runtime_of(module).layout.ranges(slot.name)]
    stored_shape = tuple(shape[dim] for dim in order_of(shape, strides))
    ragged = RaggedShard.of(layout.RaggedShard.from_numels(stored_shape, numels))
    placements = [Replicate()] * (mesh.ndim - 1) + [ragged]
    return RaggedTensor.from_local(local, mesh, placements, shape=shape, stride=strides)


def _mesh(module: nn.Module) -> DeviceMesh:
    unit = runtime_of(module).units[0]
    return unit.groups.mesh or DeviceMesh.from_group(unit.groups.shard, unit.device.type)
