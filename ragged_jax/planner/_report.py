"""What a plan says of itself: padding, the bound it could not have beaten, and why."""

from dataclasses import dataclass, replace

from ..layout import Bucket, Layout


@dataclass(frozen=True, slots=True)
class BucketReport:
    """The figures of one bucket.

    Attributes:
      name: the bucket's.
      num_sole: tensors in a slab of their own.
      num_packed: tensors that share a slab.
      payload_nbytes: bytes of the tensors, unsharded; of those that other mesh axes split, of one slice.
      shard_nbytes: bytes on each device (of share 1, where shares are uneven).
      bound_nbytes: no plan with these slabs could use fewer bytes on each device.
      floor_nbytes: no layout at all that keeps blocks whole could, in slabs or otherwise.
      unshard_nbytes: bytes of the gathered bucket (of one layer, for a stack).
    """

    name: str
    num_sole: int
    num_packed: int
    payload_nbytes: int
    shard_nbytes: int
    bound_nbytes: int
    floor_nbytes: int
    unshard_nbytes: int

    @classmethod
    def of(cls, bucket: Bucket, num_shards: int) -> "BucketReport":
        """The figures of a bucket of unknown origin, for which no bound is known but what it holds itself."""
        num_sole = sum(slab.sole for slab in bucket.slabs)
        least = -(-bucket.payload_nbytes // num_shards)
        return cls(
            name=bucket.name,
            num_sole=num_sole,
            num_packed=len(bucket.tensors) - num_sole,
            payload_nbytes=bucket.payload_nbytes,
            shard_nbytes=bucket.shard_nbytes,
            bound_nbytes=least,
            floor_nbytes=least,
            unshard_nbytes=num_shards * bucket.shard_nbytes // max(1, bucket.num_copies),
        )

    def named(self, name: str, stack: int | None) -> "BucketReport":
        """The figures of a bucket like this one, which is of one layer, under a name of its own."""
        copies = 1 if stack is None else stack
        return replace(
            self,
            name=name,
            payload_nbytes=self.payload_nbytes * copies,
            shard_nbytes=self.shard_nbytes * copies,
            bound_nbytes=self.bound_nbytes * copies,
            floor_nbytes=self.floor_nbytes * copies,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """A layout and what the planner has to say about it.

    Attributes:
      layout: where every element lies.
      buckets: the figures of each bucket, in the layout's order.
    """

    layout: Layout
    buckets: tuple[BucketReport, ...]

    @property
    def shard_nbytes(self) -> int:
        """Bytes on each device; with uneven shares, on the largest."""
        return self.layout.largest_share * sum(bucket.shard_nbytes for bucket in self.buckets)

    @property
    def bound_nbytes(self) -> int:
        """Bytes on each device that no plan with these slabs could beat."""
        return self.layout.largest_share * sum(bucket.bound_nbytes for bucket in self.buckets)

    @property
    def floor_nbytes(self) -> int:
        """Bytes on each device that no layout with whole blocks could beat, in these slabs or otherwise."""
        return self.layout.largest_share * sum(bucket.floor_nbytes for bucket in self.buckets)

    @property
    def padding_fraction(self) -> float:
        """Padding over payload, in bytes."""
        return self._fraction(self.shard_nbytes)

    @property
    def bound_fraction(self) -> float:
        """The padding fraction that the bound implies."""
        return self._fraction(self.bound_nbytes)

    @property
    def floor_fraction(self) -> float:
        """The padding fraction that the floor implies."""
        return self._fraction(self.floor_nbytes)

    def _fraction(self, shard_nbytes: int) -> float:
        payload = sum(bucket.payload_nbytes for bucket in self.buckets)
        total = self.layout.num_parts * shard_nbytes // self.layout.largest_share
        return (total - payload) / payload if payload else 0.0

    @property
    def optimal(self) -> bool:
        """Whether the plan reaches its bound."""
        return self.shard_nbytes == self.bound_nbytes

    def __repr__(self):
        return f"Plan({self.layout!r}, bound {100 * self.bound_fraction:.2f} %)"
