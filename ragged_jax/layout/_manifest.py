"""What every process of a job must agree on before they work together, and how to say where they do not."""

import json
from collections.abc import Mapping, Sequence

from ._layout import Layout
from ._listed import listed

Manifest = Mapping[str, str]


def manifest(layout: Layout) -> dict[str, str]:
    """A layout as facts by name: its fingerprint, and for each tensor what it is and where it lies.

    Example:
      >>> from ragged_jax.layout import Bucket, Layout
      >>> sorted(manifest(Layout(2, (Bucket("", ()),))))
      ['layout fingerprint', 'number of shards']
    """
    facts = {"layout fingerprint": layout.fingerprint, "number of shards": str(layout.num_shards)}
    if layout.shares is not None:
        facts["shares"] = str(layout.shares)
    for bucket in layout.buckets:
        layers = "" if bucket.stack is None else f" of {bucket.stack} layers"
        where = f"in unit {bucket.name or '(root)'}{layers}"
        for tensor in bucket.tensors:
            label = f", a {tensor.label}" if tensor.label else ""
            facts[tensor.name] = f"{tensor.dtype}{list(tensor.shape)} in blocks {tensor.block!r} {where}{label}"
    return facts


def disagreement(manifests: Sequence[Manifest], processes: Sequence[int] | None = None) -> str | None:
    """Where the processes' facts differ, the same text for every process; None where they do not.

    Args:
      manifests: the facts of each process.
      processes: their numbers; from 0 on by default.

    Example:
      >>> print(disagreement([{"w": "float32[4]"}, {"w": "float32[4]"}, {"w": "float32[5]"}]))
        w: float32[4] on processes 0-1; float32[5] on process 2
    """
    lines = []
    for name in dict.fromkeys(name for facts in manifests for name in facts):
        holders: dict[str | None, list[int]] = {}
        for process, facts in zip(processes or range(len(manifests)), manifests, strict=True):
            holders.setdefault(facts.get(name), []).append(process)
        if len(holders) > 1:
            said = (f"{'missing' if value is None else value} on {_processes(who)}" for value, who in holders.items())
            lines.append(f"{name}: {'; '.join(said)}")
    return listed(lines).removeprefix("\n") or None


def to_text(facts: Manifest) -> str:
    """Facts as a text that is equal when they are."""
    return json.dumps(dict(sorted(facts.items())))


def from_text(text: str) -> Manifest:
    return json.loads(text)


def _processes(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"process{'es' if len(numbers) > 1 else ''} {text}"
