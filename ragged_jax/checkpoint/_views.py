"""Checkpoints of other kinds, read as if they were ours: row by row, by other names."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..layout import Link, NameMap, Placement, TensorSpec, row_major_index
from ._boxes import fill
from ._checkpoint import Checkpoint, Source, _raw
from ._manifest import CheckpointError, Manifest, TensorEntry
from ._runs import Run
from ._shards import join

_WINDOW_NBYTES = 4 << 20
_MAX_LAYERS = 100_000
_PICKED = 1 << 18  # elements whose places are computed one by one at a time


class RowMajor(Checkpoint):
    """A checkpoint whose tensors are read as ranges of their elements in row-major order.

    Attributes:
      aliases: other names of tensors, by that name.
    """

    def __init__(self, path: Path, manifest: Manifest, aliases: Mapping[str, str] | None = None):
        self.path, self.manifest, self.aliases = path, manifest, dict(aliases or {})

    @abstractmethod
    def read_range(self, name: str, first: int, out: np.ndarray) -> None:
        """Fills a flat array with elements of a tensor, from the given one on.

        Args:
          name: of the tensor.
          first: its element that belongs at `out[0]`.
          out: flat and contiguous, of unsigned integers or bytes of the size of the tensor's elements.
        """

    def entry(self, name: str) -> TensorEntry:
        return super().entry(self.aliases.get(name, name))

    def sources(self, name: str, shape: tuple[int, ...]) -> list[Source]:
        return super().sources(self.aliases.get(name, name), shape)

    def read_runs(
        self, name: str, wanted: Sequence[Run], out: np.ndarray, placement: Placement, batch: Any = None
    ) -> None:
        for source in self.sources(name, placement.tensor.shape):
            raw = out.view(_raw(self.entry(source.name).dtype))
            for run in wanted:
                self._read_run(source, run, raw, placement)

    def _read_run(self, source: Source, run: Run, raw: np.ndarray, placement: Placement) -> None:
        order = placement.axis_order
        if placement.storage == "row_major" and (order is None or order == tuple(range(len(order)))):
            low = max(run.first, source.wanted)
            high = min(run.first + run.numel, source.wanted + source.numel)
            if low < high:
                at = run.at + low - run.first
                self.read_range(source.name, low - source.wanted + source.held, raw[at : at + high - low])
        elif order is not None and source.numel == placement.tensor.numel == self.entry(source.name).numel:
            every = (None,) * len(order)
            link = Link(source.name, placement.tensor.shape, every, placement.stored_shape, every, order)
            self._fill(link, run.first, raw[run.at : run.at + run.numel], _WINDOW_NBYTES)
        else:
            for start in range(0, run.numel, _PICKED):
                stop = min(start + _PICKED, run.numel)
                index = row_major_index(placement, np.arange(run.first + start, run.first + stop))
                self._pick(source, index - source.wanted, raw[run.at + start : run.at + stop])

    def _pick(self, source: Source, index: np.ndarray, out: np.ndarray) -> None:
        """Single elements, by way of the range from the first to the last of them."""
        inside = (index >= 0) & (index < source.numel)
        if inside.any():
            low, high = int(index[inside].min()), int(index[inside].max()) + 1
            data = np.empty(high - low, out.dtype)
            self.read_range(source.name, low + source.held, data)
            out[inside] = data[index[inside] - low]

    def _fill(self, link: Link, first: int, out: np.ndarray, max_nbytes: int) -> None:
        fill(link, first, out, lambda at, to: self.read_range(link.source, at, to), max_nbytes)

    def verify(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


class Renamed(RowMajor):
    """The tensors of another checkpoint by the names that a map gives them, with their dims in its order.

    Nothing is read before it is asked for.

    Args:
      base: the other checkpoint. It is closed along with this one.
      names: from its names to new ones.
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
        names: NameMap,
        *,
        only: str = "",
        prefix: str = "",
        targets: Mapping[str, tuple[int, ...]] | None = None,
    ):
        head = only and f"{only}/"
        inside = {n.removeprefix(head): entry.shape for n, entry in base.tensors.items() if n.startswith(head)}
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
            raise CheckpointError("tensors to be joined have different dtypes:\n  " + "\n  ".join(mixed))
        manifest = Manifest(base.step, 1, (), entries, metadata=base.metadata)
        tied = names.tied(n.removeprefix(prefix and f"{prefix}/") for n in entries)
        super().__init__(base.path, manifest, {join(prefix, a): join(prefix, n) for a, n in tied.items()})

    def _holder(self, source: str) -> TensorEntry:
        """What holds a source tensor: itself, or the stack that it is a layer of."""
        return self._base.entry(self._base.sources(self._head + source, self._shapes[source])[0].name)

    def read_range(self, name: str, first: int, out: np.ndarray) -> None:
        for link in self._mapped[name].links:
            held, source = self._holder(link.source), self._head + link.source
            # of one that is stored in another order every read goes through all of it
            limit = _WINDOW_NBYTES if held.row_major else held.nbytes
            placement = Placement(TensorSpec(source, self._shapes[link.source]), 0)

            def read(at: int, to: np.ndarray, source=source, placement=placement) -> None:
                self._base.read_runs(source, [Run(at, 0, len(to))], to, placement)

            fill(link, first, out, read, limit)

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
