"""What optimizers' state is called in checkpoints: a table, so that another framework's names are data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

_HEAD = "opt_state"


@dataclass(frozen=True)
class StateNames:
    """Where a checkpoint has the state of an optimizer, below the optimizer's own path.

    The tables here say where JAX jobs have it: `flax.nnx.Optimizer(model, optax.adamw(...))` has its first moments
    at `opt_state/0/mu/TENSOR` and its counter at `opt_state/0/count`.

    Attributes:
      tensors: by torch's key of a parameter's state, the path ahead of the tensors' names.
      counters: paths of the number of steps taken, with their dtypes. All are written; one will do to read.

    Example:
      >>> ADAMW.at("opt_state/1").tensors["exp_avg"]  # of `optax.chain(optax.clip(1.0), optax.adamw(...))`
      'opt_state/1/0/mu'
    """

    tensors: Mapping[str, str]
    counters: Mapping[str, str] = field(default_factory=dict)

    def at(self, path: str) -> "StateNames":
        """The same for a state elsewhere than at `opt_state`: in a chain, or (`""`) optax's state itself."""

        def moved(name: str) -> str:
            head, *rest = name.split("/")
            return "/".join([*filter(None, [path]), *rest]) if head == _HEAD else name

        tensors = {key: moved(name) for key, name in self.tensors.items()}
        return replace(self, tensors=tensors, counters={moved(name): kind for name, kind in self.counters.items()})


ADAMW = StateNames(
    {"exp_avg": "opt_state/0/mu", "exp_avg_sq": "opt_state/0/nu"},
    {"opt_state/0/count": "int32", "opt_state/2/count": "int32", "step": "uint32"},  # the second is a schedule's
)
ADAM = replace(ADAMW, counters={"opt_state/0/count": "int32", "opt_state/1/count": "int32", "step": "uint32"})

OF: dict[type[torch.optim.Optimizer], StateNames] = {torch.optim.AdamW: ADAMW, torch.optim.Adam: ADAM}


def names_of(optimizer: torch.optim.Optimizer) -> StateNames:
    """The table for an optimizer.

    Raises:
      TypeError: there is none.
    """
    for kind, names in OF.items():
        if isinstance(optimizer, kind):
            return names
    raise TypeError(
        f"nothing says what the state of {type(optimizer).__name__} is called in a checkpoint; give a `StateNames`: "
        "Checkpointer(..., state_names={PATH: StateNames(...)})"
    )
