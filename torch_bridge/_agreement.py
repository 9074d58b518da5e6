"""Ranks compare what they are about to do. Where it differs all of them fail, and none waits for another."""

import hashlib

import torch
import torch.distributed as dist

from ragged_jax.layout import disagreement, to_text

from ._reduction import Groups


def check_same(what: str, facts: dict[str, str], groups: Groups, device: torch.device) -> None:
    """Raises the same error on every rank when they do not agree on some facts. All ranks call it.

    What all have in common travels as a digest.

    Raises:
      ValueError: they differ; it names each fact that does, and which ranks say what.
    """
    digest = int(hashlib.sha256(to_text(facts).encode()).hexdigest()[:15], 16)
    ends = torch.tensor([digest, -digest], device=device)
    for group in groups.each:
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    highest, lowest = ends.tolist()
    if highest == -lowest:
        return
    said = {dist.get_rank(): facts}
    for group in groups.each:
        parts = [said] * dist.get_world_size(group)
        dist.all_gather_object(parts, said, group=group)
        said = {rank: those for part in parts for rank, those in part.items()}
    ranks = sorted(said)
    found = disagreement([said[rank] for rank in ranks], ranks)
    raise ValueError(f"{what} differ between processes, so none of them goes on:\n{found}")
