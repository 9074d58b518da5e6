"""Several layers in one bucket: less padding for more gathered memory."""

from collections.abc import Sequence
from itertools import groupby

from ._group import Group


def merge_layers(groups: Sequence[Group], num_layers: int) -> list[Group]:
    """Joins up to `num_layers` neighbours that have the same tensors but for their names.

    Layers that are stacked under a scan stay as they are: the scan gathers them one by one.

    Example:
      >>> from ragged_jax.layout import TensorSpec
      >>> layers = [Group(f"layers/{i}", (TensorSpec(f"layers/{i}/w", (4, 4)),)) for i in range(3)]
      >>> [group.name for group in merge_layers(layers, 2)]
      ['layers/0..layers/1', 'layers/2']
    """
    if num_layers == 1:
        return list(groups)
    merged = []
    for (_, is_stack), like in groupby(groups, key=lambda group: (_kinds(group), group.stack is not None)):
        layers = list(like)
        step = 1 if is_stack else num_layers
        merged += [_join(layers[i : i + step]) for i in range(0, len(layers), step)]
    return merged


def _kinds(group: Group) -> list[tuple]:
    return sorted((t.dtype, t.shape, repr(t.block), t.splits) for t in group.tensors)


def _join(layers: Sequence[Group]) -> Group:
    if len(layers) == 1:
        return layers[0]
    name = f"{layers[0].name}..{layers[-1].name}"
    return Group(name, tuple(tensor for layer in layers for tensor in layer.tensors))
