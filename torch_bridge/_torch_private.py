"""What is taken from inside torch, and the proof that this release lets a subclass of DTensor dispatch.

`DTensorSpec` and `TensorMeta` are arguments of DTensor's constructor; there is no public way to call it.
"""

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta


def reaches_subclasses(base: type[DTensor] = DTensor) -> bool:
    """Whether operations on a subclass of DTensor come to its own `__torch_dispatch__`.

    Releases between the fast path of DTensor in C++ (late 2025) and its repair (spring of 2026) may pass it by.
    """
    seen = []

    class Probe(base):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return args[0] if isinstance(args[0], torch.Tensor) else list(args[0])

    try:
        meta = TensorMeta(torch.Size([1]), (1,), torch.float32)
        spec = DTensorSpec(None, (Replicate(),), meta)  # pyright: ignore[reportArgumentType]
        probe = Probe(torch.zeros(1), spec, requires_grad=False)  # pyright: ignore[reportCallIssue]
        _ = probe + probe, torch.ops.aten._foreach_add.List([probe], [probe])
    except Exception:
        return False
    return len(seen) == 2


def check_dispatch() -> None:
    """Refuses releases of torch on which a ragged tensor would be handled as an ordinary DTensor.

    Raises:
      ImportError: this is one.
    """
    if not reaches_subclasses():
        raise ImportError(
            f"torch {torch.__version__} does not hand operations on a subclass of DTensor to the subclass, so a "
            "RaggedTensor would give wrong values without an error; use torch 2.13 or later"
        )


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Sets the version that autograd compares with that of what it saved; of all views of the tensor."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))  # pyright: ignore[reportAttributeAccessIssue]
