"""`Checkpointer`: saves a torch training state while the training goes on, and restores it on any number of ranks."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ragged_jax.checkpoint import (
    BaseCheckpointer,
    Checkpoint,
    Part,
    Run,
    TensorEntry,
    check_wanted,
    in_threads,
)
from ragged_jax.layout import Layout

from ._dtypes import torch_dtype
from ._item import Item
from ._items import State
from ._state_names import StateNames


class Checkpointer(BaseCheckpointer):
    """The checkpoints of a training run in torch, of the same format as those of `ragged_jax.Checkpointer`.

    A state is a dict (or dicts and lists in each other) of fully sharded modules, their optimizers, tensors,
    `torch.Generator`s and numbers. Each rank writes what it holds, and reads its own part and no more than the rest
    of a chunk (256 KiB) at both ends of each range. What a JAX job saved restores here, and the other way round,
    where names and shapes of the tensors are the same; the layouts need not be.

    Of tensors and generators that are not sharded the first rank's are saved, and all ranks get them back.

    Args:
      directory: that holds the checkpoints, the same for all ranks.
      keep: how many to leave; older ones are removed when a new one is complete. None: all.
      background: whether `save` returns when the state has been copied to the host, and a thread does the writing.
      timeout: seconds that ranks wait for each other before a save fails.
      state_names: by path of an optimizer in the state, what its state is called, where that is not as in
        `flax.nnx.Optimizer(model, optax.adamw(...))`.

    All ranks make one and call its methods alike.

    Example:
      >>> import tempfile
      >>> import torch.distributed as dist
      >>> import torch_bridge as tb
      >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
      >>> model = tb.fully_shard(torch.nn.Linear(3, 2))
      >>> optimizer = torch.optim.AdamW(model.parameters())
      >>> with Checkpointer(tempfile.mkdtemp(), keep=2) as checkpointer:
      ...     checkpointer.save(100, {"model": model, "opt": optimizer}, metadata={"position": 4096})
      ...     state = checkpointer.restore({"model": model, "opt": optimizer})
      >>> state["model"] is model
      True
      >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int | None = None,
        background: bool = True,
        timeout: float = 600.0,
        state_names: Mapping[str, StateNames] | None = None,
    ):
        super().__init__(directory, keep=keep, background=background, timeout=timeout)
        self._state_names = dict(state_names or {})

    @property
    def _rank(self) -> int:
        return dist.get_rank()

    @property
    def _num_ranks(self) -> int:
        return dist.get_world_size()

    def _from_first(self, value: np.ndarray) -> np.ndarray:
        said = [value]
        dist.broadcast_object_list(said, src=0)
        return said[0]

    def _contents(self, state: Any) -> tuple[Mapping[str, TensorEntry], Iterable[Part], Mapping[str, Layout]]:
        found = State(state, self._state_names)
        parts = _parts([item for item in found.items if item.mine], copy=self._background)
        return {item.name: item.entry for item in found.items}, parts, found.layouts

    def restore(self, state: Any, step: int | None = None, *, cast: bool = False, fewer_layers: bool = False) -> Any:
        """Fills a state from a checkpoint, in place.

        Args:
          state: of the same structure as what was saved, or a part of it. Modules, optimizers, tensors and
            generators are written to; their values do not matter. Optimizers get their state as if they had run.
          step: which checkpoint; by default the latest.
          cast: whether tensors that were saved with another dtype are converted; otherwise they are an error.
          fewer_layers: whether the state may lack some of the layers of a list or a stack that was saved: it gets
            those of the same numbers. Otherwise they are an error.

        Returns:
          The state, with the numbers that were saved.

        Raises:
          FileNotFoundError: there is no checkpoint, or not of this step.
          CheckpointError: it is damaged, or not of such a state; everything that is wrong is named.
        """
        with self.open(step) as checkpoint:
            found = State(state, self._state_names, checkpoint)
            return restored(checkpoint, found, cast=cast, fewer_layers=fewer_layers)


def restored(checkpoint: Checkpoint, found: State, *, cast: bool, fewer_layers: bool = False) -> Any:
    """A state, filled from an open checkpoint of any kind; see `Checkpointer.restore`."""
    wanted = {item.name: item.entry for item in found.items}
    check_wanted(checkpoint, wanted, cast=cast, fewer_layers=fewer_layers)
    groups: dict[str, list[Item]] = {}
    for item in found.items:
        groups.setdefault(item.group, []).append(item)
    with torch.no_grad():
        in_threads(lambda group: [_read(checkpoint, item) for item in groups[group]], list(groups))
        return found.build()


def _parts(items: Sequence[Item], *, copy: bool) -> list[Part]:
    """What this rank saves. From a device, all copies are on their way before the first is waited for."""
    hosts = [_on_host(item.data, copy) for item in items]
    for device in {item.data.device for item in items if item.data.device.type != "cpu"}:
        torch.accelerator.synchronize(device)  # which need not be the current one
    return [
        Part(item.name, (item.span,), _bytes(host), item.group)
        for item, host in zip(items, hosts, strict=True)
        if item.data.numel()
    ]


def _on_host(data: torch.Tensor, copy: bool) -> torch.Tensor:
    if data.device.type == "cpu":
        return data.clone() if copy else data
    return torch.empty_like(data, device="cpu", pin_memory=True).copy_(data, non_blocking=True)


def _read(checkpoint: Checkpoint, item: Item) -> None:
    low, high = item.span
    if low == high:
        return
    shape = item.placement.tensor.shape
    dtype = torch_dtype(checkpoint.entry(checkpoint.sources(item.name, shape)[0].name).dtype)
    straight = item.data.device.type == "cpu" and item.data.dtype == dtype
    host = item.data if straight else torch.empty(high - low, dtype=dtype, pin_memory=item.data.is_cuda)
    checkpoint.read_runs(item.name, [Run(low, 0, high - low)], _bytes(host), item.placement)
    if not straight:
        item.data.copy_(host)


def _bytes(data: torch.Tensor) -> np.ndarray:
    """The memory of a 1-D tensor; numpy lacks some of the dtypes."""
    return data.view(torch.uint8).numpy()
