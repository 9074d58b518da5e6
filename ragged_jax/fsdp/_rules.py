"""`Rules`: what users say about how a model is to be sharded, and the units that come of it."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from jax.sharding import Mesh, PartitionSpec

from ..layout import BlockRule, Layout, elements
from ..planner import Group, Plan
from . import _check as check
from ._labels import LabelRule, label_groups
from ._layout import make_layout
from ._precision import PrecisionRule, precision_for
from ._processes import check_layout_on_all_processes
from ._reshard import ReshardRule, reshard_flags
from ._split_rule import Specs, SplitRule, one_kind
from ._unit import Unit


@dataclass(frozen=True)
class Rules:
    """How a model is to be sharded. The attributes are the arguments of `fully_shard`, which describes them."""

    mesh: Mesh
    axis: str | tuple[str, ...]
    block: BlockRule | None = None
    plan: Plan | Layout | None = None
    reshard_after_forward: ReshardRule = True
    policy: Callable | None = None
    precision: PrecisionRule = None
    label: LabelRule = None
    specs: Specs | None = None
    check_processes: bool = True

    @property
    def blocks(self) -> BlockRule:
        """The blocks to plan with."""
        return self.block or elements(1)

    def units(self, groups: Iterable[Group], known: Mapping[str, PartitionSpec] | None = None) -> dict[str, Unit]:
        """The buckets of a model on the mesh, by name.

        Args:
          groups: its tensors, the root's first, in blocks of `blocks`.
          known: specs that tensors themselves know.

        Raises:
          ValueError: an unknown axis, a pattern that matches nothing, or a plan for another model.
        """
        axes = check.mesh_axes(self.mesh, self.axis)
        groups = label_groups(groups, self.label)
        groups = SplitRule.of(self.mesh, axes, self.specs).split(groups, known or {})
        one_kind(self.mesh, axes, groups)
        names = [group.name for group in groups]
        check.block_patterns(self.block, groups)
        check.patterns_match("precision", self.precision, names)
        layout = make_layout(groups, self.mesh.shape[axes[-1]], self.plan, same_blocks=self.block is not None)
        if self.check_processes:
            check_layout_on_all_processes(layout, self.mesh, axes, precision=self.precision)
        reshard = {"": True, **reshard_flags(self.reshard_after_forward, [name for name in names if name])}

        layers = layer_names(layout)

        def unit(name: str) -> Unit:
            rule, bucket = precision_for(name, self.precision), layout.bucket(name)
            beside = bool(layers) and name not in layers
            return Unit(bucket, self.mesh, axes, layout.shares, rule, reshard[name], self.policy, beside)

        return {name: unit(name) for name in names}


def layer_names(layout: Layout) -> set[str]:
    """The buckets that are a model's layers: those stacked for a scan, or else those that have others like them.

    These only where they are half of all, at least: two blocks that happen to be alike make no layers of a pyramid.
    """
    if stacked := {bucket.name for bucket in layout.buckets if bucket.stack is not None}:
        return stacked
    kinds = {b.name: tuple((t.full_shape, t.dtype) for t in b.tensors) for b in layout.buckets if b.tensors}
    count = Counter(kinds.values())
    alike = {name for name, kind in kinds.items() if count[kind] > 1}
    return alike if 2 * len(alike) >= len(kinds) else set()
