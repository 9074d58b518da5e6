"""Reductions of whole ragged tensors: a number from every rank, put together the same way on all of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate

from ._collectives import start_gather
from ._geometry import Geometry

Partials = Callable[[torch.Tensor], torch.Tensor]


class Reduction(NamedTuple):
    """A reduction in two steps.

    Attributes:
      here: this rank's elements to one number.
      joint: the numbers of all ranks, in one dim, to one.
    """

    here: Partials
    joint: Partials


def _wide(x: torch.Tensor) -> torch.dtype | None:
    """The dtype to add up in: partial sums are not rounded to 16 bits."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else None


def _extreme(name: str, given: Mapping[str, Any]) -> Reduction:
    highest = name in ("amax", "max", "_foreach_max")
    pick = torch.amax if highest else torch.amin

    def here(x: torch.Tensor) -> torch.Tensor:
        if x.numel():
            return pick(x)
        info = (
            torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype) if x.dtype != torch.bool else None
        )
        lowest, top = (
            (-math.inf, math.inf) if x.is_floating_point() else (info.min, info.max) if info else (False, True)
        )
        return torch.full((), lowest if highest else top, dtype=x.dtype, device=x.device)

    return Reduction(here, pick)


def _norm(ord: float, dtype: torch.dtype | None) -> Reduction:
    def here(x: torch.Tensor) -> torch.Tensor:
        kind = dtype or _wide(x) or x.dtype  # the same on a rank without elements
        if not x.numel() and (ord < 0 or math.isinf(ord)):
            return torch.full((), 0.0 if ord > 0 else math.inf, dtype=kind, device=x.device).abs()
        return torch.linalg.vector_norm(x, ord, dtype=kind)

    def joint(parts: torch.Tensor) -> torch.Tensor:
        return parts.sum() if ord == 0 else torch.linalg.vector_norm(parts, ord)

    return Reduction(here, joint)


def _reduction(name: str, given: Mapping[str, Any], x: torch.Tensor, numel: int) -> tuple[Reduction, torch.dtype]:
    """How to reduce, and the dtype of the result."""
    if name in ("linalg_vector_norm", "norm", "_foreach_norm"):
        ord = given.get("ord", given.get("p"))
        ord = 2.0 if ord is None else float(ord)
        if not (x.is_floating_point() or x.is_complex()):  # on every rank, also on one without elements
            raise RuntimeError(f"{name}: a norm is of floating-point or complex numbers, not of {x.dtype}")
        if not numel and (ord < 0 or math.isinf(ord)):
            raise RuntimeError(f"{name}: a tensor without elements has no {ord} norm")
        real = torch.empty(0, dtype=x.dtype).abs().dtype
        return _norm(ord, given.get("dtype")), given.get("dtype") or real
    if name in ("amax", "amin", "max", "min", "_foreach_max"):
        return _extreme(name, given), x.dtype
    if name in ("any", "all"):
        kind = torch.uint8 if x.dtype == torch.uint8 else torch.bool
        pick = torch.any if name == "any" else torch.all
        return Reduction(pick, pick), kind
    if name == "count_nonzero":
        return Reduction(torch.count_nonzero, torch.sum), torch.int64
    integral = not (x.is_floating_point() or x.is_complex())
    dtype = given.get("dtype") or (torch.int64 if integral else x.dtype)
    if name == "mean" and integral and given.get("dtype") is None:
        raise RuntimeError(f"mean(): the dtype of the result must be given for a tensor of {x.dtype}")
    total = torch.prod if name == "prod" else torch.sum
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

    def joint(parts: torch.Tensor) -> torch.Tensor:
        return total(parts, dtype=wide) / numel if name == "mean" else total(parts, dtype=wide)

    return Reduction(lambda x: total(x.to(dtype) if integral else x, dtype=wide), joint), dtype


REDUCTIONS = {"sum", "mean", "prod", "amax", "amin", "max", "min", "any", "all", "count_nonzero"}
REDUCTIONS |= {"linalg_vector_norm", "norm", "_foreach_norm", "_foreach_max"}


def is_reduction(func: Any, name: str) -> bool:
    """Whether an operation puts all elements of each tensor together."""
    return name in REDUCTIONS and (name not in ("max", "min") or func._overloadname == "default")


def reduce_whole(cls: type, func: Any, name: str, given: Mapping[str, Any]) -> Any:
    """A reduction over all dims of a tensor, or of each of several, as replicated DTensors.

    Raises:
      NotImplementedError: over some of the dims, or with dims kept.
    """
    many = name.startswith("_foreach_")
    xs = given["self"] if many else [given["self"]]
    if not all(isinstance(x, cls) for x in xs):
        raise NotImplementedError(f"{func} of RaggedTensors and ordinary tensors in one list; use foreach=False")
    dims, ndim = given.get("dim"), xs[0].ndim
    dims = [dims] if isinstance(dims, int) else dims
    others = set(given) - {"self", "dim", "keepdim", "dtype", "ord", "p"}
    if (
        given.get("keepdim")
        or others
        or (dims is not None and not dims and name in ("any", "all"))  # these take no dims as none at all
        or (dims and sorted(d % max(1, ndim) for d in dims) != list(range(max(1, ndim))))
    ):
        raise NotImplementedError(
            f"{func} of a RaggedTensor over dims {dims} of {ndim}: it reduces all dims and keeps none; take rows "
            "(`x.redistribute(placements=[Shard(0)])`) or the whole tensor (`x.full_tensor()`)"
        )
    empty = [tuple(x.shape) for x in xs if not x.numel()]
    if name in ("max", "min", "amax", "amin", "_foreach_max") and empty:
        raise RuntimeError(f"{func}: the tensor {empty[0]} has no elements")
    plans = [_reduction(name, given, x._local_tensor, x.numel()) for x in xs]
    parts = [plan.here(x._local_tensor) for (plan, _), x in zip(plans, xs, strict=True)]
    made: list[Any] = [None] * len(xs)
    for group in _groups(xs, parts):
        table = collected(torch.stack([parts[i] for i in group]), xs[group[0]].geometry)
        for column, i in enumerate(group):
            plan, dtype = plans[i]
            made[i] = _replicated(plan.joint(table[:, column]).to(dtype), xs[i].geometry)
    return made if many else made[0]


def _groups(xs: Sequence[Any], parts: Sequence[torch.Tensor]) -> list[list[int]]:
    """Which numbers can go in one call: those of one dtype, from the same ranks."""
    found: dict[Any, list[int]] = {}
    for i, (x, part) in enumerate(zip(xs, parts, strict=True)):
        ranks = tuple(type(p).__name__ for p in x.placements)
        found.setdefault((part.dtype, part.device, ranks, id(x.device_mesh)), []).append(i)
    return list(found.values())


def collected(row: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """A row of numbers from each rank that holds another part of the tensor, `[ranks, numbers]`."""
    table = row.view(1, -1)
    for dim, placement in enumerate(geometry.placements):
        if not isinstance(placement, Replicate):
            size = geometry.mesh.size(dim)
            every = table.new_empty((size, *table.shape))
            views = [every.view(-1).view(torch.uint8)], [table.reshape(-1).view(torch.uint8)]
            start_gather(*views, geometry.mesh.get_group(dim), None).wait()
            table = every.view(-1, table.shape[-1])
    return table


def _replicated(value: torch.Tensor, geometry: Geometry) -> DTensor:
    return DTensor.from_local(value.detach(), geometry.mesh, [Replicate()] * geometry.mesh.ndim)
