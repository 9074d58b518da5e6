"""The one cost function by which slabs are chosen: seconds of one training step on one device.

What it counts, for a bucket that is gathered in forward, gathered again in backward, and reduced once:

- traffic: three collectives move `num_shards - 1` shards each through a device's link;
- state: the optimizer reads and writes what a device holds, 16 bytes for each bf16 parameter (weight and
  gradient in bf16; master weight and two moments in f32), so 8 bytes for each byte of weights;
- copies: a tensor sliced out of a packed slab is read and written once per collective on XLA, not in torch;
- relayout: on TPU the same again when the slab's rows are not the tensor's own, because arrays lie in tiles
  of (8, 128) there;
- un-tiling: a tensor stored tile by tile is transposed once per collective; on TPU not at all when the tile is the
  native one, and about three times when it is narrower (`untile_copies`);
- launches: a slab more in a collective that is issued as one group (XLA's combiner, NCCL's group call)
  costs a tenth of a collective of its own.

Padding has no line of its own: it is gathered, reduced and updated like any other byte.
"""

from ._hardware import HardwareProfile

_COLLECTIVES = 3
_STATE_BYTES_PER_BYTE = 8
_SLAB_LAUNCH = 0.1
_NARROW = 3  # each narrow dim is padded to a whole row of lanes on the way


def untile_copies(profile: HardwareProfile, height: int, width: int) -> int:
    """How often a tensor stored in tiles is written anew before it can be used; `benchmarks/untile.py` measures it.

    Example:
      >>> from ragged_jax.planner import hardware
      >>> [untile_copies(hardware(name), 8, 128) for name in ("h100", "v5p")]
      [1, 0]
    """
    if profile.tile is None:
        return 1
    if (height, width) == profile.tile:
        return 0
    return 1 if width % profile.tile[1] == 0 else _NARROW


def slab_seconds(
    profile: HardwareProfile,
    num_shards: int,
    shard_nbytes: int,
    copied_nbytes: int = 0,
    relaid_nbytes: int = 0,
    untiled_nbytes: int = 0,
) -> float:
    """What one slab costs in a step.

    Args:
      profile: the machine.
      num_shards: devices that share the slab.
      shard_nbytes: bytes on each device, padding included.
      copied_nbytes: unsharded bytes that are sliced out of the slab or laid into it.
      relaid_nbytes: unsharded bytes of tensors whose rows are not the slab's.
      untiled_nbytes: unsharded bytes that are written to bring tiles into rows.
    """
    traffic = _COLLECTIVES * (num_shards - 1) * shard_nbytes / profile.link_bandwidth
    state = 2 * _STATE_BYTES_PER_BYTE * shard_nbytes / profile.memory_bandwidth
    moved = copied_nbytes * profile.unpack_copies + relaid_nbytes * (profile.tile is not None) + untiled_nbytes
    copies = _COLLECTIVES * 2 * moved / profile.memory_bandwidth
    return traffic + state + copies + _COLLECTIVES * _SLAB_LAUNCH * profile.latency
