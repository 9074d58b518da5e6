"""A few plain threads."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

_THREADS = 4

K = TypeVar("K")
R = TypeVar("R")


def in_threads(function: Callable[[K], R], keys: Sequence[K], at_once: int = _THREADS) -> dict[K, R]:
    """`function` of each key, some at a time. The first error stops the rest.

    Plain threads: the pools of `concurrent.futures` take no work once the main thread has ended, when a save in the
    background may still be going on.
    """
    results: dict[K, R] = {}
    errors: list[BaseException] = []
    waiting = list(reversed(keys))

    def work() -> None:
        while not errors:
            try:
                key = waiting.pop()
            except IndexError:
                return
            try:
                results[key] = function(key)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(min(at_once, len(keys)) - 1)]
    for thread in threads:
        thread.start()
    work()  # this one, too
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return {key: results[key] for key in keys}
