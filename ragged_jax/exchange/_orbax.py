"""Orbax checkpoints of the same states: of tensors, as ordinary global arrays.

Orbax saves arrays. A padded slab that it saves on 8 devices does not fit on 5, so it is given the tensors themselves.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..checkpoint import CheckpointError, Manifest, TensorEntry
from ..checkpoint._views import RowMajor, whole
from ..fsdp import Unit
from ..layout import Link, boxes, named
from ._checkpointer import restore_from
from ._redistribute import redistribute
from ._state import is_key, items_of

T = TypeVar("T")


def global_arrays(state: Any) -> dict[str, Any]:
    """The tensors of a state as ordinary global arrays, in dicts by the steps of their names: what Orbax can save.

    A tensor that was in slabs is split evenly over its first dim that the number of devices divides, and replicated
    where none does: that is where this takes more memory than the state. There is no padding. What was an ordinary
    array or a number stays as it is. Tensors without elements, which Orbax refuses, are left out.

    To come back, `redistribute(arrays, {...})`, or `load_orbax` straight from the files.

    Args:
      state: any pytree that `Checkpointer.save` takes.

    Raises:
      ValueError: quantised moments, which are no ordinary arrays; all of them are named.
    """
    items, _ = items_of(state)
    wanted: dict[str, Any] = {}
    quantised = []
    for item in items:
        for name, entry in item.tensors().items():
            quantised += [name] if entry.attributes and not is_key(item.leaf) else []
            if not entry.numel:
                wanted[name] = jax.ShapeDtypeStruct(entry.shape, entry.dtype)
            elif item.held is None:
                wanted[name] = item.leaf
            else:
                sharding = _even(item.held.of.unit, entry.shape)
                wanted[name] = jax.ShapeDtypeStruct(entry.shape, item.leaf.dtype, sharding=sharding)
    if quantised:
        raise ValueError(f"Orbax would lose how these are quantised; use `Checkpointer`: {named(quantised)}")
    return _nested({n: x for n, x in _flat(redistribute(state, _nested(wanted))).items() if math.prod(np.shape(x))})


def _even(unit: Unit, shape: tuple[int, ...]) -> NamedSharding:
    dim = next((dim for dim, size in enumerate(shape) if size % unit.num_shards == 0), None)
    spec = PartitionSpec() if dim is None else PartitionSpec(*(None,) * dim, unit.axis)
    return NamedSharding(unit.mesh, spec)


def save_orbax(path: str | Path, state: Any) -> None:
    """Saves a state as an Orbax checkpoint, of `global_arrays(state)`. All processes call it.

    Args:
      path: the checkpoint's folder, which must not exist.
      state: any pytree that `Checkpointer.save` takes.

    Raises:
      ImportError: Orbax is not installed.
      ValueError: the folder exists, or moments are quantised.
    """
    with _orbax().StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(path).absolute(), global_arrays(state))


def load_orbax(path: str | Path, like: T, *, cast: bool = False, fewer_layers: bool = False) -> T:
    """A state from an Orbax checkpoint of ordinary arrays, written by `save_orbax` or by another program.

    Each device reads its own part, whatever the devices were that the checkpoint was saved on. Orbax compresses what
    one device saved as one piece, and a piece is read whole: at most one is in memory for each array that is read.

    Args:
      path: the checkpoint's folder, with Orbax's `_METADATA`.
      like: the state as it is wanted, as for `Checkpointer.restore`. A part of what was saved will do.
      cast: whether tensors of other dtypes are converted; otherwise they are an error.
      fewer_layers: whether `like` may lack some of the layers of a list or a stack; otherwise they are an error.

    Raises:
      ImportError: Orbax is not installed.
      CheckpointError: it is no Orbax checkpoint, or not of such a state; everything that is wrong is named.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> import ragged_jax as rj
      >>> small, large = (jax.make_mesh((n,), ("fsdp",), devices=jax.devices()[:n]) for n in (2, 5))
      >>> path = tempfile.mkdtemp() + "/state"
      >>> save_orbax(path, {"params": rj.shard_tree({"w": jnp.ones((8, 3))}, small, axis="fsdp")})
      >>> like = rj.shard_tree({"w": jnp.zeros((8, 3))}, large, axis="fsdp")
      >>> rj.full_params(load_orbax(path, {"params": like})["params"])["w"].sum()
      np.float32(24.0)
    """
    return restore_from(partial(OrbaxFolder, path), like, cast=cast, fewer_layers=fewer_layers)


class OrbaxFolder(RowMajor):
    """The arrays of an Orbax checkpoint by the steps of their paths.

    Args:
      path: the checkpoint's folder.
      wanted: by name, tensors that are expected there. Those without elements are taken to be, and what Orbax does
        not say of others, such as the generator of a random key, is taken from here.
    """

    def __init__(self, path: str | Path, wanted: Mapping[str, TensorEntry] | None = None):
        path, wanted = Path(path).absolute(), wanted or {}
        if not (path / "_METADATA").is_file():
            raise CheckpointError(f"{path}: no _METADATA there; not an Orbax checkpoint of a pytree")
        found = _orbax().StandardCheckpointer().metadata(path).item_metadata
        self._arrays = {name: leaf for name, leaf in _flat(found.tree).items() if hasattr(leaf, "dtype")}
        entries = {name: entry for name, entry in wanted.items() if not entry.numel}
        for name, leaf in self._arrays.items():
            attributes = wanted[name].attributes if name in wanted else {}
            entries[name] = TensorEntry(str(np.dtype(leaf.dtype)), tuple(leaf.shape), attributes=attributes)
        super().__init__(path, Manifest(0, 1, (), entries))
        self._driver = "zarr3" if found.use_zarr3 else "zarr"
        self._ocdbt = (path / "manifest.ocdbt").exists()
        self._opened: dict[str, Any] = {}

    def links(self, name: str) -> Sequence[Link]:
        return [whole(name, self.entry(name).shape)]

    def read_source(self, source: str, first: int, out: np.ndarray) -> None:
        array, at = self._open(source), 0
        for box in boxes(self.entry(source).shape, first, first + len(out)):
            part = np.asarray(array[tuple(slice(*span) for span in box.region)].read().result()).reshape(-1)
            out[at : at + part.size] = part.view(out.dtype)
            at += part.size

    def _open(self, name: str) -> Any:
        if name not in self._opened:
            inside = self._arrays[name].name
            base = f"file://{self.path}/"
            store = {"driver": "ocdbt", "base": base, "path": f"{inside}/"} if self._ocdbt else f"{base}{inside}/"
            spec = {"driver": self._driver, "kvstore": store}
            self._opened[name] = import_module("tensorstore").open(spec, read=True).result()
        return self._opened[name]


def _orbax() -> Any:
    try:
        return import_module("orbax.checkpoint")
    except ImportError:
        raise ImportError("this needs Orbax: pip install 'ragged-jax[orbax]'") from None


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        *steps, last = name.split("/")
        node = tree
        for step in steps:
            node = node.setdefault(step, {})
        node[last] = leaf
    return tree


def _flat(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
