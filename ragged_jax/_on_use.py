"""Names of a package that are loaded when they are first used, so that importing it stays light."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_use(package: dict[str, Any], where: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`; gives it an `__all__`, too.

    Args:
      package: its `globals()`; a name is put there once it has been loaded.
      where: by name, the submodule that has it; of a submodule its own name.
    """
    package["__all__"] = sorted(where)

    def load(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        module = import_module(f"{package['__name__']}.{where[name]}")
        package[name] = value = module if where[name] == name else getattr(module, name)
        return value

    return load, lambda: sorted(where)
