"""optax transforms for sharded and ordinary parameters, and their numpy references.

Public names load on first use, so that the references work without JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._adam8bit import FusedOptimizer as FusedOptimizer
    from ._adam8bit import Moment8bit as Moment8bit
    from ._adam8bit import ScaleByAdam8bitState as ScaleByAdam8bitState
    from ._adam8bit import adamw8bit as adamw8bit
    from ._adam8bit import fused_adamw8bit as fused_adamw8bit
    from ._adam8bit import scale_by_adam8bit as scale_by_adam8bit
    from ._maps import CodeMap as CodeMap
    from ._maps import code_map as code_map

_WHERE = {
    "CodeMap": "_maps",
    "FusedOptimizer": "_adam8bit",
    "Moment8bit": "_adam8bit",
    "ScaleByAdam8bitState": "_adam8bit",
    "adamw8bit": "_adam8bit",
    "code_map": "_maps",
    "fused_adamw8bit": "_adam8bit",
    "scale_by_adam8bit": "_adam8bit",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
