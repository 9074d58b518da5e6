"""Compiler options for one `jit`: gathers ahead of their use, and a limit on how much is gathered at a time."""

from collections import Counter
from typing import Any

import jax.numpy as jnp

from ..layout import Bucket, Layout, itemsize
from ..planner import Plan, StepSchedule
from ._generic import units_of
from ._precision import FULL, MixedPrecision

_SPARSE_CORE = (
    "xla_tpu_enable_sparse_core_collective_offload_all_gather",
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather",
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter",
    "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter",
    "xla_tpu_enable_sparse_core_reduce_scatter_v2",
    "xla_tpu_enable_sparse_core_reduce_scatter_padding",
    "xla_tpu_use_tc_device_shape_on_sc",
    "xla_sc_disable_megacore_partitioning",
)
_TPU_OFF = (
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
    "xla_jf_bf16_propagation",  # casts stacks of weights whole, before their loop, and copies each layer out of them
)


def compiler_options(
    model: Any,
    backend: str,
    *,
    schedule: StepSchedule | None = None,
    precision: MixedPrecision = FULL,
    parallel_collectives: int = 1,
) -> dict[str, bool | int]:
    """What to give to `jax.jit(..., compiler_options=)` so that collectives run beside the computation.

    On GPU the compiler gathers one layer ahead in a scan, and combines the gathers of a bucket's slabs into one, up
    to the bytes that the schedule allows. On TPU gathers and reduce-scatters go to the SparseCores (v5p, v6e and
    later; older chips have none, pass no options there), and weights are cast layer by layer, not all at the start.
    On CPU nothing runs beside anything: no options.

    Args:
      model: a sharded model, or a plan or layout.
      backend: `gpu`, `tpu` or `cpu`, as `jax.default_backend()` says it.
      schedule: how many buckets may lie gathered at a time (`limit`); by default two, the one in use and the next.
        With a limit of one nothing is gathered ahead.
      precision: for a plan, the dtypes of its collectives; a model knows its own.
      parallel_collectives: on GPU, how many collectives may be under way at a time. With 2 a gather may run beside a
        reduction that takes as long as the layer, as those of small layers over many devices do; more memory is held.

    Raises:
      ValueError: an unknown backend, or no collective at all.

    Example:
      >>> import jax
      >>> from ragged_jax.fsdp import plan
      >>> layers = [{"w": jax.ShapeDtypeStruct((1024, 1024), "float32")} for _ in range(4)]
      >>> made = plan({"layers": layers}, 8, units="layers/*")
      >>> compiler_options(made, "gpu")["xla_gpu_all_gather_combine_threshold_bytes"]
      4194304
    """
    if backend == "cpu":
        return {}
    if backend == "tpu":
        return {**dict.fromkeys(_SPARSE_CORE, True), **dict.fromkeys(_TPU_OFF, False)}
    if backend not in ("gpu", "cuda", "rocm"):
        raise ValueError(f"no compiler options for backend {backend!r}; choose from gpu, tpu, cpu")
    if parallel_collectives < 1:
        raise ValueError(f"parallel_collectives={parallel_collectives} must be at least 1")
    if isinstance(model, Plan | Layout):
        layout = model.layout if isinstance(model, Plan) else model
        shards = layout.num_shards, layout.largest_share
        buckets = [(bucket, precision, *shards) for bucket in layout.buckets]
    else:
        buckets = [(unit.bucket, unit.precision, unit.num_shards, unit.share) for unit in units_of(model)]
    ahead = (schedule.limit if schedule else 2) - 1
    gathered, reduced = _layer_nbytes(buckets)
    options: dict[str, bool | int] = {
        "xla_gpu_enable_pipelined_all_gather": ahead > 0,
        "xla_gpu_enable_while_loop_double_buffering": ahead > 0,
        "xla_gpu_all_gather_combine_threshold_bytes": max(1, ahead) * gathered,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": max(1, ahead) * reduced,
    }
    if parallel_collectives > 1:
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = parallel_collectives
    return options


def _layer_nbytes(buckets: list[tuple[Bucket, MixedPrecision, int, int]]) -> tuple[int, int]:
    """Bytes that gathering and reducing one layer gives a device: whole tensors, and a shard of their gradients.

    A layer is a bucket of the most numerous kind, of those the largest. The compiler counts what a collective gives,
    not what it takes: with a limit in bytes of whole gradients it would join the reductions of as many layers as
    there are devices, and put all of them off until the last.
    """
    kinds: Counter = Counter()
    for bucket, precision, num_shards, share in buckets:
        gathered = reduced = 0
        for slab in bucket.slabs:
            smooth = jnp.issubdtype(slab.dtype, jnp.floating)
            wide = itemsize(str(precision.param_dtype)) if smooth and precision.param_dtype else itemsize(slab.dtype)
            narrow = itemsize(str(precision.reduce_dtype)) if precision.reduce_dtype else wide
            gathered += slab.shard_numel * share * num_shards * wide
            reduced += slab.shard_numel * share * narrow * smooth
        kinds[gathered, reduced] += bucket.num_copies
    if not kinds:
        return 0, 0
    return max(kinds, key=lambda sizes: (kinds[sizes], sizes))
