"""Ragged tensors in torch's distributed checkpoints: a range of a tensor is a few boxes."""

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ._geometry import Geometry

if TYPE_CHECKING:
    from ._ragged_tensor import RaggedTensor


def chunks(geometry: Geometry) -> list[ChunkStorageMetadata]:
    """The boxes of this rank."""
    return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box, _ in geometry.boxes]


def write_items(fqn: str, tensor: "RaggedTensor", geometry: Geometry) -> list[WriteItem]:
    """What this rank writes: one item for each box."""
    properties = TensorProperties.create_from_tensor(tensor._local_tensor)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.size()),
        )
        for chunk in chunks(geometry)
    ]


def shard(local: torch.Tensor, geometry: Geometry, index: Any) -> torch.Tensor:
    """The box at an offset, as a view of this rank's elements.

    Raises:
      ValueError: no box starts there.
    """
    at = 0
    for box, stored in geometry.boxes:
        if tuple(index.offset or ()) == box.offsets:
            part = local.detach()[at : at + stored.numel].view(stored.sizes)
            return part.permute([geometry.order.index(dim) for dim in range(part.ndim)])
        at += stored.numel
    raise ValueError(f"{index.fqn}: this rank has no box at {index.offset}")
