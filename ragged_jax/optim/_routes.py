"""Which tensors a matrix optimizer takes and which AdamW: a decision that can be read and overruled. No framework."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from ..layout import itemsize
from ._forms import MatrixDims, as_dims
from ._tensor import Tensor, decide

Kind = Literal["muon", "adamw"]
DimsOf = Callable[..., Any]
"""From a tensor, and a rule of the user, to its `MatrixDims`."""

# One of these, as a part of the path in lower case, sends a tensor to AdamW.
_NOT_HIDDEN = {
    "an embedding": ("*embed*", "wte", "wpe", "tok_emb*", "pos_emb*", "position*_table", "cls", "cls_token"),
    "a head": ("head", "lm_head", "*_head", "head_*", "logits*", "unembed*", "classifier", "output_projection"),
    "a norm": ("*norm*", "ln", "ln_*", "ln[0-9]*", "bn*", "scale", "gamma", "beta"),
    "a bias": ("*bias*",),
}


def route_of(tensor: Tensor, rule: Any = None, dims: DimsOf | None = None) -> tuple[Kind, str]:
    """Where a tensor goes, and why.

    Args:
      tensor: it.
      rule: of the user.
      dims: which dims of a tensor are a matrix as a rule; by default those of Flax.
    """
    if rule is not None and (kind := decide(rule, tensor)) is not None:
        if kind not in ("muon", "adamw"):
            raise ValueError(f"route says {kind!r} of {tensor.name}; it must say 'muon' or 'adamw'")
        if kind == "muon" and len(tensor.layer_shape) < 2:
            raise ValueError(f"route sends {tensor.name} of shape {tensor.layer_shape} to Muon: it is no matrix")
        return kind, "your rule"
    shape = tensor.layer_shape
    parts = tensor.name.lower().split("/")
    for why, patterns in _NOT_HIDDEN.items():
        if any(fnmatchcase(part, pattern) for part in parts for pattern in patterns):
            return "adamw", why
    if len(shape) < 2:
        return "adamw", "a scalar" if not shape else "a vector"
    if 0 in shape or not tensor.dtype.startswith(("float", "bfloat")):
        return "adamw", f"{tensor.dtype}, {tensor.numel} elements"
    reduction, output, _ = as_dims(tensor, (dims or dims_of)(tensor))
    if min(math.prod(tensor.shape[d] for d in part) for part in (reduction, output)) < 2:
        return "adamw", "a single row or column"
    return "muon", "a matrix"


def dims_of(tensor: Tensor, rule: Any = None) -> Any:
    """The `MatrixDims` of a tensor: what the rule says, or what its name and shape suggest.

    Kernels of convolutions (four dims and more, `conv` in the path) multiply over all dims but the last; those of
    Flax's multi-head attention have heads among their outputs, or, under `out`, among their inputs. Of all others the
    last two dims are matrices, and the dims before them a batch: layers, experts.
    """
    if rule is not None and not isinstance(rule, Mapping) and not callable(rule):
        return rule
    if rule is not None and (dims := decide(rule, tensor)) is not None:
        return dims
    parts, ndim = tensor.name.lower().split("/"), len(tensor.layer_shape)
    if ndim >= 3 and any("conv" in part for part in parts):
        return MatrixDims(tuple(range(-ndim, -1)), -1)
    if ndim == 3 and len(parts) > 1 and parts[-1] == "kernel":
        if parts[-2] in ("query", "key", "value", "qkv"):
            return MatrixDims(-3, (-2, -1))
        if parts[-2] == "out":
            return MatrixDims((-3, -2), -1)
    return MatrixDims()


@dataclass(frozen=True)
class Route:
    """Where one tensor goes.

    Attributes:
      name, shape: of the tensor.
      to: which optimizer.
      why: for people.
      matrices: `(how many, rows, columns)`; None under AdamW.
    """

    name: str
    shape: tuple[int, ...]
    to: Kind
    why: str
    matrices: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Routing:
    """Which tensors go to Muon and which to AdamW; prints as a table.

    Attributes:
      routes: of all tensors, in the order of the tree.
      shared: for each slab with tensors of both kinds, their names: `(slab, muon, adamw)`.
      wasted_nbytes: of optimizer state over all devices that no tensor needs, because such slabs are kept whole by
        both (in float32, as `muon` keeps it).
      notes: what else is to be known of this optimizer, a sentence each.
    """

    routes: tuple[Route, ...]
    shared: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]
    wasted_nbytes: int
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Route:
        return next(route for route in self.routes if route.name == name)

    def __str__(self):
        width = max((len(route.name) for route in self.routes), default=0)
        lines = []
        for r in self.routes:
            many = "" if r.matrices is None else f", {r.matrices[0]} of {r.matrices[1]} x {r.matrices[2]}"
            lines.append(f"{r.to:5}  {r.name:{width}}  {r.why}{many}, shape {r.shape}")
        for slab, muon, adamw in self.shared:
            lines.append(f"slab {slab} is shared by {', '.join(muon)} (muon) and {', '.join(adamw)} (adamw).")
        if self.shared:
            lines.append(
                f"Each keeps state for all of these slabs: {self.wasted_nbytes:,} bytes that nothing needs. Updates "
                "are right all the same. To save them, shard with a label for each kind (`label=`)."
            )
        return "\n".join([*lines, *self.notes])


def routing_of(
    tensors: Iterable[Tensor], arrays: Sequence[str], route: Any, dims: Any, dims_of: DimsOf = dims_of
) -> Routing:
    """Where tensors go.

    Args:
      tensors: in the order of the tree.
      arrays: names of the arrays that hold them, by `Tensor.leaf`.
      route, dims: rules of the user.
      dims_of: which dims of a tensor are a matrix as a rule.
    """
    routes = []
    kinds: dict[int, dict[str, list[Tensor]]] = {}
    for tensor in tensors:
        kind, why = route_of(tensor, route, dims_of)
        matrices = None
        if kind == "muon":
            reduction, output, split = as_dims(tensor, dims_of(tensor, dims))
            fan_in, fan_out = (math.prod(tensor.shape[d] for d in part) for part in (reduction, output))
            parts = split if isinstance(split, int) else len(split)
            matrices = tensor.numel // (fan_in * fan_out) * parts, fan_in, fan_out // parts
        routes.append(Route(tensor.name, tensor.shape, kind, why, matrices))
        kinds.setdefault(tensor.leaf, {"muon": [], "adamw": []})[kind].append(tensor)
    shared, wasted = [], 0
    for at, by in kinds.items():
        if by["muon"] and by["adamw"]:
            shared.append((arrays[at], *(tuple(t.name for t in by[kind]) for kind in ("muon", "adamw"))))
            size = itemsize("float32")
            wasted += size * (sum(t.numel for t in by["adamw"]) + 2 * sum(t.numel for t in by["muon"]))
    return Routing(tuple(routes), tuple(shared), wasted)
