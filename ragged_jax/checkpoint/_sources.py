"""Which saved tensors a wanted one is made of: layers in a list and layers in a stack are the same."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ..layout import named
from ._manifest import TensorEntry


class Source(NamedTuple):
    """Where elements of a wanted tensor come from: `numel` of them, in row-major order.

    Usually a whole tensor of the same name. A stack of layers may come from tensors of one layer each, and a layer
    from a stack.
    """

    name: str
    wanted: int
    held: int
    numel: int


def find_sources(tensors: Mapping[str, TensorEntry], name: str, shape: tuple[int, ...]) -> list[Source]:
    """Where a tensor's elements come from among others; nothing if it is not there, or in another shape.

    Args:
      tensors: by name, those there are.
      name, shape: of the tensor. A stack `P/rest` of layers may be there as `P/0/rest`, `P/1/rest` and so on, if
        there are no more of them; and a layer as part of such a stack.
    """
    if name in tensors:
        return [Source(name, 0, 0, math.prod(shape))] if tensors[name].shape == tuple(shape) else []
    return _from_layers(tensors, name, shape) or _from_stack(tensors, name, shape)


def shape_of(tensors: Mapping[str, TensorEntry], name: str) -> tuple[int, ...] | None:
    """The shape in which a tensor is there, also as a list of layers; None if it is not there."""
    if name in tensors:
        return tensors[name].shape
    for first, *rest in _as_layers(tensors, name):
        if all(tensors[layer].shape == tensors[first].shape for layer in rest):
            return (1 + len(rest), *tensors[first].shape)
    return None


def _as_layers(tensors: Mapping[str, TensorEntry], name: str) -> Iterator[list[str]]:
    """The lists of layers that a stack of this name may be there as."""
    steps = name.split("/")
    for at in range(len(steps), -1, -1):
        layers: list[str] = []
        while (layer := "/".join((*steps[:at], str(len(layers)), *steps[at:]))) in tensors:
            layers.append(layer)
        if layers:
            yield layers


def _from_layers(tensors: Mapping[str, TensorEntry], name: str, shape: tuple[int, ...]) -> list[Source]:
    numel = math.prod(shape[1:])
    for names in _as_layers(tensors, name):
        if (len(names),) == shape[:1] and all(tensors[n].shape == tuple(shape[1:]) for n in names):
            return [Source(n, layer * numel, 0, numel) for layer, n in enumerate(names)]
    return []


def _from_stack(tensors: Mapping[str, TensorEntry], name: str, shape: tuple[int, ...]) -> list[Source]:
    steps, numel = name.split("/"), math.prod(shape)
    for at in (at for at, step in enumerate(steps) if step.isdecimal()):
        stack, layer = "/".join((*steps[:at], *steps[at + 1 :])), int(steps[at])
        saved = tensors[stack].shape if stack in tensors else ()
        if saved[1:] == tuple(shape) and saved and layer < saved[0]:
            return [Source(stack, 0, layer * numel, numel)]
    return []


def left_out(tensors: Mapping[str, TensorEntry], sources: Iterable[Source]) -> Iterator[str]:
    """Layers that nobody takes while others of the same list or stack are taken, a line for each tensor of a layer.

    Whatever a number in their names tells apart counts as layers, but for scalars.
    """
    taken: Counter[str] = Counter()
    for source in sources:
        taken[source.name] += source.numel
    lists: dict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for name, entry in tensors.items():
        if name in taken and taken[name] < entry.numel:
            held = entry.shape[0]
            yield f"{name}: {held} layers saved, {taken[name] * held // entry.numel} wanted"
        steps = name.split("/")
        for at in (at for at, step in enumerate(steps) if step.isdecimal() and entry.shape):
            lists["/".join((*steps[:at], "*", *steps[at + 1 :]))][name not in taken].append(int(steps[at]))
    for name, (wanted, others) in lists.items():
        if wanted and others:
            numbers = named(map(str, sorted(others)))
            yield f"{name}: {len(wanted) + len(others)} layers saved, {len(wanted)} wanted, without {numbers}"
