"""Parameter shapes from files: the groups that a plan starts from.

A shapes file is JSON:

    {"name": "GPT-2", "groups": [
        {"name": "transformer.h.0", "count": 12, "tensors": [
            {"name": "attn.c_attn.weight", "shape": [768, 2304], "dtype": "bfloat16"}]}]}

where `count` layers of a group are alike and need not be written out.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from .checkpoint import CheckpointError
from .checkpoint._headers import read_header
from .layout import Block, BlockRule, TensorSpec, block_for, distinct_keys, listed
from .planner import Group


class ShapesError(ValueError):
    """A file that should hold parameter shapes does not."""


@with_config(ConfigDict(extra="ignore", strict=True))
@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: list[Annotated[int, Field(ge=0)]]
    dtype: str = "bfloat16"


@with_config(ConfigDict(extra="ignore", strict=True))
@dataclass(frozen=True)
class _Group:
    name: str
    tensors: list[_Tensor]
    count: Annotated[int, Field(ge=1, le=100_000)] = 1


@with_config(ConfigDict(extra="ignore", strict=True))
@dataclass(frozen=True)
class _Model:
    groups: list[_Group]


def read_shapes(path: str | Path, block: BlockRule) -> list[Group]:
    """The groups of a shapes file, a safetensors file, or a safetensors index.

    Args:
      path: the file.
      block: what must stay on one device; see `with_block` for stacked experts.

    Raises:
      ShapesError: the file cannot be read or does not say what it must; one message names every fault.
    """
    path = Path(path)
    if path.is_dir():
        found = sorted(path.glob("*.safetensors.index.json")) or sorted(path.glob("*.safetensors"))
        raise ShapesError(
            f"{path} is a directory; give a file of shapes, a safetensors file or the index of several"
            + "".join(f", such as {file}" for file in found[:1])
        )
    try:
        if path.suffix == ".safetensors":
            return _by_layer(_safetensors_header(path), block)
        document = _read_json(path)
        if isinstance(document, dict) and isinstance(document.get("weight_map"), dict):
            return _by_layer(_safetensors_index(path, document["weight_map"]), block)
    except OSError as error:
        raise ShapesError(f"{path}: {error.strerror or error}") from None
    return groups_from(document, block, source=str(path))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes(), object_pairs_hook=distinct_keys)
    except (ValueError, RecursionError) as error:
        raise ShapesError(f"{path}: not JSON: {error}") from None


def groups_from(document: Any, block: BlockRule, *, source: str = "shapes") -> list[Group]:
    """The groups of a shapes document that has been read already."""
    try:
        model: _Model = TypeAdapter(_Model).validate_json(json.dumps(document))
        return [group for entry in model.groups for group in _expand(entry, block)]
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, fault['loc'])) or 'document'}: {fault['msg']}"
            for fault in error.errors(include_url=False)
        ]
        raise ShapesError(f"{source}: not a file of shapes:" + listed(faults)) from None
    except ValueError as error:
        raise ShapesError(f"{source}: {error}") from None


def _expand(entry: _Group, block: BlockRule) -> Iterable[Group]:
    for k in range(entry.count):
        name = entry.name if entry.count == 1 else f"{entry.name}[{k}]"
        yield Group(
            name,
            tuple(
                with_block(TensorSpec(f"{name}/{tensor.name}", tuple(tensor.shape), tensor.dtype), block)
                for tensor in entry.tensors
            ),
        )


def with_block(tensor: TensorSpec, rule: BlockRule) -> TensorSpec:
    """The tensor with the block that the rule gives it.

    Three dims under a name that speaks of experts are a stack of matrices: `rows` then counts rows of one
    expert, and `whole` keeps each expert whole, not all of them together.
    """
    block = block_for(tensor.name, rule)
    if len(tensor.shape) == 3 and "expert" in tensor.name:
        if block.kind == "rows" and block.dim == 0:
            block = replace(block, dim=1)
        elif block.kind == "whole":
            block = Block("rows", (max(1, tensor.shape[1]),), 1)
    return replace(tensor, block=block)


def model_groups(
    factory: str, block: BlockRule, units: Sequence[str] = (), stacked: Sequence[str] = ()
) -> list[Group]:
    """The groups of a Flax model, built abstractly: nothing is allocated.

    Args:
      factory: `module:function`. The function takes no arguments and returns an NNX module, or `(module,
        example inputs...)` for Linen.
      block: what must stay on one device.
      units, stacked: patterns of the submodules' paths, as for `fully_shard`, which then has these groups, too.
        Without them a group is a numbered layer, or what has the same first two names.

    Raises:
      ShapesError: there is no such function, or it does not return a model.
      ValueError: a pattern that matches nothing.
    """
    import importlib
    import os
    import sys

    module_name, _, name = factory.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ShapesError(f"{factory}: {error}") from None
    finally:
        sys.path.pop(0)
    made, inputs = _abstract_model(factory, make)
    if units or stacked:
        from . import adapters as adapters  # they register their models with the functions of fsdp
        from .fsdp import groups_of

        return groups_of(made, block, tuple(units) or None, tuple(stacked) or None, *inputs)
    leaves = _abstract_leaves(made, inputs)
    shapes = {path: (tuple(leaf.shape), str(leaf.dtype)) for path, leaf in leaves if hasattr(leaf, "dtype")}
    return _by_layer(shapes, block)


def _abstract_model(factory: str, make: Any) -> tuple[Any, tuple[Any, ...]]:
    """A Flax module without values, and for Linen its example inputs."""
    from flax import linen, nnx

    try:
        made = nnx.eval_shape(make)
    except Exception:  # a Linen factory returns what NNX cannot trace
        try:
            made = make()
        except TypeError as error:  # most often: it wants arguments
            raise ShapesError(f"{factory}() does not return a model: {error}") from error
    if isinstance(made, nnx.Module):
        return made, ()
    if isinstance(made, tuple) and made and isinstance(made[0], linen.Module):
        return made[0], made[1:]
    raise ShapesError(
        f"{factory}() must return an NNX module, or a Linen module and inputs; got {type(made).__name__}"
    )


def _abstract_leaves(made: Any, inputs: tuple[Any, ...]) -> list[tuple[str, Any]]:
    import jax
    from flax import nnx

    def path_of(keys: Any) -> str:
        return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in keys)

    if isinstance(made, nnx.Module):
        tree = nnx.to_pure_dict(nnx.state(made, nnx.Param))
    else:
        tree = jax.eval_shape(made.init, jax.random.key(0), *inputs)["params"]
    return [(path_of(keys), leaf) for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _safetensors_header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of a safetensors file; the weights are not read."""
    try:
        return {
            name: (entry.shape, entry.dtype) for name, entry in read_header(path, with_data=False).entries.items()
        }
    except CheckpointError as error:
        raise ShapesError(str(error)) from None


def _safetensors_index(path: Path, weight_map: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes of the files an index names; they must lie beside it."""
    files = sorted({str(file) for file in weight_map.values()})
    missing = [file for file in files if Path(file).name != file or not (path.parent / file).is_file()]
    if missing:
        raise ShapesError(f"{path}: the index names files that are not beside it: {', '.join(missing[:5])}")
    return {name: entry for file in files for name, entry in _safetensors_header(path.parent / file).items()}


def _by_layer(tensors: Mapping[str, tuple[tuple[int, ...], str]], block: BlockRule) -> list[Group]:
    """One group for each numbered layer (`model.layers.7.`), the rest by its first two names."""
    groups: dict[str, list[TensorSpec]] = defaultdict(list)
    try:
        for name, (shape, dtype) in tensors.items():
            parts = name.replace("/", ".").split(".")
            number = next((i for i, part in enumerate(parts[:-1]) if part.isdecimal()), min(1, len(parts) - 1))
            groups[".".join(parts[: number + 1])].append(with_block(TensorSpec(name, shape, dtype), block))
    except ValueError as error:
        raise ShapesError(str(error)) from None
    return [Group(name, tuple(members)) for name, members in sorted(groups.items(), key=_natural)]


def _natural(pair: tuple[str, Any]) -> list[tuple[int, int, str]]:
    """Sorts `layers.10` behind `layers.9`."""
    return [(1, int(p), "") if p.isdecimal() else (0, 0, p) for p in pair[0].split(".")]


def num_params(groups: Iterable[Group]) -> int:
    """Elements of all tensors."""
    return sum(math.prod(t.shape) * (g.stack or 1) for g in groups for t in g.tensors)
