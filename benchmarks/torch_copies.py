"""Which bytes a step copies, and where, by the profiler's record of its operations."""

import json
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from torch_bridge import _collectives, _reduction, _unit

COPIES = {"aten::copy_", "aten::cat", "aten::_foreach_copy_", "aten::split_with_sizes_copy", "aten::_chunk_cat"}
FILLS = {"aten::fill_", "aten::zero_"}
SIZES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "long": 8, "int": 4, "bool": 1}
INSIDE, OWN = "in a collective", "own part"
LABELS = re.compile(r"FSDP::\w+|unshard|reduce|own part")  # of FSDP2, and of this project


class _Marked:
    """A collective on its way; what its wait copies is its own."""

    def __init__(self, work: Any):
        self._work = work

    def wait(self) -> None:
        with record_function(INSIDE):
            self._work.wait()


def _marked(start: Callable, label: str, wraps: bool) -> Callable:
    def started(*args, **kwargs):
        with record_function(label):
            work = start(*args, **kwargs)
        return _Marked(work) if wraps else work

    return started


@contextmanager
def _collectives_marked() -> Iterator[None]:
    """FSDP2 waits inside of its calls on a CPU, and on CUDA by streams."""
    places = [(dist, name, INSIDE, False) for name in ("all_gather_single", "reduce_scatter_single")]
    places += [(_unit, "start_gather", INSIDE, True), (_reduction, "start_reduce", INSIDE, True)]
    places += [(_collectives, "_put", OWN, False)]
    with ExitStack() as stack:
        for module, name, label, wraps in places:
            marked = _marked(getattr(module, name), label, wraps)
            stack.enter_context(mock.patch.object(module, name, marked))
        yield


def copies_of(step: Callable[[], object], own_thread_only: bool) -> dict[str, dict[str, int]]:
    """Bytes that a step writes by copying and by filling, by the label of the range that they are in.

    Args:
      step: it.
      own_thread_only: leave out what other threads do: the collectives of gloo.
    """
    with _collectives_marked(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
        step()
    with tempfile.TemporaryDirectory() as folder:
        record.export_chrome_trace(path := f"{folder}/trace.json")
        events = [e for e in json.loads(Path(path).read_text())["traceEvents"] if "dur" in e]
    if own_thread_only:
        events = [e for e in events if e["tid"] == threading.get_native_id()]
    ranges = [e for e in events if e["name"] == INSIDE or LABELS.match(e["name"])]
    made = {}
    for kind, names in (("copied", COPIES), ("filled", FILLS)):
        made[kind] = Counter()
        for e in _leaves(events, names):
            made[kind][_label(e, ranges)] += _bytes(e)
    return {kind: dict(counts) for kind, counts in made.items()}


def _label(event: dict, ranges: list[dict]) -> str:
    """Of the innermost range, or that of collectives, around an event."""
    around = sorted((r for r in ranges if _within(event, r)), key=lambda r: r["dur"])
    for label in (OWN, INSIDE):
        if any(r["name"] == label for r in around):
            return label
    return LABELS.match(around[0]["name"]).group() if around else "elsewhere"  # type: ignore


def _leaves(events: list[dict], names: set[str]) -> list[dict]:
    """Events of these names that contain no other of them."""
    found = [e for e in events if e["name"] in names]
    return [e for e in found if not any(other is not e and _within(other, e) for other in found)]


def _within(a: dict, b: dict) -> bool:
    return a["tid"] == b["tid"] and b["ts"] <= a["ts"] and a["ts"] + a["dur"] <= b["ts"] + b["dur"]


def _bytes(event: dict) -> int:
    kind = event["args"].get("Input type", ["float"])[0]
    return _numel(event["args"]["Input Dims"][0]) * SIZES.get(kind, 4)


def _numel(dims: list) -> int:
    """Of a tensor, or of a list of them."""
    if dims and isinstance(dims[0], list):
        return sum(_numel(each) for each in dims)
    numel = 1
    for size in dims:
        numel *= size
    return numel
