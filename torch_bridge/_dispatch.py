"""What operations do to ragged tensors: on this rank's elements, where that is right, and an error elsewhere."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from ._geometry import Geometry
from ._operands import bound, flat, operand, unsupported, written
from ._placement import RaggedShard
from ._reductions import collected, is_reduction, reduce_whole

# They act on each element alone, and carry no tag that says so.
UNTAGGED = {"clone", "copy", "_to_copy", "fill", "zero", "masked_fill", "zeros_like", "ones_like", "empty_like"}
UNTAGGED |= {"full_like", "floor_divide", "rsub", "hardswish", "hardswish_backward"}
TWO_MEANINGS = {"max", "min", "norm", "powsum"}  # elementwise with two operands, else a reduction
FUSED = {"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"}
TRANSPOSES = {"t", "transpose", "permute"}
RESHAPES = {"view", "_unsafe_view", "unsqueeze", "squeeze"}
COMPARISONS = {"equal", "allclose"}  # to one bool


def dispatch(cls: type, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operation of which at least one operand is ragged.

    Raises:
      NotImplementedError: by name, whatever is not known to be right.
    """
    name = func._schema.name.removeprefix("aten::")
    given = bound(func, args, kwargs)
    ragged = [x for x in flat(given.values()) if isinstance(x, cls)]
    if name in ("detach", "alias"):
        return args[0]._like(func(args[0]._local_tensor))
    if name in TRANSPOSES:
        return _transposed(func, name, args[0], given)
    if name in RESHAPES and func._overloadname != "dtype":
        return _reshaped(func, args[0], args[1:])
    if is_reduction(func, name):
        return reduce_whole(cls, func, name, given)
    if name in COMPARISONS:
        pair = [operand(cls, func, x, ragged[0]) for x in args[:2]]
        if not ragged[0].ndim:
            pair = [x.expand(ragged[0]._local_tensor.shape) for x in pair]
        here = func(*pair, *args[2:], **kwargs)
        return bool(collected(torch.tensor([here], device=ragged[0].device), ragged[0].geometry).all())
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return _unscale(cls, func, args)
    if name in FUSED or _is_elementwise(func):
        return _elementwise(cls, func, args, kwargs, ragged[0])
    raise unsupported(func, ragged[0])


@cache
def _is_elementwise(func: Any) -> bool:
    """Whether every element of the result depends on those at the same place alone."""
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return False  # random numbers would repeat on every rank
    full = func._schema.name.removeprefix("aten::")
    name = full.removeprefix("_foreach_")
    if name in UNTAGGED or torch.Tag.pointwise in func.tags:
        return True
    # In place, foreach and out= variants are not tagged themselves.
    base = getattr(torch.ops.aten, name.removesuffix("_"), None)
    is_variant = name != full or name.endswith("_") or func._overloadname.endswith("out")
    if base is None or not is_variant or name in TWO_MEANINGS:
        return False
    tags = [getattr(base, overload).tags for overload in base.overloads()]
    seeded = any(torch.Tag.nondeterministic_seeded in each for each in tags)
    return not seeded and (base.__name__ in UNTAGGED or any(torch.Tag.pointwise in each for each in tags))


def _elementwise(cls: type, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], first: Any) -> Any:
    lists = [value for value in args if isinstance(value, list | tuple) and any(isinstance(x, cls) for x in value)]
    refs = lists[0] if lists else [first]
    if any(not isinstance(x, cls) for value in lists for x in value):
        raise NotImplementedError(f"{func} of RaggedTensors and ordinary tensors in one list; use foreach=False")
    changed = [value for name in written(func) for value in flat([bound(func, args, kwargs)[name]])]
    if changed and not any(isinstance(x, cls) for x in flat([args])):
        raise unsupported(func, first)  # numbers into `out`, which would take their shape
    if any(isinstance(x, torch.Tensor) and not isinstance(x, cls) for x in changed):
        raise NotImplementedError(
            f"{func} changes an ordinary tensor by a RaggedTensor, of which this rank has a part"
        )

    def local(value: Any) -> Any:
        if isinstance(value, list | tuple) and any(isinstance(x, torch.Tensor) for x in value):
            return [_local(cls, func, x, ref) for x, ref in zip(value, refs, strict=True)]
        if isinstance(value, torch.Tensor) and lists and value.ndim:
            raise NotImplementedError(f"{func} of a list and a tensor {tuple(value.shape)}, which is no scalar")
        return (
            next(iter([_local(cls, func, value, ref) for ref in refs])) if isinstance(value, torch.Tensor) else value
        )

    keywords = {key: local(value) for key, value in kwargs.items()}
    _drop_memory_format(func, keywords, first)
    made = func(*(local(value) for value in args), **keywords)
    if written(func):
        if not func._schema.returns:
            return None
        return changed[0] if len(changed) == 1 else tuple(changed)
    if lists or isinstance(made, list | tuple):
        refs = refs if lists else refs * len(made)
        return type(made)(_wrapped(func, x, ref) for x, ref in zip(made, refs, strict=True))
    return _wrapped(func, made, first)


def _local(cls: type, func: Any, x: torch.Tensor, ref: Any) -> torch.Tensor:
    is_step = func._schema.name.removeprefix("aten::") in FUSED and not isinstance(x, cls) and not x.ndim
    return x if is_step else operand(cls, func, x, ref)


def _wrapped(func: Any, local: torch.Tensor, ref: Any) -> Any:
    if local.shape != ref._local_tensor.shape:
        raise unsupported(func, ref)
    return ref._like(local)


def _drop_memory_format(func: Any, keywords: dict[str, Any], x: Any) -> None:
    wanted = keywords.pop("memory_format", None)
    if wanted not in (None, torch.preserve_format) and not (
        wanted == torch.contiguous_format and x.geometry.is_row_major
    ):
        raise NotImplementedError(f"{func} of a RaggedTensor to {wanted}: elements would move between ranks")


def _transposed(func: Any, name: str, x: Any, given: Mapping[str, Any]) -> Any:
    """The same elements, in the same order of memory, under other names of the dims."""
    held: Geometry = x.geometry
    if held.placement.splits:
        raise unsupported(func, x)
    dims = list(range(x.ndim))
    if name == "permute":
        dims = [dim % x.ndim for dim in given["dims"]]
    elif x.ndim > 1 or name == "transpose":
        a, b = (given["dim0"], given["dim1"]) if name == "transpose" else (0, 1)
        if x.ndim:
            dims[a], dims[b] = dims[b], dims[a]
    shape = tuple(held.shape[dim] for dim in dims)
    order = tuple(dims.index(dim) for dim in held.order)
    return x._like(x._local_tensor.view(-1), Geometry(shape, order, held.mesh, held.placements))


def _reshaped(func: Any, x: Any, rest: Sequence[Any]) -> Any:
    """The same elements, in the same order, under another shape."""
    held: Geometry = x.geometry
    shape = tuple(func(torch.empty(held.shape, device="meta"), *rest).shape)
    if shape != held.shape and (held.placement.splits or not held.is_row_major):
        raise unsupported(func, x)
    if shape == held.shape:
        return x._like(x._local_tensor.view(-1))
    units = RaggedShard.of(type(held.placement.ragged).from_numels(shape, held.numels))
    placements = tuple(units if isinstance(p, RaggedShard) else p for p in held.placements)
    return x._like(x._local_tensor.view(-1), Geometry(shape, tuple(range(len(shape))), held.mesh, placements))


def _unscale(cls: type, func: Any, args: Sequence[Any]) -> None:
    """The check of a gradient scaler: what one rank finds, all find."""
    grads, found, scale = args
    if not all(isinstance(grad, cls) for grad in grads):
        raise NotImplementedError(f"{func} of ragged and ordinary tensors in one list")
    func([grad._local_tensor for grad in grads], found, scale)
    for geometry in {id(grad.geometry.mesh): grad.geometry for grad in grads}.values():
        found.copy_(collected(found.reshape(1), geometry).amax())
