"""`fully_shard`: a torch module whose parameters are spread over ranks and gathered unit by unit."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ragged_jax.layout import BlockRule, Bucket, Layout, NameMap, elements, listed, manifest, named
from ragged_jax.planner import Plan

from ._agreement import check_same
from ._homes import register
from ._layouts import unstacked as unstacked_layout
from ._memory import materialize_buffers
from ._plan import Part, Units, parts_of, plan_of
from ._reduction import Groups, has_hooks
from ._runtime import Runtime
from ._unit import Unit
from ._views import check_viewable

_RUNTIME = "_ragged_runtime"


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    units: Units = None,
    block: BlockRule | None = None,
    plan: Plan | Layout | None = None,
    names: NameMap | None = None,
    device: torch.device | str | None = None,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    prefetch: int = 1,
    limit: int = 2,
) -> nn.Module:
    """Shards a module in place: each rank keeps its part of every parameter, cut only between blocks.

    The module keeps its class and its methods. Outside of forward and backward `module.parameters()` are this rank's
    parts, 1-D, which is what optimizers update; inside, they are whole, views of one gathered buffer per unit. The
    gradient of a part is the mean over the ranks; that of a parameter which no rank used is zero, not None, so that
    weight decay moves it. Every rank must run the same units, forward and backward. Make the optimizer afterwards:
    one made before holds parameters that are not used any more. So with hooks of parameters: those of a part are
    called with this rank's part of the mean gradient, once for each backward that reduces, when it ends.

    Args:
      module: on its device, or on `meta`. Every rank has the same one.
      mesh: of one dim, the ranks that share the model, or of two: replicas of it, and the ranks that share one. By
        default all ranks share it.
      units: which submodules are gathered on their own, when they run: types, patterns of paths (`blocks/*`), or a
        predicate on name and module.
      block: what no rank boundary may cut; one rule, or a mapping from path patterns to rules.
      plan: a plan or layout to follow instead of making one, such as that of a JAX job (`load_layout`). Of layers
        that are stacked there, each is a unit of its own here, and a rank's part of it is its row of the stack's.
      names: what the layout calls the parameters and in which order their dims come there, where that is another
        (`flax_names`). A parameter that is transposed so stays a view of the gathered buffer.
      device: where a module from `meta` is to live; by default that of the mesh, or an accelerator if there is one.
        It has no values then: restore a checkpoint, or call `init_parameters`.
      reshard_after_forward: whether units are dropped after forward and gathered again for backward. The root is
        kept: it is needed first.
      mp_policy: dtypes to gather and compute in, to reduce in, and of outputs.
      prefetch: how many units ahead to gather.
      limit: how many units may lie gathered at a time, and how many reductions may be on their way.

    Returns:
      The module.

    Raises:
      ValueError: the plan is for another model or number of ranks, or the ranks are about to do different things
        (every difference is listed), units that match nothing, or parameters that have hooks.
      NotImplementedError: the plan stores tensors tile by tile, or so that torch would have to copy them.
      NameMapError: `names` are not those of the module.

    Reference: Zhao et al., "PyTorch FSDP", arXiv:2304.11277; the layout follows arXiv:2602.22437.
    """
    if hasattr(module, _RUNTIME):
        raise ValueError(f"{type(module).__name__} is fully sharded already")
    if not 0 <= prefetch < limit:
        raise ValueError(f"prefetch must be at least 0 and below the limit {limit}, got {prefetch}")
    groups = _groups(mesh)
    parts = parts_of(module, units, names)
    if hooked := sorted(name for part in parts for name, x in part.tensors.items() if has_hooks(x)):
        raise ValueError(f"hooks of these parameters would be lost, add them after `fully_shard`: {named(hooked)}")
    num_shards, block = dist.get_world_size(groups.shard), block or elements(1)
    if plan is None:
        plan = plan_of(parts, num_shards, block, is_flax=names is not None)
    layout, buckets = _layout(parts, num_shards, block, plan)
    check_viewable(layout.buckets, {name: seen for part in parts for name, seen in part.seen.items()})
    place = _device(module, mesh, device)
    schedule = {"prefetch": prefetch, "limit": limit, "reshard_after_forward": reshard_after_forward}
    facts = {key: str(value) for key, value in {**schedule, "mp_policy": mp_policy}.items()}
    check_same("the models to shard", facts | manifest(layout), groups, place)
    made = []
    for part, bucket in zip(parts, buckets, strict=True):
        inner = part.module is not module
        when = {"reshard_after_forward": reshard_after_forward and inner, "is_brief": inner or len(parts) == 1}
        made.append(Unit(bucket, layout.shares, part, place, groups, mp_policy, **when))
    runtime = Runtime(made, layout, prefetch, limit, materialize_buffers(module, place))
    runtime.attach([part.module for part in parts])
    register(runtime)
    object.__setattr__(module, _RUNTIME, runtime)
    return module


def _groups(mesh: DeviceMesh | None) -> Groups:
    if mesh is None:
        if (world := dist.group.WORLD) is None:
            raise RuntimeError("call torch.distributed.init_process_group first")
        return Groups(world)
    if mesh.ndim == 1:
        return Groups(mesh.get_group(), mesh=mesh)
    if mesh.ndim == 2:
        return Groups(mesh.get_group(1), mesh.get_group(0), mesh)
    raise ValueError(f"a mesh of one dim (shards) or two (replicas, shards), got {mesh.ndim}")


def _device(module: nn.Module, mesh: DeviceMesh | None, device: torch.device | str | None) -> torch.device:
    places = {x.device for x in module.parameters() if not x.is_meta}
    if len(places) > 1:
        raise ValueError(f"a module on one device, got parameters on {', '.join(sorted(map(str, places)))}")
    if device is None:
        found = torch.accelerator.current_accelerator(check_available=True) if mesh is None else mesh.device_type
        return places.pop() if places else torch.device(found or "cpu")
    if places and {p.type for p in places} != {torch.device(device).type}:
        raise ValueError(f"device={device}, but the module is on {places.pop()}; move it first")
    return torch.device(device)


def _layout(
    parts: list[Part], num_shards: int, block: BlockRule, given: Plan | Layout
) -> tuple[Layout, list[Bucket]]:
    """The layout to follow, and the bucket of each part."""
    groups = [part.group(block) for part in parts]
    if not isinstance(given, Plan | Layout):
        raise TypeError(f"plan={given!r} is neither a plan nor a layout; that of a file is `tb.load_layout(path)`")
    layout = unstacked_layout(given.layout if isinstance(given, Plan) else given)
    faults = [] if layout.num_shards == num_shards else [f"for {layout.num_shards} shards, there are {num_shards}"]
    wanted = {t.name: (t.full_shape, t.dtype) for group in groups for t in group.tensors}
    found = {t.name: (t.full_shape, t.dtype) for t in layout.tensors}
    homes = {t.name: bucket for bucket in layout.buckets for t in bucket.tensors}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            faults.append(f"{name}: the model has {wanted.get(name)}, the plan {found.get(name)}")
    faults += (f"{t.name}: planned for slices over {t.split_axes}" for t in layout.tensors if t.splits)
    buckets = []
    for group in groups:
        names = {tensor.name for tensor in group.tensors}
        bucket = next((homes[name] for name in sorted(names) if name in homes), Bucket(group.name, ()))
        buckets.append(bucket)
        for name in sorted(names ^ {tensor.name for tensor in bucket.tensors}):
            if name in wanted and name in found:
                inside = f"in unit {group.name!r}, and" if name in names else f"outside of unit {group.name!r}, but"
                faults.append(f"{name}: the model has it {inside} the plan in bucket {homes[name].name!r}")
    if faults:
        raise ValueError("the plan does not fit:" + listed(faults) + _REMEDY)
    return layout, buckets


_REMEDY = (
    "\nA plan is for one number of ranks. Without `plan=`, but with the same `block=`, checkpoints of any number "
    "restore. For that of a Flax model give `names=`, too, `tb.flax_names(module)` for one."
)


def runtime_of(module: nn.Module) -> Runtime:
    """What drives a fully sharded module.

    Raises:
      TypeError: it is none.
    """
    try:
        return getattr(module, _RUNTIME)
    except AttributeError:
        raise TypeError(f"{type(module).__name__} is not fully sharded; see `fully_shard`") from None


def get_layout(module: nn.Module) -> Layout:
    """The layout that a fully sharded module follows: what a JAX job needs to hold the same bytes."""
    return runtime_of(module).layout


def set_requires_gradient_sync(module: nn.Module, requires_gradient_sync: bool) -> None:
    """Whether backward reduces gradients. Without, they add up on each rank, whole, until a backward that does.

    `zero_grad` of a module or an optimizer does not reach what has added up so; see `forget_gradients`.
    """
    for unit in runtime_of(module).units:
        unit.requires_gradient_sync = requires_gradient_sync


def forget_gradients(module: nn.Module) -> None:
    """Drops what has added up without a reduction, as after a microbatch that is to be skipped."""
    for unit in runtime_of(module).units:
        unit.forget_gradients()
