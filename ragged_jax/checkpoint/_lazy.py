"""`Lazy`: bytes that come into being while they are written."""

from abc import ABC, abstractmethod


class Lazy(ABC):
    """Stands for a buffer of which only the slice that is asked for is in memory.

    Attributes:
      nbytes: all of them.
    """

    nbytes: int

    @abstractmethod
    def __getitem__(self, span: slice) -> memoryview:
        """These bytes; slices are asked for in rising order."""
