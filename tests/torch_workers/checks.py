"""What the cases of several workers use; ranks have no pytest."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def raises(text: str, kind: type[Exception] = RuntimeError) -> Iterator[None]:
    """An error of this kind with this in its message."""
    message = None
    try:
        yield
    except kind as error:
        message = str(error)
    assert message is not None, f"no {kind.__name__} was raised"
    assert text in message, message


@contextmanager
def scratch() -> Iterator[str]:
    """A folder that all ranks share."""
    with tempfile.TemporaryDirectory() as mine:
        shared = [mine]
        dist.broadcast_object_list(shared)
        yield shared[0]
        dist.barrier()


@contextmanager
def reads() -> Iterator[list[int]]:
    """How many bytes of tensors this rank reads, by call."""
    sizes, real = [], os.preadv

    def counting(*arguments):
        sizes.append(real(*arguments))
        return sizes[-1]

    os.preadv = counting
    try:
        yield sizes
    finally:
        os.preadv = real
