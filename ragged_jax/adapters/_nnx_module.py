"""Units of a Flax NNX model: modules that gather their parameters when they are called.

As in PyTorch's FSDP2 a unit changes its class, not its place: `blocks[0]` becomes a subclass of its own class
whose public methods unshard, run, and drop. Parameters with a slab of their own stay where they are and keep
name and shape; those that share a slab leave a `PackedTensor` behind.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import jax
from flax import nnx
from flax.nnx import reprlib
from jax.sharding import PartitionSpec

from ..fsdp import SlabOf, Unit, only_copied, resharding, settling, slabs_in, unshard_unit
from ..layout import Slab
from ._nnx_find import Path, get_path, set_path

SLABS = "packed_slabs"  # the attribute of a unit that holds its packed slabs
_INFO = "fully_sharded"  # the attribute of a unit that holds what it knows of itself


class PackedTensor(nnx.Variable):
    """Stands where a parameter was that now lies in a packed slab. It holds no value.

    Metadata: `tensor` (its full name), `slab`, `shape`, `dtype`, and the original's `variable_type`.
    """

    def __jax_array__(self):
        raise self._sharded()

    def get_value(self, *_, **__):
        raise self._sharded()

    def __getitem__(self, key):
        raise self._sharded()

    def __nnx_repr__(self):
        yield reprlib.Object(type="PackedTensor")
        for name in ("tensor", "slab", "shape", "dtype"):
            yield reprlib.Attr(name, self.get_metadata()[name])

    def _sharded(self) -> RuntimeError:
        return RuntimeError(
            f"{self.tensor} is sharded, in slab {self.slab}; it is whole inside its unit's public methods, called "
            "in a function given to `value_and_grad` or `apply`, and in what `full_params(model)` returns"
        )


@dataclass(frozen=True)
class ModuleUnit:
    """What a unit knows of itself. Static: part of the module's graph definition.

    Attributes:
      unit: its bucket on the mesh.
      paths: by tensor, every path from the module to it.
      wrt: the filter that says which variables are sharded.
    """

    unit: Unit
    paths: tuple[tuple[str, tuple[Path, ...]], ...]
    wrt: Any

    def __repr__(self):
        return repr(self.unit)

    def put(self, module: nnx.Module, slabs: dict[str, jax.Array]) -> None:
        """Replaces the module's parameters by their shards, in place."""
        paths = dict(self.paths)
        packed = {}
        for slab in self.unit.bucket.slabs:
            if slab.sole:
                variable = get_path(module, paths[slab.name][0])
                variable.set_raw_value(slabs[slab.name])
                variable.set_metadata(**self._metadata(slab))
                continue
            kind = type(get_path(module, paths[slab.placements[0].tensor.name][0]))
            packed[slab.name] = kind(slabs[slab.name])
            packed[slab.name].set_metadata(**self._metadata(slab))
            for placement in slab.placements:
                name = placement.tensor.name
                marker = _marker(get_path(module, paths[name][0]), placement.tensor, slab)
                for path in paths[name]:
                    set_path(module, path, marker)
        if packed:
            setattr(module, SLABS, nnx.Dict(packed))

    def _metadata(self, slab: Slab) -> dict[str, Any]:
        """Of a slab's variable. Flax gives an optimizer's state the same, which is how it is born sharded."""
        return {"out_sharding": self.unit.spec(slab), "mesh": self.unit.mesh, _INFO: SlabOf(self.unit, slab.name)}

    def put_slabs(self, module: nnx.Module, slabs: dict[str, jax.Array]) -> None:
        """Gives a unit other arrays of the same layout, in place."""
        for name, variable in self._variables(module).items():
            variable.set_raw_value(slabs[name])

    def slabs(self, module: nnx.Module) -> dict[str, Any]:
        """The arrays of a unit's slabs, by name."""
        return {name: variable.get_raw_value() for name, variable in self._variables(module).items()}

    def _variables(self, module: nnx.Module) -> dict[str, nnx.Variable]:
        paths, store = dict(self.paths), vars(module).get(SLABS, {})
        return {
            slab.name: store[slab.name] if slab.name in store else get_path(module, paths[slab.name][0])
            for slab in self.unit.bucket.slabs
        }

    def hide(self, module: nnx.Module) -> None:
        """Inside `shard_map`, in place: markers instead of shards, which would pass for whole parameters."""
        paths, store = dict(self.paths), vars(module).get(SLABS, {})
        shown = [slab for slab in self.unit.bucket.slabs if slab.name not in store]
        for slab in shown:
            variable = get_path(module, paths[slab.name][0])
            marker = _marker(variable, slab.placements[0].tensor, slab)
            for path in paths[slab.name]:
                set_path(module, path, marker)
            store = {**store, slab.name: variable}
        if shown:
            setattr(module, SLABS, nnx.Dict(dict(store)))

    def open(self, module: Any) -> None:
        """Inside `shard_map`, in place: an ordinary module of the original class with whole parameters."""
        shards = self.slabs(module)
        object.__setattr__(module, "__class__", original_class(module))
        self.fill(module, unshard_unit(self.unit, shards))

    def fill(self, module: nnx.Module, tensors: dict[str, Any]) -> None:
        """In place: whole tensors where the shards and markers were."""
        paths = dict(self.paths)
        for slab in self.unit.bucket.slabs:
            for placement in slab.placements:
                name = placement.tensor.name
                variable = get_path(module, paths[name][0])
                if not isinstance(variable, PackedTensor):
                    variable.set_raw_value(tensors[name])
                    continue
                metadata = variable.get_metadata()
                whole = metadata["variable_type"](tensors[name], **metadata["original"].items, eager_sharding=False)
                for path in paths[name]:
                    set_path(module, path, whole)
        if hasattr(module, SLABS):
            delattr(module, SLABS)
        delattr(module, _INFO)


@dataclass(frozen=True)
class _Metadata:
    """A variable's metadata as a static value, although some of it may not be hashable."""

    items: dict[str, Any]

    def __hash__(self):
        return hash(tuple(sorted(self.items)))


def _marker(variable: nnx.Variable, tensor: Any, slab: Slab) -> PackedTensor:
    metadata = variable.get_metadata()
    original = {k: v for k, v in metadata.items() if k not in ("eager_sharding", "out_sharding", "mesh")}
    return PackedTensor(
        None,
        tensor=tensor.name,
        slab=slab.name,
        shape=tensor.full_shape,
        dtype=tensor.dtype,
        variable_type=type(variable),
        original=_Metadata(original),
    )


def spec_of(variable: Any) -> PartitionSpec:
    """How a variable of a sharded model is laid out over the manual axes: as a slab, or whole."""
    metadata = variable.get_metadata() if isinstance(variable, nnx.Variable) else {}
    return metadata["out_sharding"] if metadata.get(_INFO) else PartitionSpec()


def slab_of_variable(variable: nnx.Variable) -> SlabOf | None:
    """Which slab a variable is, or None for an ordinary one."""
    return variable.get_metadata().get(_INFO)


def stand_in(marker: PackedTensor, of: SlabOf) -> nnx.Variable:
    """A variable such as the packed tensor was, without a value, for filters to look at."""
    return marker.variable_type(None, **{_INFO: of})


@slabs_in.register
def _(variable: nnx.Variable) -> nnx.Variable:
    of = slab_of_variable(variable)
    return jax.tree.map(lambda x: of or x, variable)


def info_of(module: Any) -> ModuleUnit | None:
    """What a unit knows of itself, or None for any other module."""
    return vars(module).get(_INFO)  # not getattr: nnx.Rngs has a stream for every name


def make_unit(module: nnx.Module, info: ModuleUnit, slabs: dict[str, jax.Array]) -> None:
    """Turns a module into a unit, in place."""
    info.put(module, slabs)
    setattr(module, _INFO, nnx.static(info))
    object.__setattr__(module, "__class__", sharded_class(type(module)))


def original_class(module: nnx.Module) -> type:
    """The class that a unit had before it became one."""
    return type(module).__mro__[1]


def _deepcopied(module: nnx.Module) -> nnx.Module:
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.tree.map(lambda x: x.copy(), state))


@cache
def sharded_class(cls: type) -> type:
    """The subclass of a module class whose public methods gather the parameters first."""
    methods = {}
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        public = name == "__call__" or not (name.startswith("_") or hasattr(nnx.Module, name))
        if public and callable(method) and not isinstance(method, type | staticmethod | classmethod):
            methods[name] = _gathering(method, name)
    space = {**methods, **only_copied(nnx.clone, _deepcopied), "__module__": cls.__module__}
    return type(f"FullySharded{cls.__name__}", (cls,), space)


def _gathering(method: Callable, name: str) -> Callable:
    @wraps(method)
    def call(self, *args, **kwargs):
        info: ModuleUnit = getattr(self, _INFO)
        if info.unit.axis not in jax.sharding.get_abstract_mesh().manual_axes:
            raise RuntimeError(
                f"{original_class(self).__name__}.{name} was called on a fully sharded module outside of "
                "this library's `value_and_grad` and `apply`; write `apply(lambda model, x: ...)(model, x)`"
            )
        graphdef, params, state = nnx.split((self, args, kwargs), info.wrt, ...)
        precision = info.unit.precision

        def run(params, state):
            unit, args, kwargs = nnx.merge(graphdef, params, state, copy=True)
            info.open(unit)
            args, kwargs = precision.inputs((args, kwargs))
            out = precision.outputs(getattr(unit, name)(*args, **kwargs))
            return out, nnx.state((unit, args, kwargs), changing(info))

        if info.unit.reshard:
            run = resharding(run, info.unit.policy, scanned=info.unit.stacked)
        if info.unit.beside_layers:
            run = settling(run)
        out, left = run(params, state)
        nnx.update((self, args, kwargs), left)
        return out

    return call


def changing(info: ModuleUnit) -> Any:
    """The filter for variables that a call may change: all but parameters and their markers."""
    return nnx.All(nnx.Variable, nnx.Not(info.wrt), nnx.Not(PackedTensor))
