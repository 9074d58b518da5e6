"""What the planner is asked to plan."""

from dataclasses import dataclass

from ..layout import TensorSpec


@dataclass(frozen=True, slots=True)
class Group:
    """The tensors that are gathered together: what the planner turns into a bucket.

    Attributes:
      name: the module's path; empty for the root.
      tensors: its tensors, unsharded.
      stack: how many layers lie stacked under a scan; shapes are those of one layer.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    stack: int | None = None
