"""Traffic between devices and the steps that move it: the words of an exchange's combinatorics.

Time is counted in elements: a collective costs `latency` elements (what the link would carry in that time) plus
what it makes a device send.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Traffic = Mapping[tuple[int, int], int]
"""Elements to move for each pair `(sender, receiver)` of different devices."""

Kind = Literal["permute", "all_to_all", "uneven_all_to_all"]


@dataclass(frozen=True, slots=True)
class Step:
    """One collective: its kind, the padded size of every message and what each pair truly moves in it."""

    kind: Kind
    numel: int
    amounts: Traffic


def most_messages(traffic: Traffic) -> int:
    """The most messages that one device sends or receives: so many permutes are needed at least."""
    return max([0, *Counter(i for i, _ in traffic).values(), *Counter(j for _, j in traffic).values()])


def most_numel(traffic: Traffic) -> int:
    """The most elements that one device sends or receives: no schedule takes less time than these."""
    sent, received = Counter(), Counter()
    for (sender, receiver), numel in traffic.items():
        sent[sender] += numel
        received[receiver] += numel
    return max([0, *sent.values(), *received.values()])


def steps_cost(steps: list[Step], num_shards: int, latency: float) -> float:
    """Time of the steps one after the other, in elements."""
    cost = 0.0
    for step in steps:
        if step.kind == "permute":
            cost += latency + step.numel
        elif step.kind == "all_to_all":
            cost += latency + (num_shards - 1) * step.numel
        else:
            cost += latency + most_numel(step.amounts)
    return cost


def permute(amounts: Traffic) -> Step:
    """The permute that moves these amounts, padded to the largest."""
    return Step("permute", max(amounts.values()), dict(sorted(amounts.items())))
