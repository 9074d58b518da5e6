"""`fully_shard`, for both kinds of Flax module."""

from collections.abc import Callable
from typing import Any

from flax import linen, nnx
from jax.sharding import Mesh

from ..fsdp import LabelRule, PrecisionRule, ReshardRule, Rules, Specs
from ..layout import BlockRule, Layout
from ..planner import Plan
from ._linen import shard_linen
from ._match import ModuleUnits
from ._nnx import shard_nnx


def fully_shard(
    model: linen.Module | nnx.Module | Callable[[], nnx.Module],
    mesh: Mesh,
    *,
    axis: str | tuple[str, ...],
    units: ModuleUnits = None,
    block: BlockRule | None = None,
    stacked: ModuleUnits = None,
    wrt: type[nnx.Variable] = nnx.Param,
    plan: Plan | Layout | None = None,
    reshard_after_forward: ReshardRule = True,
    policy: Callable | None = None,
    precision: PrecisionRule = None,
    label: LabelRule = None,
    specs: Specs | None = None,
    check_processes: bool = True,
) -> Any:
    """Spreads a Flax model's parameters over a mesh axis.

    An NNX module is sharded in place. A Linen module has no parameters yet: what comes back is the same module
    whose `init` makes them as shards, `{"params": ShardedTree, ...}`. Pass the sharded params to functions given to
    `value_and_grad` or `apply`, which call `model.apply({"params": params}, ...)` as usual.

    Args:
      model: the module. Its other variables (statistics, random state) are replicated. For NNX also a function of no
        arguments that makes it: its parameters are then born as shards, with the same bits, and nothing is ever
        whole (see `create`).
      mesh: the devices, with `Auto` or `Explicit` axes.
      axis: the mesh axis to shard over; of several, the last one shards and the others replicate.
      units: which submodules gather their parameters when they are called and drop them afterwards: a class, a
        pattern of their path (`"blocks/*"`: the blocks, and nothing inside of them), several of these, or a
        predicate on path and module. What is left is gathered at the start of the step.
      block: what no device boundary may cut; one rule, or a mapping from path patterns to rules. By default what
        the plan says, or else single elements.
      stacked: which of the units hold layers stacked on a leading dim, for `nnx.scan`. For Linen this is found
        out, and need not be said.
      wrt: for NNX, the type of the variables to shard. For Linen it is the collection `params`.
      plan: a plan or layout to follow instead of making one.
      reshard_after_forward: drop a unit's gathered weights and gather them again in backward. Where units are
        called under `jax.remat` anyway, False saves a gather: the remat drops them. A mapping from patterns of
        units' paths to bools decides for each unit; an int k is True for all but the last k units in the order of
        the module tree, whose weights backward needs first. A stack counts as one unit: the layers of a scan share
        one program, so that all of them drop their weights or none.
      policy: a `jax.checkpoint` policy for what units keep for the backward pass; by default everything but
        gathered weights and what cheap arithmetic makes again.
      precision: the dtypes to gather, reduce and compute in; one rule, or a mapping from patterns of units' paths.
      label: names for parts that are to be trained apart, such as those that are frozen at first: a mapping from
        path patterns to labels, or a function of the path. Parameters of different labels never share a slab, so
        that a filter can choose between them; see `labelled`.
      specs: how tensors are split over other mesh axes (tensor and expert parallelism): a mapping from path patterns
        to partition specs of the array, its layer dim included, such as `{"*/up/kernel": PartitionSpec(None, "tp")}`.
        Each slice is then sharded by itself, and is never gathered over those axes. By default what the
        variables say themselves (`nnx.with_partitioning`).
      check_processes: where several processes take part, compare layouts before anything is sharded, so that all of
        them fail with one message instead of hanging (see `check_same_on_all_processes`).

    Returns:
      The model. Parameters that have a slab of their own keep name and shape; the others lie in shared slabs.
      `full_params` gives all of them back.

    Raises:
      ValueError: an unknown axis, units that match nothing, or a plan for another model. For Linen the last two
        are found by `init`.
      TypeError: parameters that are not numeric arrays, or not a Flax module.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
      >>> model = fully_shard(linen.Dense(3), mesh, axis="fsdp")
      >>> params = model.init(jax.random.key(0), jnp.ones((1, 5)))["params"]
      >>> type(params).__name__, "kernel" in params
      ('ShardedTree', True)
    """
    rules = Rules(mesh, axis, block, plan, reshard_after_forward, policy, precision, label, specs, check_processes)
    if isinstance(model, linen.Module):
        if wrt is not nnx.Param:
            raise TypeError(f"wrt={wrt!r} is for NNX; of a Linen module the collection `params` is sharded")
        return shard_linen(model, rules, units, stacked)
    if isinstance(model, nnx.Module) or callable(model):
        return shard_nnx(model, rules, units=units, stacked=stacked, wrt=wrt)
    raise TypeError(f"fully_shard takes a Flax module, got {type(model).__name__}; see `shard_tree` for pytrees")
