"""What the optimizers here have in common: parameters with names, and state that moves by name."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from ragged_jax.layout import Block, Placement, TensorSpec, listed

from .._dtypes import dtype_name
from .._homes import Home, home_of


@dataclass(frozen=True, eq=False)
class Local:
    """What this process holds of a tensor that an optimizer updates.

    Attributes:
      placement: the tensor, and how it is stored.
      start, stop: which of its elements these are, in stored order.
      home: which sharded module it belongs to; None for an ordinary, whole tensor.
    """

    placement: Placement
    start: int
    stop: int
    home: Home | None

    @property
    def name(self) -> str:
        """Its path, with slashes; empty where neither a sharded module nor the parameter group says it."""
        return self.placement.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.placement.tensor.shape


@dataclass(frozen=True, eq=False)
class StateTensor:
    """A part of a tensor of optimizer state, as a checkpoint would name it.

    Attributes:
      tensor: the path of the parameter.
      moment: which moment, by its path in the state of the optax transform: `0/mu`, `0/nu`.
      part: of a moment in 8 bits `codes` or `scales`, or `exact` where it has float32; else empty.
      shape: of the whole. Scales are 1-D, one for each block of the parameter, in its flat order.
      start, stop: which of its elements these are, in stored order.
      axis_order: for a tensor that is stored transposed, its dims in the order in which they are stored.
      block: in which a moment is quantised; None for others.
      data: these elements, 1-D. Writing to it writes the state.
    """

    tensor: str
    moment: str
    part: str
    shape: tuple[int, ...]
    start: int
    stop: int
    axis_order: tuple[int, ...] | None
    block: Block | None
    data: torch.Tensor

    @property
    def name(self) -> str:
        """Of the tensor of state: `0/mu/blocks/3/up/weight/codes`. What is exact is called as in AdamW."""
        return "/".join(filter(None, (self.moment, self.tensor, "" if self.part == "exact" else self.part)))


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of sharded and of ordinary parameters.

    Subclasses say what state a parameter has and how it is updated. All state is element-wise or by block, and lies
    where the parameters lie.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any]):
        self._locals: dict[torch.Tensor, Local] = {}
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"a copy of {type(self).__name__} would not know where its parameters lie; make another one for the "
            "copied parameters and give it `state_dict()`"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._know(self.param_groups[-1])
        self._check(self.param_groups[-1])

    def _know(self, group: dict[str, Any]) -> None:
        names = group.get("param_names") or [""] * len(group["params"])
        for p, name in zip(group["params"], names, strict=True):
            self._locals[p] = local_of(p, name)

    def _check(self, group: dict[str, Any]) -> None:
        """Raises ValueError where parameters cannot be updated, all of them named."""

    def _make_state(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        """Makes the state of parameters that have none."""
        raise NotImplementedError

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        """Updates parameters that have a gradient and state."""
        raise NotImplementedError

    def _named(self, p: torch.Tensor, state: dict[str, torch.Tensor]) -> Iterable[StateTensor]:
        """The state of a parameter, by name."""
        raise NotImplementedError

    def local(self, p: torch.Tensor) -> Local:
        """What a parameter of this optimizer is."""
        return self._locals[p]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates all parameters that have a gradient.

        Args:
          closure: computes the loss and its gradients again, and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_all()
        return loss

    def _update_all(self) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            self._init_state(group, params)
            self._update(group, params)

    def _init_state(self, group: dict[str, Any], params: Iterable[torch.Tensor]) -> None:
        new = [p for p in params if not self.state[p]]
        if sparse := [self._locals[p].name for p in new if p.grad is not None and p.grad.is_sparse]:
            raise RuntimeError(f"{type(self).__name__} takes no sparse gradients: {', '.join(sparse)}")
        if new:
            self._make_state(group, new)
            for p in new:
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32)

    @torch.no_grad()
    def init_state(self) -> None:
        """Makes the state of every parameter that is trained, as the first step would."""
        for group in self.param_groups:
            self._init_state(group, [p for p in group["params"] if p.requires_grad])

    def named_state(self) -> dict[str, StateTensor]:
        """This process's state, by the names of a checkpoint: what to save, and where to load it.

        State that is not there yet is made. How many steps were taken is `num_steps`.

        Raises:
          ValueError: parameters without a name; give the optimizer `module.named_parameters()`.

        Example:
          >>> from torch_bridge.optim import AdamW
          >>> list(AdamW(torch.nn.Linear(3, 2).named_parameters()).named_state())
          ['0/mu/weight', '0/nu/weight', '0/mu/bias', '0/nu/bias']
        """
        self.init_state()
        found = [x for p, state in self.state.items() for x in self._named(p, state)]
        if any(not x.tensor for x in found):
            raise ValueError("parameters without a name: give the optimizer module.named_parameters()")
        return {x.name: x for x in found}

    @property
    def num_steps(self) -> int:
        """Steps taken. Parameters that never had a gradient have no say.

        Raises:
          ValueError: parameters have taken different numbers; what JAX keeps is one for all.
        """
        steps = {int(state["step"]) for state in self.state.values()} - {0}
        if len(steps) > 1:
            raise ValueError(f"parameters have taken different numbers of steps: {sorted(steps)}")
        return next(iter(steps), 0)

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self.init_state()
        for state in self.state.values():
            state["step"].fill_(value)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of `state_dict` of the same optimizer on the same rank. Dtypes of the state stay its own.

        Raises:
          ValueError: groups or sizes that differ; all of them named.
        """
        super().load_state_dict({**state_dict, "state": {}})
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        faults = []
        for group in self.param_groups:
            saved = {p: state_dict["state"].get(next(ids)) for p in group["params"]}
            saved = {p: values for p, values in saved.items() if values}
            self._init_state(group, saved)
            for p, values in saved.items():
                own = self.state[p]
                sizes = [{key: tuple(x.shape) for key, x in state.items()} for state in (own, values)]
                if sizes[0] != sizes[1]:
                    faults.append(f"{self._locals[p].name}: {sizes[1]}, here {sizes[0]}")
                    continue
                for key, x in values.items():
                    own[key].copy_(x)
        if faults:
            raise ValueError(
                "this state is of other options, or of another rank or number of ranks (a checkpoint by name can be "
                "moved, see `named_state`):" + listed(faults)
            )


def local_of(p: torch.Tensor, name: str) -> Local:
    if home := home_of(p):
        slot = home.slot
        return Local(slot.placement, *slot.slab.local(slot.placement), home)
    spec = TensorSpec(name.replace(".", "/"), tuple(p.shape), dtype_name(p.dtype))
    return Local(Placement(spec, 0), 0, p.numel(), None)


def flat(x: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor in order; of another one, a copy of them."""
    return x.detach().reshape(-1)


def by_step(states: Iterable[tuple[torch.Tensor, dict[str, torch.Tensor]]]) -> dict[int, list[torch.Tensor]]:
    """Parameters by the number of steps they have taken, this one included, which is counted."""
    states, groups = list(states), {}
    if states:
        torch._foreach_add_(  # pyright: ignore[reportPrivateImportUsage]
            [state["step"] for _, state in states], 1
        )
    for p, state in states:
        groups.setdefault(int(state["step"]), []).append(p)
    return groups
