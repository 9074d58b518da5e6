"""Which tensors other mesh axes split: from partition specs to what the planner is told."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from jax.sharding import Mesh, PartitionSpec

from ..layout import Split, TensorSpec, listed
from ..planner import Group
from ._splits import entries

Specs = Mapping[str, PartitionSpec]


@dataclass(frozen=True)
class SplitRule:
    """How the tensors of a model are split over mesh axes that do not share the batch.

    Attributes:
      sizes: of these axes.
      specs: by pattern of a tensor's path, its partition spec, dims of stacked layers included. The first pattern
        that matches wins.
      own: the axes that the tensors are sharded over anyway. Specs that tensors carry themselves may name them, to no
        effect, since models are written for more than one way of sharding.
    """

    sizes: Mapping[str, int]
    specs: Specs
    own: tuple[str, ...] = ()

    @classmethod
    def of(cls, mesh: Mesh, axes: tuple[str, ...], specs: Specs | None) -> "SplitRule":
        return cls({n: size for n, size in mesh.shape.items() if n not in axes}, specs or {}, axes)

    def split(self, groups: Sequence[Group], known: Specs) -> list[Group]:
        """The groups with their tensors split.

        Args:
          groups: of whole tensors.
          known: what the tensors say themselves, by name, where no pattern matches.

        Raises:
          ValueError: patterns that match nothing, axes that there are not, dims that do not divide: all of them.
        """
        faults: list[str] = []
        names = [t.name for group in groups for t in group.tensors]
        faults += [f"{p!r} matches no tensor" for p in self.specs if not any(fnmatchcase(n, p) for n in names)]
        done = []
        for group in groups:
            tensors = []
            for tensor in group.tensors:
                matched = (spec for pattern, spec in self.specs.items() if fnmatchcase(tensor.name, pattern))
                if (spec := next(matched, None)) is not None:
                    if mine := [n for names in entries(spec) for n in names if n in self.own]:
                        faults.append(
                            f"{tensor.name}: {spec} names {', '.join(mine)}, which shards all tensors anyway"
                        )
                        continue
                else:
                    spec = known.get(tensor.name, PartitionSpec())
                tensors.append(self._split(tensor, spec, group.stack is not None, faults))
            done.append(replace(group, tensors=tuple(tensors)))
        if faults:
            raise ValueError(
                f"tensors cannot be split as their partition specs say, over mesh axes {dict(self.sizes)}:"
                + listed(faults)
                + '\nGive other specs, e.g. specs={"*/kernel": PartitionSpec(None, "tp")}; PartitionSpec() leaves a '
                "tensor whole, also one that carries a spec of its own."
            )
        return done

    def _split(self, tensor: TensorSpec, spec: PartitionSpec, stacked: bool, faults: list[str]) -> TensorSpec:
        dims = entries(spec)
        where = f"{tensor.name}: shape {tensor.shape}{', stacked' * stacked}, {spec}"
        if len(dims) > len(tensor.shape) + stacked:
            return _fault(tensor, faults, f"{where} has more dims")
        if strange := [n for names in dims for n in names if n not in self.sizes and n not in self.own]:
            return _fault(tensor, faults, f"{where} names {', '.join(map(str, strange))}, no axis of the mesh")
        if stacked and any(n in self.sizes for n in (dims[0] if dims else ())):
            return _fault(tensor, faults, f"{where} splits the dim of the layers")
        splits = [
            Split(dim, self.sizes[n], n)
            for dim, names in enumerate(dims[stacked:])
            for n in names
            if self.sizes.get(n, 1) > 1
        ]
        shape = list(tensor.shape)
        for s in splits:
            if shape[s.dim] % s.size:
                return _fault(tensor, faults, f"{where}: dim {s.dim} does not divide by {s.size} ({s.axis})")
            shape[s.dim] //= s.size
        return replace(tensor, shape=tuple(shape), splits=tuple(splits)) if splits else tensor


def _fault(tensor: TensorSpec, faults: list[str], text: str) -> TensorSpec:
    faults.append(text)
    return tensor


def one_kind(mesh: Mesh, axes: Iterable[str], groups: Sequence[Group]) -> None:
    """Raises ValueError when tensors are split over axes of another type than those they are sharded over."""
    used = {*axes, *(s.axis for group in groups for t in group.tensors for s in t.splits)}
    kinds = {n: str(kind) for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if n in used}
    if len(set(kinds.values())) > 1:
        raise ValueError(
            f"the mesh axes that shard tensors and those that split them must be all Auto or all Explicit: {kinds}"
        )
