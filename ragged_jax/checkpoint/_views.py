"""Checkpoints of other kinds, read as if they were ours: row by row, by other names."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..layout import Link, NameMap, Placement, TensorSpec, listed, row_major_index
from ._boxes import fill
from ._bytes import raw_dtype
from ._checkpoint import Checkpoint
from ._manifest import CheckpointError, Manifest, TensorEntry
from ._runs import Run
from ._shards import join
from ._sources import Source

_WINDOW_NBYTES = 4 << 20
_MAX_LAYERS = 100_000
_PICKED = 1 << 20  # elements whose places are computed one by one at a time


class RowMajor(Checkpoint):
    """A checkpoint whose tensors are made of others that are read as ranges of row-major elements.

    Attributes:
      aliases: other names of tensors, by that name.
    """

    def __init__(self, path: Path, manifest: Manifest, aliases: Mapping[str, str] | None = None):
        self.path, self.manifest, self.aliases = path, manifest, dict(aliases or {})

    @abstractmethod
    def links(self, name: str) -> Sequence[Link]:
        """What a tensor is made of."""

    @abstractmethod
    def read_source(self, source: str, first: int, out: np.ndarray) -> None:
        """Fills a flat array with elements of what a tensor is made of, in row-major order.

        Args:
          source: its name.
          first: its element that belongs at `out[0]`.
          out: flat and contiguous, of unsigned integers or bytes of the size of the elements.
        """

    def window(self, source: str) -> int:
        """How many bytes of it are read at a time."""
        return _WINDOW_NBYTES

    def entry(self, name: str) -> TensorEntry:
        return super().entry(self.aliases.get(name, name))

    def sources(self, name: str, shape: tuple[int, ...]) -> list[Source]:
        return super().sources(self.aliases.get(name, name), shape)

    def read_runs(
        self, name: str, wanted: Sequence[Run], out: np.ndarray, placement: Placement, batch: Any = None
    ) -> None:
        for source in self.sources(name, placement.tensor.shape):
            raw = out.view(raw_dtype(self.entry(source.name).dtype))
            for run in wanted:
                self._read_run(source, run, raw, placement)

    def _read_run(self, source: Source, run: Run, raw: np.ndarray, placement: Placement) -> None:
        order, links = placement.axis_order, self.links(source.name)
        if order is not None and source.numel == placement.tensor.numel == self.entry(source.name).numel:
            links = [link.permuted(placement.tensor.shape, order) for link in links]
        elif order is not None or placement.storage == "tiled":
            for start in range(0, run.numel, _PICKED):
                stop = min(start + _PICKED, run.numel)
                index = row_major_index(placement, np.arange(run.first + start, run.first + stop))
                self._pick(source, index - source.wanted, raw[run.at + start : run.at + stop])
            return
        low, high = max(run.first, source.wanted), min(run.first + run.numel, source.wanted + source.numel)
        if low < high:
            at = run.at + low - run.first
            self._fill(links, low - source.wanted + source.held, raw[at : at + high - low])

    def _pick(self, source: Source, index: np.ndarray, out: np.ndarray) -> None:
        """Single elements, by way of the range from the first to the last of them."""
        inside = (index >= 0) & (index < source.numel)
        if inside.any():
            low, high = int(index[inside].min()), int(index[inside].max()) + 1
            data = np.empty(high - low, out.dtype)
            self._fill(self.links(source.name), low + source.held, data)
            out[inside] = data[index[inside] - low]

    def _fill(self, links: Sequence[Link], first: int, out: np.ndarray) -> None:
        for link in links:
            fill(link, first, out, partial(self.read_source, link.source), self.window(link.source))

    def verify(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


def whole(name: str, shape: tuple[int, ...]) -> Link:
    """The link of a tensor that is what it is made of."""
    every = (None,) * len(shape)
    return Link(name, shape, every, shape, every, tuple(range(len(shape))))


class Renamed(RowMajor):
    """The tensors of another checkpoint by the names that a map gives them, with their dims in its order.

    Nothing is read before it is asked for.

    Args:
      base: the other checkpoint. It is closed along with this one.
      names: from its names to new ones; None where they stay.
      only: take only the tensors below this prefix, without it.
      prefix: what the new names begin with.
      targets: the tensors that are wanted, by name without prefix, if that is known.

    Raises:
      NameMapError: naming every tensor that is missing, that no rule knows, or that does not fit.
      CheckpointError: tensors of different dtypes would have to be joined.

    Example:
      >>> import tempfile
      >>> from ragged_jax.checkpoint import CheckpointDirectory, Part
      >>> folder, entry = CheckpointDirectory(tempfile.mkdtemp()), TensorEntry("int32", (2, 3))
      >>> path = folder.save(0, {"up/kernel": entry}, [Part("up/kernel", ((0, 6),), np.arange(6, dtype=np.int32))])
      >>> names = NameMap((("up/kernel", "up.weight", "in out -> out in"),))
      >>> Renamed(Checkpoint(path), names).read("up.weight").tolist()
      [[0, 3], [1, 4], [2, 5]]
    """

    def __init__(
        self,
        base: Checkpoint,
        names: NameMap | None = None,
        *,
        only: str = "",
        prefix: str = "",
        targets: Mapping[str, tuple[int, ...]] | None = None,
    ):
        if not isinstance(names, NameMap | None):
            raise TypeError(f"names must be a NameMap, got {type(names).__name__}; see `NameMap` and `NAME_MAPS`")
        head = only and f"{only}/"
        if head and not any(name.startswith(head) for name in base.tensors):
            tops = ", ".join(sorted({name.partition("/")[0] for name in base.tensors}))
            raise CheckpointError(f"no tensor's name begins with {head}; the names begin with {tops}")
        inside = {n.removeprefix(head): entry.shape for n, entry in base.tensors.items() if n.startswith(head)}
        if names is None:
            names = NameMap(tuple((name, name) for name in inside))
        self._shapes = _unstacked(inside, names)
        self._base, self._head = base, head
        wanted = None if targets is None else _unstacked(targets, names.inverse)
        self._mapped = {join(prefix, n): mapped for n, mapped in names.apply(self._shapes, wanted).items()}
        entries, mixed = {}, []
        for name, mapped in self._mapped.items():
            dtypes = {self._holder(link.source).dtype: None for link in mapped.links}
            entries[name] = TensorEntry(next(iter(dtypes)), mapped.shape)
            if len(dtypes) > 1:
                mixed.append(f"{name}: {', '.join(dtypes)}")
        if mixed:
            raise CheckpointError("tensors to be joined have different dtypes:" + listed(mixed))
        manifest = Manifest(base.step, 1, (), entries, metadata=base.metadata)
        tied = names.tied(n.removeprefix(prefix and f"{prefix}/") for n in entries)
        super().__init__(base.path, manifest, {join(prefix, a): join(prefix, n) for a, n in tied.items()})

    def _holder(self, source: str) -> TensorEntry:
        """What holds a source tensor: itself, or the stack that it is a layer of."""
        return self._base.entry(self._base.sources(self._head + source, self._shapes[source])[0].name)

    def links(self, name: str) -> Sequence[Link]:
        return self._mapped[name].links

    def read_source(self, source: str, first: int, out: np.ndarray) -> None:
        placement = Placement(TensorSpec(source, self._shapes[source]), 0)
        self._base.read_runs(self._head + source, [Run(first, 0, len(out))], out, placement)

    def window(self, source: str) -> int:
        held = self._holder(source)
        return _WINDOW_NBYTES if held.row_major else held.nbytes  # every read of others goes through all of them

    def verify(self) -> list[str]:
        return self._base.verify()

    def close(self) -> None:
        self._base.close()


def _unstacked(shapes: Mapping[str, tuple[int, ...]], names: NameMap) -> dict[str, tuple[int, ...]]:
    """Stacks `P/rest` of layers that a map calls `P/0/rest`, `P/1/rest` and so on, as these."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        steps = name.split("/")
        layers = (
            [join(*steps[:at], str(layer), *steps[at:]) for layer in range(shape[0])]
            for at in range(len(steps), -1, -1)
            if shape and 0 < shape[0] <= _MAX_LAYERS and not names.knows(name)
            if names.knows(join(*steps[:at], "0", *steps[at:]))
        )
        found |= dict.fromkeys(stack, tuple(shape[1:])) if (stack := next(layers, None)) else {name: tuple(shape)}
    return found
