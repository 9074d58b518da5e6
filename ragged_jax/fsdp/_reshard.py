"""Which units drop their gathered weights after the forward pass, and gather them again in backward."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from . import _check as check

ReshardRule = bool | int | Mapping[str, bool]


def reshard_flags(rule: ReshardRule, names: Sequence[str]) -> dict[str, bool]:
    """For each unit, whether it drops its gathered weights.

    Args:
      rule: one answer for all; or an int k, for all but the last k; or a mapping from path patterns to answers,
        where the first pattern that matches wins and a unit that nothing matches drops.
      names: the units' paths in the order in which they are called.

    Raises:
      ValueError: a pattern that matches nothing, or k that is negative or larger than the number of units.
      TypeError: any other rule.

    Example:
      >>> reshard_flags(1, ["blocks/0", "blocks/1"])
      {'blocks/0': True, 'blocks/1': False}
    """
    check.patterns_match("reshard_after_forward", rule, names)
    if isinstance(rule, bool):
        return dict.fromkeys(names, rule)
    if isinstance(rule, int):
        if not 0 <= rule <= len(names):
            raise ValueError(f"reshard_after_forward={rule} keeps the last {rule} of {len(names)} units gathered")
        return {name: i < len(names) - rule for i, name in enumerate(names)}
    if isinstance(rule, Mapping) and all(isinstance(value, bool) for value in rule.values()):
        return {name: next((v for p, v in rule.items() if fnmatchcase(name, p)), True) for name in names}
    raise TypeError(f"reshard_after_forward={rule!r} is neither a bool, an int nor a mapping from patterns to bools")
