"""What the cases of several workers use; ranks have no pytest."""

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
