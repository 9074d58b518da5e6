"""Processes that should do the same compare what they are about to do, and fail with one message where it differs.

Without it a rank that has another model waits in a collective that the others never enter, or takes their bytes for
its own. The facts go through the key-value store of jax's coordination service and no collective, so nobody can hang.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from ..layout import Layout, disagreement, from_text, manifest, to_text

PREFIX = "ragged_jax/same"
_calls: Counter[tuple] = Counter()  # a process that makes them in another order is told so


def check_same_on_all_processes(
    facts: Mapping[str, str],
    *,
    what: str = "these processes",
    timeout_s: float = 60.0,
    processes: Sequence[int] | None = None,
) -> None:
    """Raises the same error on every process when they do not agree on some facts. A no-op in a single process.

    `fully_shard` and `shard_tree` call it with the layout, mesh, axes and versions before they touch a device. Call
    it yourself for what else must agree: a configuration, the step of a checkpoint.

    Args:
      facts: by name, what this process is about to do.
      what: whose facts they are, for the message.
      timeout_s: how long to wait for the others to call this, in seconds.
      processes: which of them take part; all by default.

    Raises:
      ValueError: they differ; it names each fact that does, and which processes say what.
      TimeoutError: some processes did not come; it names them.

    Example:
      >>> check_same_on_all_processes({"seed": "0"})
    """
    members = tuple(range(jax.process_count()) if processes is None else processes)
    if len(members) <= 1:
        return
    _calls[members] += 1
    place = f"{PREFIX}/{hashlib.sha256(str(members).encode()).hexdigest()[:12]}/{_calls[members]}"
    texts = _exchanged(to_text(facts), place, members, what, timeout_s)
    by_process: dict[int, Any] = {process: from_text(text) for process, text in texts.items()}
    if found := disagreement([by_process[process] for process in members], members):
        raise ValueError(f"{what} differ between processes, so none of them goes on:\n{found}")


def check_layout_on_all_processes(layout: Layout, mesh: Mesh, axes: Sequence[str], **facts: Any) -> None:
    """`check_same_on_all_processes` of what a layout on a mesh comes down to, for the processes of the mesh."""
    members = sorted({device.process_index for device in mesh.devices.flat})
    if len(members) <= 1 or members[-1] >= jax.process_count():  # or devices to compile for, of a machine not here
        return
    own = {
        "ragged_jax": version("ragged-jax"),
        "jax": jax.__version__,
        "mesh": str(dict(mesh.shape)),
        "axes": str(tuple(axes)),
        **{name: str(value) for name, value in facts.items()},
    }
    check_same_on_all_processes(own | manifest(layout), what="the models to shard", processes=members)


def _exchanged(text: str, place: str, members: tuple[int, ...], what: str, timeout_s: float) -> dict[int, str]:
    """The texts of all members. What all have in common travels as a digest."""
    client = _client()
    if client is None:
        return _gathered(text)
    me, deadline = jax.process_index(), time.monotonic() + timeout_s
    digest = hashlib.sha256(text.encode()).hexdigest()
    digests = _round(client, f"{place}/digest", me, digest, members, what, deadline, timeout_s)
    if len(set(digests.values())) == 1:
        return dict.fromkeys(members, text)
    first = {d: next(p for p in members if digests[p] == d) for d in digests.values()}
    mine = text if first[digest] == me else ""
    texts = _round(client, f"{place}/facts", me, mine, members, what, deadline, timeout_s)
    return {process: texts[first[digests[process]]] for process in members}


def _round(
    client: Any,
    place: str,
    me: int,
    text: str,
    members: tuple[int, ...],
    what: str,
    deadline: float,
    timeout_s: float,
) -> dict[int, str]:
    """Everyone puts down a text and reads those of all. The dot keeps the store from refusing an empty one."""
    client.key_value_set(f"{place}/{me}", text + ".")
    try:
        client.wait_at_barrier(place, max(1, int(1000 * (deadline - time.monotonic()))), list(members))
    except Exception as error:  # jaxlib's own type, which has no public name
        came = {int(key.rsplit("/", 1)[1]) for key, _ in client.key_value_dir_get(place)}
        if missing := sorted(set(members) - came):
            raise TimeoutError(
                f"{what}: of processes {list(members)}, {missing} did not come to compare within {timeout_s:g} s. "
                "They have failed, or take another path through the program, or are slow; see their output."
            ) from error
        raise
    return {int(key.rsplit("/", 1)[1]): value[:-1] for key, value in client.key_value_dir_get(place)}


def _client() -> Any:
    """The client of the coordination service, which has no public name; None where this jax keeps it elsewhere."""
    try:
        from jax._src.distributed import global_state
    except ImportError:
        return None
    client = getattr(global_state, "client", None)
    needed = ("key_value_set", "key_value_dir_get", "wait_at_barrier")
    return client if all(hasattr(client, name) for name in needed) else None


def _gathered(text: str) -> dict[int, str]:
    """By a collective instead, which all processes must enter: their texts, padded to the longest."""
    data = np.frombuffer(text.encode(), np.uint8)
    lengths = np.ravel(multihost_utils.process_allgather(np.array([len(data)], np.int32)))
    rows = multihost_utils.process_allgather(np.pad(data, (0, int(lengths.max()) - len(data))))
    return {k: bytes(row[:n]).decode() for k, (row, n) in enumerate(zip(rows, lengths, strict=True))}
