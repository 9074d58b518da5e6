"""Which tensors of a state become which of another one, by name; or everything in which they differ."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..checkpoint import TensorEntry, find_sources
from ..layout import listed
from ._state import Item

_OWNED = "owned/on "  # in the paths of that state


class Source(NamedTuple):
    """Elements of a tensor in another state: `numel` from `held` on become those from `wanted` on."""

    item: int
    name: str
    wanted: int
    held: int
    numel: int


def matched(have: Sequence[Item], want: Sequence[Item]) -> dict[str, list[Source]]:
    """For each tensor of a state that is wanted, what it is made of in the one that there is.

    Raises:
      ValueError: a tensor is missing, or would be lost, or is another one; every difference is listed.
    """
    entries: dict[str, TensorEntry] = {}
    owner: dict[str, int] = {}
    for at, item in enumerate(have):
        for name, entry in item.tensors().items():
            entries[name], owner[name] = entry, at
    sources: dict[str, list[Source]] = {}
    faults, taken = [], Counter[str]()
    for item in want:
        for name, entry in item.tensors().items():
            found = find_sources(entries, name, entry.shape)
            sources[name] = [Source(owner[s.name], s.name, s.wanted, s.held, s.numel) for s in found]
            taken.update({source.name: source.numel for source in found})
            if not found and name in entries:
                faults.append(f"{name}: shape {entries[name].shape}, wanted with {entry.shape}")
                taken[name] = entries[name].numel
            elif not found:
                faults.append(f"{name}: not in the state")
            for source in sources[name][:1]:
                faults += _unlike(name, entries[source.name], entry)
    faults += [f"{name}: not wanted, and would be lost" for name in entries.keys() - taken.keys()]
    faults += [
        f"{name}: {numel} of its {entries[name].numel} elements are wanted, the others would be lost"
        for name, numel in taken.items()
        if numel < entries[name].numel
    ]
    if faults:
        raise ValueError("this state cannot become that one:" + listed(sorted(faults)) + owners_hint(faults))
    return sources


def _unlike(name: str, there: TensorEntry, wanted: TensorEntry) -> list[str]:
    faults = []
    if there.dtype != wanted.dtype:
        faults.append(f"{name}: {there.dtype}, wanted as {wanted.dtype}")
    if there.attributes != wanted.attributes:
        faults.append(f"{name}: {there.attributes}, wanted with {wanted.attributes}")
    return faults


def owners_hint(faults: Iterable[str]) -> str:
    """What to do where faults speak of the state of `with_tensors`."""
    if not any(_OWNED in fault for fault in faults):
        return ""
    return (
        "\nThe state of `with_tensors` is its owners', and nothing takes it to others. Keep the devices and the "
        "layout for it, or begin it anew: leave it out of what is moved or restored, and call `tx.init`."
    )
