"""What gloo jobs share: start, run the cases, write down what failed, leave together."""

import datetime
import json
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def raises(text: str, kind: type[Exception] = RuntimeError) -> Iterator[None]:
    """An error of this kind with this in its message; ranks have no pytest."""
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


def run(cases: Mapping[str, Callable[[], None]], rank: int, size: int, store: str, out: str) -> None:
    """Runs the cases and writes what failed, by name, to `OUT.RANK`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=size,
        store=dist.FileStore(store, size),
        timeout=datetime.timedelta(seconds=60),
    )
    results = {}
    for name, case in cases.items():
        try:
            case()
            results[name] = ""
        except BaseException:  # CheckpointException is no Exception
            results[name] = traceback.format_exc()
            if size > 1:
                break  # the other ranks may be elsewhere
    with open(f"{out}.{rank}", "w") as file:
        json.dump(results, file)
    dist.barrier()
    dist.destroy_process_group()
