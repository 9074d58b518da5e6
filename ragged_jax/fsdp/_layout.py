"""From a model's tensors to the layout that the runtime follows: a new plan, or one that was given."""

from collections.abc import Mapping, Sequence

from .. import planner
from ..layout import Bucket, Layout, TensorSpec, listed
from ..planner import Group, Plan
from . import _check as check


def make_layout(
    groups: Sequence[Group], num_shards: int, given: Plan | Layout | None, *, same_blocks: bool = True
) -> Layout:
    """The layout to follow.

    Args:
      groups: the model's tensors.
      num_shards: of the mesh.
      given: the plan to follow, or None to make one.
      same_blocks: whether the given plan must be for these blocks, because they were asked for.

    Raises:
      ValueError: the given one is for another model or number of shards; every difference is listed.
      TypeError: it is neither plan nor layout.
    """
    if given is None:
        check.blocks_fit(t for group in groups for t in group.tensors)
        return planner.plan(groups, num_shards).layout
    if not isinstance(given, Plan | Layout):
        raise TypeError(f"plan={given!r} is neither a plan nor a layout; `rj.Layout.from_json(text)` makes one")
    layout = given.layout if isinstance(given, Plan) else given
    faults = (
        [] if layout.num_shards == num_shards else [f"  for {layout.num_shards} shards, the mesh has {num_shards}"]
    )

    def facts(part: Group | Bucket, tensor: TensorSpec) -> tuple:
        return (
            part.name,
            part.stack,
            tensor.shape,
            tensor.dtype,
            tensor.label,
            tensor.splits,
            *([tensor.block] if same_blocks else []),
        )

    planned = {t.name: facts(bucket, t) for bucket in layout.buckets for t in bucket.tensors}
    wanted = {t.name: facts(group, t) for group in groups for t in group.tensors}
    for name in sorted(planned.keys() | wanted.keys()):
        if planned.get(name) != wanted.get(name):
            faults.append(f"{name}: planned {planned.get(name)}, the model has {wanted.get(name)}")
    if faults:
        hint = _hint([b.name for b in layout.buckets if b.slabs], [g.name for g in groups if g.tensors])
        raise ValueError("the plan is not for this model (bucket, stack, shape, ...):" + listed(faults) + hint)
    return layout


def _hint(buckets: Sequence[str], units: Sequence[str]) -> str:
    """What to do where a plan gathers other things together than the model does."""
    if set(buckets) == set(units):
        return ""
    planned, wanted = (
        ", ".join([*(name or "(root)" for name in names[:3]), *["..."] * (len(names) > 3)])
        for names in (buckets, units)
    )
    joined = "; layers that `merge=` joins must be one unit of it" * any(".." in name for name in buckets)
    return f"\nIts buckets are {planned}, the model's units {wanted}: plan with the units of the model{joined}"


def stack_length(name: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The leading dim that the tensors of a stack of layers have in common.

    Raises:
      ValueError: they have none; all shapes are listed.
    """
    lengths = {shape[0] if shape else -1 for shape in shapes.values()}
    if len(lengths) != 1 or -1 in lengths:
        listing = listed(f"{tensor}: shape {shape}" for tensor, shape in shapes.items())
        raise ValueError(f"unit {name!r} is marked as stacked, but its leading dims differ:{listing}")
    return lengths.pop()
