"""How messages list what is wrong: with names, but not thousands of them."""

from collections.abc import Iterable

_SHOWN = 50


def listed(faults: Iterable[str]) -> str:
    """Faults as the end of a message: each on a line of its own, the first 50, and how many more there are.

    Example:
      >>> print("these are not sharded:" + listed(["up/kernel: int32", "up/bias: int8"]))
      these are not sharded:
        up/kernel: int32
        up/bias: int8
    """
    return "".join(f"\n  {line}" for line in _some(faults))


def named(names: Iterable[str]) -> str:
    """Names within a sentence: the first 50, and how many more there are.

    Example:
      >>> named(str(i) for i in range(52))[-18:]
      '48, 49, and 2 more'
    """
    return ", ".join(_some(names))


def _some(lines: Iterable[str]) -> list[str]:
    found = [*lines]
    return found if len(found) <= _SHOWN else [*found[:_SHOWN], f"and {len(found) - _SHOWN} more"]
