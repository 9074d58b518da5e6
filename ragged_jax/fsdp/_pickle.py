"""What is sharded cannot be pickled, since it lives on the devices of its process; it can be copied."""

from collections.abc import Callable
from typing import Any, NoReturn


def only_copied(copy: Callable[[Any], Any], deepcopy: Callable[[Any], Any]) -> dict[str, Callable]:
    """Methods for a class: copies are made by functions, and pickling says what to do instead."""

    def refuse(self: Any, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} is sharded over the devices of this process and cannot be pickled; save it with "
            "`rj.Checkpointer`, or pickle `rj.full_params` of it"
        )

    return {"__reduce_ex__": refuse, "__copy__": copy, "__deepcopy__": lambda self, memo: deepcopy(self)}
