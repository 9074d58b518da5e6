"""Labels of tensors: names for parts of a model that are trained apart, such as frozen ones."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from ..layout import Slab
from ..planner import Group
from . import _check as check

LabelRule = Mapping[str, str] | Callable[[str], str] | None


def label_groups(groups: Iterable[Group], rule: LabelRule) -> list[Group]:
    """The groups with each tensor's label: of a mapping, that of the first pattern that its path matches.

    Raises:
      ValueError: a pattern that matches nothing.
      TypeError: a label that is not a string.
    """
    groups = list(groups)
    check.patterns_match("label", rule, [tensor.name for group in groups for tensor in group.tensors])
    if rule is None:
        return groups

    def label(name: str) -> str:
        found = rule(name) if callable(rule) else next((v for p, v in rule.items() if fnmatchcase(name, p)), "")
        if not isinstance(found, str) or ":" in found:
            raise TypeError(f"label: {name} got {found!r}; a label is a string without a colon")
        return found

    def labelled(group: Group) -> Group:
        joined = [replace(t, label=":".join(filter(None, (t.label, label(t.name))))) for t in group.tensors]
        return replace(group, tensors=tuple(joined))

    return [labelled(group) for group in groups]


def has_label(slab: Slab, labels: Iterable[str]) -> bool:
    """Whether the tensors of a slab have one of the labels; all of them have the same."""
    return not set(labels).isdisjoint(slab.placements[0].tensor.label.split(":"))
