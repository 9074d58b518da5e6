"""Rules that choose submodules: a class, a pattern of the path, several of these, or a predicate."""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

ModuleUnits = type | str | tuple[type | str, ...] | Callable[[str, Any], bool] | None


def matches(rule: ModuleUnits, path: str, module: Any, outer: Iterable[str] | None = None) -> bool:
    """Whether a rule chooses the module at a path such as `blocks/0`.

    A pattern chooses no module inside of one that it chooses: `blocks/*` means the blocks, not all that is in them.
    `outer` are the paths of the modules around, by default all that the path goes through.

    Raises:
      TypeError: it is not a rule.

    Example:
      >>> [matches("blocks/*", path, None) for path in ("blocks", "blocks/0", "blocks/0/up")]
      [False, True, False]
    """
    if rule is None:
        return False
    if isinstance(rule, tuple):
        return any(matches(one, path, module, outer) for one in rule)
    if isinstance(rule, str):
        outer = (path[:at] for at, char in enumerate(path) if char == "/") if outer is None else outer
        return fnmatchcase(path, rule) and not any(fnmatchcase(folder, rule) for folder in outer)
    if isinstance(rule, type):
        return isinstance(module, rule)
    if not callable(rule):
        raise TypeError(f"units and stacked take a class, a path pattern, several, or a predicate, got {rule!r}")
    return rule(path, module)
