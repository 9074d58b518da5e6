"""A training state in torch as the named tensors of a checkpoint: what of each this rank holds, and where it lies.

Fully sharded modules and their optimizers become the tensors of the layout, below their own paths in the state:
`model/blocks/3/up/kernel`, `opt/opt_state/0/mu/blocks/3/up/kernel`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ragged_jax.checkpoint import Checkpoint, join
from ragged_jax.layout import Layout, Placement, TensorSpec, listed, named

from ._dtypes import dtype_name, torch_dtype
from ._fully_shard import runtime_of
from ._homes import Home
from ._item import REST, AsSaved, Item
from ._reduction import Slot
from ._state_names import StateNames, names_of
from ._unit import Unit
from .optim import ShardedOptimizer, StateTensor

_EXTRA = "_extra_state"  # what torch calls it in state dicts
_PYTHON = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


Build = Callable[[], Any]


class State:
    """The tensors of a state.

    Args:
      state: fully sharded modules, their optimizers, tensors, generators and numbers in dicts, lists and tuples.
      state_names: by path of an optimizer in the state, what its state is called.
      checkpoint: that is to be restored, or None. Optimizers are given state where they have none yet.

    Raises:
      TypeError: anything else; all of it named.
      ValueError: an optimizer has parameters of no module in the state, or its state has no name.

    Attributes:
      items: the tensors.
      layouts: by prefix of their names.
      build: when the items' data have been restored, makes the state of them.
    """

    def __init__(self, state: Any, state_names: Mapping[str, StateNames], checkpoint: Checkpoint | None = None):
        self.items: list[Item] = []
        self.layouts: dict[str, Layout] = {}
        self._names, self._checkpoint = state_names, checkpoint
        self._bad: list[str] = []
        self._counters: dict[str, int] = {}
        self._slots: dict[int, tuple[Slot, Unit, Layout]] = {}
        for _, module in _modules("", state):
            runtime = runtime_of(module)
            self._slots |= {id(s.shard): (s, unit, runtime.layout) for unit in runtime.units for s in unit.slots}
        self.build: Build = self._take("", state)
        if self._bad:
            raise TypeError(
                "a checkpoint holds fully sharded modules, their optimizers, tensors, generators and numbers; give "
                "the rest as `metadata`:" + listed(self._bad)
            )
        names = Counter(item.name for item in self.items)
        if checkpoint is None and (twice := [name for name, count in names.items() if count > 1]):
            raise ValueError(f"two tensors of the state have the same name: {named(twice)}")

    def _take(self, name: str, node: Any) -> Build:
        if isinstance(node, Mapping):
            made = {key: self._take(join(name, str(key)), x) for key, x in node.items()}
            return lambda: {key: build() for key, build in made.items()}
        if isinstance(node, list | tuple):
            parts = [self._take(join(name, str(i)), x) for i, x in enumerate(node)]
            make = getattr(node, "_make", type(node))  # of a named tuple
            return lambda: make(build() for build in parts)
        for kind, take in self._KINDS.items():
            if isinstance(node, kind):
                return take(self, name, node)
        if node is not None:
            self._bad.append(f"{name}: {type(node).__name__}")
        return lambda: node

    def _module(self, name: str, module: nn.Module) -> Build:
        (runtime := runtime_of(module)).notice_values()
        for unit in runtime.units:
            if unit.missing and self._checkpoint is None:
                raise ValueError(f"{name}: no values to save yet: {named(sorted(unit.missing))}")
            for slot in unit.slots:
                self._add(name, slot, slot.shard.data, unit, runtime.layout)
        state = module.state_dict(keep_vars=True)
        rest = [self._rest(name, module, *item) for item in state.items() if id(item[1]) not in runtime.slots]

        def build() -> nn.Module:
            for build_one in rest:
                build_one()
            restored = {item.name for item in self.items}
            for missing in (*(unit.missing for unit in runtime.units), runtime.missing_buffers):
                missing -= {path for path in missing if join(name, path) in restored}
            return module

        return build

    def _rest(self, prefix: str, module: nn.Module, path: str, x: Any) -> Build:
        """A buffer, or what a module says of itself."""
        build, (owner, _, last) = self._take(join(prefix, *path.split(".")), x), path.rpartition(".")
        return build if last != _EXTRA else lambda: module.get_submodule(owner).set_extra_state(build())

    def _add(self, prefix: str, slot: Slot, data: torch.Tensor, unit: Unit, layout: Layout) -> None:
        self.layouts[prefix] = layout
        tensor, mine = slot.placement.tensor, _is_first(unit)
        span = slot.slab.local(slot.placement)
        self.items.append(Item(join(prefix, tensor.name), slot.placement, span, data, mine, unit.bucket.name))

    def _whole(self, name: str, x: torch.Tensor, attributes: Mapping[str, str] | None = None) -> torch.Tensor:
        spec = TensorSpec(name, tuple(x.shape), dtype_name(x.dtype))
        data = x.detach().contiguous().reshape(-1)
        item = Item(name, Placement(spec, 0), (0, x.numel()), data, dist.get_rank() == 0, attributes=attributes or {})
        self.items.append(item)
        return data

    def _tensor(self, name: str, x: torch.Tensor) -> Build:
        data = self._whole(name, x)
        return lambda: x if data.data_ptr() == x.data_ptr() else x.copy_(data.view(x.shape))

    def _number(self, name: str, x: Any) -> Build:
        data = self._whole(name, torch.tensor(x, dtype=_PYTHON[type(x)]))
        return lambda: type(x)(data.item())

    def _generator(self, name: str, x: torch.Generator) -> Build:
        data = self._whole(name, x.get_state(), {"torch_generator": x.device.type})
        return lambda: x.set_state(data)

    def _as_saved(self, name: str, x: AsSaved) -> Build:
        value, attributes = x.value, x.attributes
        if self._checkpoint is not None:
            entry = self._checkpoint.entry(name)
            value, attributes = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype)), entry.attributes
        if value is None:
            raise ValueError(f"{name}: AsSaved() has no value; `restore` gives it one")
        data = self._whole(name, value, attributes)
        return lambda: AsSaved(data.view(value.shape), attributes)

    def _optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> Build:
        names = self._names.get(name) or names_of(optimizer)
        if isinstance(optimizer, ShardedOptimizer):
            return self._sharded_optimizer(name, optimizer, names)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if lost := [tuple(p.shape) for p in parameters if id(p) not in self._slots]:
            raise ValueError(
                f"{name}: parameters of shapes {lost} are of no module in the state. Save the optimizer along with "
                "the fully sharded module, and make it after `fully_shard`"
            )
        trained = [p for p in parameters if p.requires_grad or optimizer.state.get(p)]
        unknown = {key for p in trained for key in optimizer.state.get(p, {})} - names.tensors.keys() - {"step"}
        if unknown:
            raise ValueError(f"{name}: nothing says what the states {sorted(unknown)} are called; see `StateNames`")
        states = {p: _state_of(optimizer, p, names, keep=self._checkpoint is not None) for p in trained}
        for key, path in names.tensors.items():
            for p, state in states.items():
                slot, unit, layout = self._slots[id(p)]
                self._add(join(name, path), slot, state[key].reshape(-1), unit, layout)
        counts = self._counts(name, names, [int(state["step"]) for state in states.values() if "step" in state])

        def build() -> torch.optim.Optimizer:
            for state in states.values() if counts else ():
                state["step"].fill_(counts[0].item())
            return optimizer

        return build

    def _sharded_optimizer(self, name: str, optimizer: ShardedOptimizer, names: StateNames) -> Build:
        optimizer.init_state()
        for group in optimizer.param_groups:
            for p in group["params"]:
                for x in optimizer._named(p, state) if (state := optimizer.state.get(p)) else ():
                    self._state_tensor(join(name, names.own), x, optimizer.local(p).home, group.get("map", ""))
        counts = self._counts(name, names, [optimizer.num_steps])

        def build() -> torch.optim.Optimizer:
            optimizer.num_steps = int(counts[0].item()) if counts else 0
            return optimizer

        return build

    def _state_tensor(self, prefix: str, x: StateTensor, home: Home | None, code_map: str) -> None:
        if not x.tensor:
            raise ValueError(f"{prefix}: parameters without a name: give the optimizer module.named_parameters()")
        name = join(prefix, x.moment, x.tensor, "" if x.part == "exact" else x.part)
        spec = TensorSpec(name, x.shape, dtype_name(x.data.dtype))
        signed = "unsigned" if x.moment.endswith("nu") else "signed"
        attributes = {"block": repr(x.block), "code_map": f"{code_map} {signed}"} if x.block else {}
        placement = Placement(spec, 0, axis_order=x.axis_order)
        mine, group = dist.get_rank() == 0, REST
        if home is not None:
            mine, group = _is_first(home.unit), home.unit.bucket.name
            if not x.part:
                self.layouts[join(prefix, x.moment)] = home.runtime.layout
        self.items.append(Item(name, placement, (x.start, x.stop), x.data.reshape(-1), mine, group, attributes))

    def _counts(self, name: str, names: StateNames, steps: list[int]) -> list[torch.Tensor]:
        paths = {join(name, path): kind for path, kind in names.counters.items()} if steps else {}
        if self._checkpoint is not None:
            there = {path: kind for path, kind in paths.items() if path in self._checkpoint}
            paths = there or dict([*paths.items()][:1])
        else:
            paths = {path: kind for path, kind in paths.items() if self._is_new_counter(path, max(steps))}
        count = torch.tensor(max(steps, default=0))
        return [self._whole(path, count.to(torch_dtype(kind), copy=True)) for path, kind in paths.items()]

    def _is_new_counter(self, path: str, steps: int) -> bool:
        """Of two optimizers that are one in JAX, the first saves the counters that they share."""
        if self._counters.setdefault(path, steps) != steps:
            raise ValueError(f"{path}: optimizers have taken {self._counters[path]} and {steps} steps")
        return path not in [item.name for item in self.items]

    _KINDS: Mapping[Any, Callable] = {
        nn.Module: _module,
        torch.optim.Optimizer: _optimizer,
        torch.Tensor: _tensor,
        torch.Generator: _generator,
        AsSaved: _as_saved,
        bool | int | float | complex: _number,
    }


def _is_first(unit: Unit) -> bool:
    """Whether this rank is the first of those that hold the same part."""
    return unit.groups.replicate is None or dist.get_rank(unit.groups.replicate) == 0


def _state_of(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, names: StateNames, keep: bool
) -> dict[str, torch.Tensor]:
    """A parameter's state, as it would be before the first step where there is none."""
    if state := optimizer.state.get(parameter):
        return state
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    on_device = group.get("capturable") or group.get("fused")
    state = {"step": torch.zeros((), device=parameter.device if on_device else "cpu")} if names.counters else {}
    state |= {key: torch.zeros_like(parameter.data) for key in names.tensors}
    if keep:
        optimizer.state[parameter] = state
    return state


def _modules(name: str, node: Any) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(node, nn.Module):
        yield name, node
    elif isinstance(node, Mapping):
        for key, x in node.items():
            yield from _modules(join(name, str(key)), x)
    elif isinstance(node, list | tuple):
        for i, x in enumerate(node):
            yield from _modules(join(name, str(i)), x)
