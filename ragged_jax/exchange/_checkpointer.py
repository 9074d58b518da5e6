"""`Checkpointer`: saves a JAX training state while the training goes on, and restores it on other devices."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from ..checkpoint import BaseCheckpointer, Checkpoint, CheckpointError, Part, TensorEntry, check_wanted, in_threads
from ..fsdp import check_same_on_all_processes
from ..fsdp._check import has_values
from ..layout import Layout
from ._matched import owners_hint
from ._state import PYTHON, items_of, layouts_of
from ._transfer import keep_values, parts_of, restored

T = TypeVar("T")


class Checkpointer(BaseCheckpointer):
    """The checkpoints of a JAX training run.

    A state is any pytree: sharded models and optimizers, plain arrays of any sharding, random keys, numpy arrays and
    Python numbers. It is saved by tensor, without padding, so that it can be restored on any number of devices, with
    any layout, with layers stacked or in a list, and read as numpy arrays without JAX.

    Args:
      directory: that holds the checkpoints, the same for all processes.
      keep: how many to leave; older ones are removed when a new one is complete. None: all.
      background: whether `save` returns when the state has been copied to the host, and a thread does the writing.
      timeout: seconds that processes wait for each other before a save fails.

    With several processes, all of them make one and call its methods alike.

    Example:
      >>> import tempfile
      >>> import jax, jax.numpy as jnp
      >>> import ragged_jax as rj
      >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
      >>> params = rj.shard_tree({"w": jnp.ones((3, 5))}, mesh, axis="fsdp")
      >>> with Checkpointer(tempfile.mkdtemp(), keep=2) as checkpointer:
      ...     checkpointer.save(100, {"params": params, "key": jax.random.key(0)}, metadata={"position": 4096})
      ...     checkpointer.wait()
      ...     state = checkpointer.restore({"params": params, "key": jax.random.key(1)})
      >>> rj.full_params(state["params"])["w"].sum()
      np.float32(15.0)
    """

    @property
    def _rank(self) -> int:
        return jax.process_index()

    @property
    def _num_ranks(self) -> int:
        return jax.process_count()

    def _from_first(self, value: np.ndarray) -> np.ndarray:
        return from_first(value)

    def _contents(self, state: Any) -> tuple[Mapping[str, TensorEntry], Iterable[Part], Mapping[str, Layout]]:
        items, _ = items_of(state)
        has_values(item.leaf for item in items)
        tensors = {n: t for item in items for n, t in item.tensors().items()}
        return tensors, list(parts_of(items, self._rank, copy=self._background)), layouts_of(items)

    def restore(self, like: T, step: int | None = None, *, cast: bool = False, fewer_layers: bool = False) -> T:
        """A state from a checkpoint.

        Args:
          like: a state of the same structure, on the devices and with the layout that are wanted now. Its leaves may
            be arrays or `jax.ShapeDtypeStruct`; their values do not matter, and they are not changed. A part of what
            was saved will do.
          step: which checkpoint; by default the latest.
          cast: whether tensors that were saved with another dtype are converted; otherwise they are an error.
          fewer_layers: whether `like` may lack some of the layers of a list or a stack that was saved: it gets those
            of the same numbers. Otherwise they are an error.

        Raises:
          FileNotFoundError: there is no checkpoint, or not of this step.
          CheckpointError: it is damaged, or not of such a state; everything that is wrong is named.
          ValueError: of several processes, one wants another state or could not read its part; the same on all.
        """
        how: dict[str, Any] = {"cast": cast, "fewer_layers": fewer_layers, "timeout": self._timeout}
        return restore_from(lambda _: self.open(step), like, before=self.wait, **how)


def restore_from(
    opened: Callable[[Mapping[str, TensorEntry]], Checkpoint],
    like: T,
    *,
    cast: bool = False,
    fewer_layers: bool = False,
    timeout: float = 600.0,
    before: Callable[[], object] = lambda: None,
    stays: Callable[[str], bool] = lambda name: False,
) -> T:
    """A state from a checkpoint of any kind; see `Checkpointer.restore`.

    What the processes want is compared before anything is read, and no process goes on when another one has failed.

    Args:
      opened: opens the checkpoint, given the tensors that are wanted.
      before: what comes first and may fail.
      stays: whether a tensor of this name is not asked for, and stays as it is in `like`.
    """
    same = partial(check_same_on_all_processes, what="the states to restore", timeout_s=timeout)

    @contextmanager
    def together(what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            same({what: f"{type(error).__name__}: {error}"})
            raise
        same({what: "yes"})

    with ExitStack() as stack:
        with together("known"):  # on its own: to open may take all processes
            before()
            items, build = items_of(like)
            keep_values(items, stays)
            wanted = {n: t for item in items for n, t in item.tensors().items() if not stays(n)}
        with together("opened"):
            checkpoint = stack.enter_context(opened(wanted))
        same({name: f"{t.dtype}{list(t.shape)} {t.attributes or ''}".strip() for name, t in wanted.items()})
        with together("restored"):
            try:
                numbers = [item.name for item in items if type(item.leaf) in PYTHON]
                check_wanted(checkpoint, wanted, cast=cast, fewer_layers=fewer_layers, numbers=numbers)
            except CheckpointError as error:
                raise CheckpointError(f"{error}{owners_hint([str(error)])}") from None
            slabs = [at for at, item in enumerate(items) if item.held is not None]
            done = in_threads(lambda at: restored(checkpoint, items[at], cast, stays), slabs)
            rest = (at for at in range(len(items)) if at not in done)  # here, where the context mesh is known
            done |= {at: restored(checkpoint, items[at], cast, stays) for at in rest}
    return build([done[at] for at in range(len(items))])


def from_first(value: np.ndarray) -> np.ndarray:
    """What the first process says, on all of them."""
    return np.asarray(multihost_utils.broadcast_one_to_all(value)) if jax.process_count() > 1 else value
