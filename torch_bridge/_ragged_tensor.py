"""`RaggedTensor`: a DTensor that is cut at any element, and never claims what it does not hold."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ragged_jax import layout as values
from ragged_jax.layout import Layout

from . import _dcp, _redistribute
from ._dispatch import dispatch
from ._geometry import Geometry, order_of, strides_of
from ._placement import RaggedShard
from ._torch_private import DTensorSpec, TensorMeta, check_dispatch

check_dispatch()


class RaggedTensor(DTensor):
    """A tensor that is spread over a mesh so that one mesh dim is cut by a `RaggedShard`.

    Shape, strides and dtype are those of the whole tensor; this rank's elements are 1-D, in the order in which the
    whole one lies in memory. Operations on each element alone (in place, foreach and fused ones too), changes of
    dtype, norms and other reductions of the whole tensor, transposes and views work; tensors in one operation have
    the same shape and placements. Everything else raises `NotImplementedError` with the operation's name: there is no
    operation whose values differ from those of the whole tensor. Reductions give replicated DTensors.

    Make one with `from_local`, `from_full`, `from_dtensor` or `from_layout`.

    Reference: RaggedShard of veScale-FSDP, arXiv:2602.22437.
    """

    __slots__ = ("geometry",)
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    geometry: Geometry
    """Which elements this rank holds."""

    @staticmethod
    def from_local(  # pyright: ignore[reportIncompatibleMethodOverride]
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        shape: Sequence[int],
        stride: Sequence[int] | None = None,
    ) -> "RaggedTensor":
        """The tensor of which this rank has these elements. No copy; differentiable.

        Args:
          local_tensor: 1-D, this rank's elements in the order of the whole tensor's memory.
          device_mesh: the ranks.
          placements: on every mesh dim, one `RaggedShard` among them.
          shape: of the whole tensor.
          stride: of the whole tensor, dense; row-major by default.

        Raises:
          ValueError: the placements do not fit the mesh or the shape, or the elements are too many or too few.
        """
        strides = stride if stride is not None else strides_of(shape, range(len(shape)))
        geometry = _geometry(tuple(shape), tuple(strides), device_mesh, tuple(placements))
        if local_tensor.ndim != 1 or not local_tensor.is_contiguous():
            raise ValueError(f"local_tensor must be 1-D and contiguous, got a shape {tuple(local_tensor.shape)}")
        if local_tensor.numel() != (wanted := geometry.range[1] - geometry.range[0]):
            raise ValueError(
                f"{geometry.placement} of {tuple(shape)}: {wanted} elements here, got {local_tensor.numel()}"
            )
        return _FromLocal.apply(local_tensor, geometry)  # pyright: ignore[reportReturnType]

    @staticmethod
    def from_full(tensor: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> "RaggedTensor":
        """This rank's part, copied, of a tensor that every rank has whole. Nothing is sent.

        Example:
          `RaggedTensor.from_full(weight, mesh, [RaggedShard((0,), (1, 2))])`
        """
        geometry = _geometry(tuple(tensor.shape), tensor.stride(), device_mesh, tuple(placements))
        with torch.no_grad():
            local = geometry.mine(tensor).clone()
        return _wrap(local, geometry, tensor.requires_grad)

    @staticmethod
    def from_dtensor(tensor: DTensor, placements: Sequence[Placement]) -> "RaggedTensor":
        """An ordinary DTensor under ragged placements on the same mesh. Differentiable.

        `Replicate` sends nothing, `Shard(0)` is one all-to-all, and `Partial` is reduced straight to the pieces.
        """
        if isinstance(tensor, RaggedTensor):
            return tensor.redistribute(placements=placements)  # pyright: ignore[reportReturnType]
        return _Redistribute.apply(tensor, tuple(placements))  # pyright: ignore[reportReturnType]

    @staticmethod
    def from_layout(layout: Layout, name: str, local: torch.Tensor, mesh: DeviceMesh) -> "RaggedTensor":
        """A tensor of a layout, from this rank's elements of it, in stored order.

        Mesh dims are taken by name where the tensor is split over other axes (tensor parallelism). Of the rest the
        last one is that of the shards, and those before hold replicas.

        Raises:
          ValueError: it is stored tile by tile or belongs to stacked layers, or the mesh is another one.
        """
        bucket, _, placement = layout.locate(name)
        spec = placement.tensor
        if placement.storage != "row_major" or bucket.stack is not None:
            how = "tile by tile" if bucket.stack is None else "as one of several stacked layers"
            raise ValueError(f"{name} is stored {how}, which no torch tensor is; plan it row-major and unstacked")
        named = {axis: i for i, axis in enumerate(mesh.mesh_dim_names or ())}
        if missing := [s for s in spec.splits if s.axis not in named or mesh.size(named[s.axis]) != s.size]:
            raise ValueError(f"{name} is split by {missing}; the mesh is {mesh}")
        over = {named[s.axis]: Shard(s.dim) for s in spec.splits}
        rest = [i for i in range(mesh.ndim) if i not in over]
        if not rest or mesh.size(rest[-1]) != layout.num_shards:
            raise ValueError(
                f"the layout is for {layout.num_shards} shards, the mesh {mesh} has none of that size left"
            )
        cuts = tuple((over[i].dim, mesh.size(i)) for i in sorted(over))
        if cuts != tuple((s.dim, s.size) for s in spec.splits):
            raise ValueError(f"{name} is split by {spec.splits}, which the mesh {mesh} has in another order")
        order = placement.axis_order or tuple(range(len(spec.shape)))
        numels = [stop - start for start, stop in layout.ranges(name)]
        ragged = RaggedShard.of(values.RaggedShard.from_numels(placement.stored_shape, numels))
        last = RaggedShard(ragged.dims, ragged.local_units, cuts)
        placements = [last if i == rest[-1] else over.get(i, Replicate()) for i in range(mesh.ndim)]
        shape = spec.full_shape
        return RaggedTensor.from_local(local, mesh, placements, shape=shape, stride=strides_of(shape, order))

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's elements, 1-D, in the order of the whole tensor's memory. No copy; differentiable."""
        if grad_placements is not None and tuple(grad_placements) != self.placements:
            raise NotImplementedError("the gradient of a ragged tensor's elements has the tensor's own placements")
        return _ToLocal.apply(self) if torch.is_grad_enabled() else self._local_tensor  # pyright: ignore[reportReturnType]

    def redistribute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
    ) -> DTensor:
        """The same tensor under other placements of the same mesh. Differentiable.

        To other ragged pieces or to `Shard(0)` it is one all-to-all, to `Replicate` one gather without padding, and
        to anything else a gather first.

        Returns:
          A `RaggedTensor` where one of the placements is a `RaggedShard`, else a DTensor.
        """
        if device_mesh not in (None, self.device_mesh) or async_op:
            raise NotImplementedError("redistribute of a RaggedTensor to another mesh, or asynchronously")
        if placements is None:
            raise ValueError("redistribute needs placements")
        wanted = [Shard(p.dim % self.ndim) if isinstance(p, Shard) and p.dim < 0 else p for p in placements]
        return _Redistribute.apply(self, tuple(wanted))  # pyright: ignore[reportReturnType]

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor on every rank. With `grad_placements=[Partial()]` its gradient is reduce-scattered."""
        whole = self.redistribute(placements=[Replicate()] * self.device_mesh.ndim)
        return whole.to_local(grad_placements=grad_placements)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        return dispatch(cls, func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:
        low, high = self.geometry.range
        where = f" of its slice {self.geometry.slice_shape}" if self.geometry.placement.splits else ""
        return (
            f"RaggedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, placements={self.placements}, "
            f"mesh={tuple(self.device_mesh.shape)}, here elements {low}:{high}{where}: {self._local_tensor})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "RaggedTensor":
        if id(self) not in memo:
            if not self.is_leaf:
                raise RuntimeError("only a tensor that no operation made can be copied deeply; detach it first")
            rebuild, (local, *rest) = self.__reduce_ex__(2)
            copied = rebuild(local.clone(), *rest)
            copied.grad = copy.deepcopy(self.grad, memo)
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any):
        kept = self._local_tensor, self.device_mesh, self.placements, tuple(self.shape), self.stride()
        return _rebuild, (*kept, self.requires_grad, getattr(self, "_is_param", False))

    def __tensor_flatten__(self):
        raise NotImplementedError("torch.compile does not know RaggedTensor; compile what uses `to_local()`")

    def __create_write_items__(self, fqn: str, object: Any):
        return _dcp.write_items(fqn, self, self.geometry)

    def __create_chunk_list__(self):
        return _dcp.chunks(self.geometry)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return _dcp.shard(self._local_tensor, self.geometry, index)

    def _like(self, local: torch.Tensor, geometry: Geometry | None = None) -> "RaggedTensor":
        """These elements in this tensor's place."""
        return _wrap(local, geometry or self.geometry, local.requires_grad)


def _geometry(
    shape: tuple[int, ...], strides: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> Geometry:
    return Geometry(shape, order_of(shape, strides), mesh, placements)


def _wrap(local: torch.Tensor, geometry: Geometry, requires_grad: bool = False) -> RaggedTensor:
    meta = TensorMeta(torch.Size(geometry.shape), geometry.strides, local.dtype)
    spec = DTensorSpec(geometry.mesh, geometry.placements, tensor_meta=meta)
    made: Any = RaggedTensor(local, spec, requires_grad=requires_grad)  # pyright: ignore[reportCallIssue]
    made.geometry = geometry
    return made


def _rebuild(local, mesh, placements, shape, strides, requires_grad, is_param):
    made = _wrap(local.detach(), _geometry(shape, strides, mesh, placements), requires_grad)
    return torch.nn.Parameter(made, requires_grad) if is_param else made


torch.serialization.add_safe_globals([_rebuild, RaggedTensor, RaggedShard])


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local, geometry):
        return _wrap(local.view_as(local).detach(), geometry)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.to_local(), None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.geometry = x.geometry
        return x._local_tensor.view_as(x._local_tensor)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _wrap(grad.contiguous(), ctx.geometry)


class _Redistribute(torch.autograd.Function):
    """Between ragged placements and any: the gradient goes back the same way."""

    @staticmethod
    def forward(ctx, x, placements):
        ctx.placements = tuple(Replicate() if _is_partial(p) else p for p in x.placements)
        ctx.stride = x.stride()
        return _converted(x, placements)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _converted(grad, ctx.placements, ctx.stride), None


def _converted(x: DTensor, placements: tuple[Placement, ...], stride: Sequence[int] | None = None) -> DTensor:
    """Under other placements; ragged ones have these strides, by default those of `x`."""
    ragged = any(isinstance(p, RaggedShard) for p in placements)
    geometry = _geometry(tuple(x.shape), tuple(stride or x.stride()), x.device_mesh, placements) if ragged else None
    if isinstance(x, RaggedTensor):
        if x.geometry == geometry:
            return x._like(x._local_tensor.clone())
        if geometry is None or geometry.order == x.geometry.order:
            made = _redistribute.to_other(x._local_tensor, x.geometry, placements)
            return _wrap(made, geometry) if geometry else made  # pyright: ignore[reportReturnType]
        x = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)
    if geometry is None:
        return x.redistribute(placements=placements)
    return _wrap(_redistribute.from_dtensor(x, geometry), geometry)


def _is_partial(placement: Placement) -> bool:
    return not isinstance(placement, RaggedShard) and placement.is_partial()
