"""What a plan needs to know of the machine: the weights of the planner's costs.

Bandwidths are in bytes per second and device, times in seconds, rates in bf16 operations per second. They
are data-sheet figures, good for choosing between layouts, not for promising a step time.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """One kind of device and the links between devices.

    Attributes:
      name: as users write it: `h100`.
      memory_nbytes: memory of one device.
      memory_bandwidth: reading or writing it.
      flops: dense bf16 matrix rate.
      link_bandwidth: one direction of the fabric that FSDP collectives run on, per device.
      latency: fixed time of one collective (launch and first byte).
      unpack_copies: whether a tensor sliced out of a packed slab is a copy (XLA) or a view (torch).
      tile: the native (rows, columns) f32 tile when arrays are stored in tiles (TPU): a slab whose width is
        not the tensor's own is then laid out anew at each gather.
      source: where the figures come from.
    """

    name: str
    memory_nbytes: int
    memory_bandwidth: float
    flops: float
    link_bandwidth: float
    latency: float
    unpack_copies: bool
    tile: tuple[int, int] | None
    source: str


_GB = 10**9
_NVIDIA = "NVIDIA data sheet (SXM, dense bf16; NVLink per direction); latency: NCCL tests, order of magnitude"
_TPU = "Google Cloud TPU system architecture pages (ICI per chip, one direction); latency: order of magnitude"

PROFILES: dict[str, HardwareProfile] = {
    profile.name: profile
    for profile in (
        HardwareProfile("a100", 80 * _GB, 2.039e12, 312e12, 300e9, 15e-6, True, None, _NVIDIA),
        HardwareProfile("h100", 80 * _GB, 3.35e12, 989e12, 450e9, 15e-6, True, None, _NVIDIA),
        HardwareProfile("h200", 141 * _GB, 4.8e12, 989e12, 450e9, 15e-6, True, None, _NVIDIA),
        HardwareProfile("v5e", 16 * _GB, 0.819e12, 197e12, 100e9, 5e-6, True, (8, 128), _TPU),
        HardwareProfile("v5p", 95 * _GB, 2.765e12, 459e12, 300e9, 5e-6, True, (8, 128), _TPU),
        HardwareProfile("v6e", 32 * _GB, 1.64e12, 918e12, 224e9, 5e-6, True, (8, 128), _TPU),
        HardwareProfile("cpu", 16 * _GB, 20e9, 0.1e12, 5e9, 100e-6, True, None, "virtual devices on 2 cores"),
        HardwareProfile("torch-nccl", 80 * _GB, 3.35e12, 989e12, 450e9, 15e-6, False, None, _NVIDIA),
    )
}


def hardware(name: str) -> HardwareProfile:
    """The profile called `name`.

    Raises:
      ValueError: there is none; the message lists those there are.
    """
    try:
        return PROFILES[name]
    except KeyError:
        raise ValueError(f"no hardware profile {name!r}; choose from {', '.join(PROFILES)}") from None
