"""Muon: every matrix is gathered once to one rank, orthogonalised there, and sent back."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from ragged_jax.layout import Buffer, named
from ragged_jax.optim._forms import Form, form_of
from ragged_jax.optim._muon_reference import Coefficients, Scale, coefficient_rows, scale_factor
from ragged_jax.optim._routes import Kind, Routing, route_of
from ragged_jax.optim._tensor import Rule

from .._runtime import Runtime
from ._adamw import adamw_update, make_adamw_state, named_moments
from ._joined import Runs, zeros_beside
from ._newton_schulz import NewtonSchulz, each_matrix, likeness
from ._owners import Owned, Owners, Sending
from ._routing import dims_of, routing_of_locals, tensor_of
from ._sharded import ShardedOptimizer, StateTensor, flat, local_of

_MUON = ("lr", "weight_decay", "momentum", "nesterov", "bias_correction", "coefficients", "steps", "scale")
_ADAMW = ("lr", "betas", "eps", "weight_decay")


class Muon(ShardedOptimizer):
    """Muon for hidden matrices, AdamW for embeddings, heads, norms, biases and scalars.

    The momentum is element-wise and stays where the parameters are. Each matrix of a fully sharded module is then
    sent to one rank, all of them in one all-to-all, while the rest is updated by AdamW; that rank orthogonalises it,
    and another all-to-all brings it back. Work is balanced over the ranks. The result is that of whole tensors,
    whatever the layout and number of ranks.

    Every group becomes two, of which the first is Muon's and the second AdamW's (`group["kind"]`); learning rate
    schedules go over both. `optimizer.routing` says who went where.

    Args:
      params: parameters, named parameters or groups. The names of ordinary parameters decide where they go, so give
        `module.named_parameters()`; those of a sharded module are known.
      lr: of Muon, and of AdamW if that has none of its own.
      momentum: decay of the momentum, a mean of gradients.
      nesterov: mix the gradient into its momentum once more.
      weight_decay: of Muon's tensors, times the learning rate.
      bias_correction: divide momentum and gradient each by what its weights add up to. Matters in the first steps.
      coefficients: of Newton-Schulz: `quintic`, `five_rows`, `polar_express`, a triple, or a triple for each step.
      steps: of Newton-Schulz.
      scale: what updates are multiplied with by shape: `spectral`, which is what `torch.optim.Muon` calls original,
        `spectral_unclamped`, `match_rms_adamw`, or None.
      adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: of AdamW. Without `adamw_lr` it has Muon's rate, which is
        large for AdamW (3e-4 is common); `routing` says so.
      route: overrules the default: a mapping from patterns of the tensor's path to `"muon"` or `"adamw"`, or a
        function of path and shape that says so, or None for what it has no opinion on.
      dims: which dims of a tensor are a matrix: `MatrixDims` for all, a mapping from patterns of the path to them, or
        a function of path and shape (None: by name and shape).
      compute_dtype: of the products of Newton-Schulz, bfloat16 as a rule on accelerators. Matrices are normalised in
        float32 first.

    Raises:
      ValueError: unknown coefficients or scale, or dims that a tensor does not have.

    References: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is
    Scalable for LLM Training", arXiv:2502.16982.

    Example:
      >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
      >>> optimizer = Muon(model.named_parameters(), lr=0.02, adamw_lr=3e-4)
      >>> print(optimizer.routing)
      muon   0/weight  a matrix, 1 of 4 x 4, shape (4, 4)
      adamw  0/bias    a bias, shape (4,)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = False,
        coefficients: Coefficients = "quintic",
        steps: int = 5,
        scale: Scale = "spectral",
        adamw_lr: float | torch.Tensor | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.0,
        route: Rule[Kind] | None = None,
        dims: Any = None,
        compute_dtype: torch.dtype = torch.float32,
    ):
        self._route, self._dims, self._compute_dtype = route, dims, compute_dtype
        self._given = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay,
            "bias_correction": bias_correction, "coefficients": coefficients, "steps": steps, "scale": scale,
            "adamw_lr": adamw_lr, "adamw_betas": adamw_betas, "adamw_eps": adamw_eps,
            "adamw_weight_decay": adamw_weight_decay,
        }  # fmt: skip
        self._owners: dict[tuple[int, ...], Owners] = {}
        self._runs: dict[tuple[int, ...], Runs] = {}
        self._forms: dict[torch.Tensor, Form] = {}
        self._with_lr_of_muon: list[int] = []
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters as two groups, Muon's and AdamW's. Options default to those of the optimizer."""
        given = {**self._given, **param_group}
        scale_factor(given["scale"], 1, 1)
        coefficient_rows(given["coefficients"], given["steps"])
        lent = given["adamw_lr"] is None or ("lr" in param_group and "adamw_lr" not in param_group)
        if lent:
            given["adamw_lr"] = given["lr"]
        some = param_group["params"]
        some = [some] if isinstance(some, torch.Tensor) else list(some)
        kinds: dict[str, list[Any]] = {"muon": [], "adamw": []}
        for x in some:
            p, name = (x, "") if isinstance(x, torch.Tensor) else (x[1], x[0])
            kinds[route_of(tensor_of(local_of(p, name)), self._route, dims_of)[0]].append(x)
        options = {
            "muon": {key: given[key] for key in _MUON},
            "adamw": {key: given[f"adamw_{key}"] for key in _ADAMW},
        }
        names = {} if all(isinstance(x, torch.Tensor) for x in some) else {"param_names": []}  # all or none
        for kind, members in kinds.items():
            super().add_param_group({"params": members, "kind": kind, **names, **options[kind]})
        if lent and kinds["adamw"]:
            self._with_lr_of_muon.append(len(self.param_groups) - 1)

    def _check(self, group: dict[str, Any]) -> None:
        if group["kind"] == "muon":
            for p in group["params"]:
                tensor = tensor_of(self.local(p))
                self._forms[p] = form_of(tensor, dims_of(tensor, self._dims))

    @property
    def routing(self) -> Routing:
        """Which tensors Muon has, as which matrices, and which AdamW, and why. Prints as a table.

        Its notes say where AdamW has Muon's learning rate, and which matrices the ranks will wait for.
        """
        params = [p for group in self.param_groups for p in group["params"]]
        found = routing_of_locals([self.local(p) for p in params], self._route, self._dims)
        return replace(found, notes=(*self._notes_on_rates(), *self._notes_on_owners()))

    def _notes_on_rates(self) -> Iterable[str]:
        if lent := sorted({f"{float(self.param_groups[i]['lr']):g}" for i in self._with_lr_of_muon}):
            yield f"AdamW has the learning rate of Muon, {', '.join(lent)}; `adamw_lr=` gives it its own."

    def _notes_on_owners(self) -> Iterable[str]:
        groups = (group for group in self.param_groups if group["kind"] == "muon")
        trained = [p for group in groups for p in group["params"] if p.requires_grad]
        for owners in (self._owners_of(params) for params in _by_runtime(self, trained)):
            if large := owners.too_large:
                yield (
                    f"With matrices of more than a fair share of the work for {owners.plan.num_shards} ranks: "
                    f"{named(large)}. A matrix has one owner, for whom the others wait: products take "
                    f"{owners.plan.imbalance:.2f} times as long as if they were spread evenly."
                )

    def _make_state(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        if group["kind"] == "adamw":
            return make_adamw_state(self.state, params)
        zeros = zeros_beside([flat(p) for p in params], [p.numel() for p in params], torch.float32)
        for p, x in zip(params, zeros, strict=True):
            self.state[p]["momentum_buffer"] = x.view(p.shape)
        return None

    def _named(self, p: torch.Tensor, state: dict[str, torch.Tensor]) -> Iterable[StateTensor]:
        if "momentum_buffer" not in state:
            return named_moments(self, p, state, "inner/adamw/0")
        local = self.local(p)
        whole = (local.shape, local.start, local.stop, local.placement.axis_order)
        return [StateTensor(local.name, "inner/muon/0/mu", "", *whole, None, state["momentum_buffer"].view(-1))]

    def _update_all(self) -> None:
        for group in self.param_groups:
            self._init_state(group, [p for p in group["params"] if p.grad is not None])
        muon = [group for group in self.param_groups if group["kind"] == "muon"]
        trained = [(p, group) for group in muon for p in group["params"] if p.requires_grad]
        mixed = {p: self._mixed(p, group) for p, group in trained if p.grad is not None}
        running = [
            _Running(self, members, mixed) for members in _by_runtime(self, [p for p, _ in trained]) if members
        ]
        for group in self.param_groups:
            if group["kind"] == "adamw":
                states = [(p, self.state[p]) for p in group["params"] if p.grad is not None]
                adamw_update(group, states, self._runs)
        schulz = {p: self._schulz(group) for p, group in trained}
        for some in running:
            mixed |= some.finish(schulz)
        for p, group in trained:
            if p.grad is not None:
                u = mixed[p]
                if self.local(p).home is None:
                    items = u.split(self._forms[p].numel)
                    u = torch.cat([*each_matrix(self._forms[p], schulz[p], items)])
                if group["weight_decay"]:
                    u = u + flat(p).float() * group["weight_decay"]
                p.copy_((flat(p).float() - u * group["lr"]).view(p.shape))

    def _mixed(self, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        state, beta = self.state[p], group["momentum"]
        state["step"] += 1
        here = ahead = 1.0
        if group["bias_correction"]:
            here, ahead = (1 - beta ** (int(state["step"]) + i) for i in range(2))
        grad, momentum = flat(p.grad).float(), state["momentum_buffer"].view(-1)  # type: ignore
        momentum.mul_(beta).add_(grad, alpha=1 - beta)
        if not group["nesterov"]:
            return momentum / here
        return (momentum * (beta / ahead)).add_(grad, alpha=(1 - beta) / here)

    def _schulz(self, group: dict[str, Any]) -> NewtonSchulz:
        rows = coefficient_rows(group["coefficients"], group["steps"])
        return NewtonSchulz(rows, self._compute_dtype, group["scale"])

    def _owners_of(self, params: list[torch.Tensor]) -> Owners:
        """Of the matrices of one sharded module."""
        key = tuple(map(id, params))
        if key not in self._owners:
            forms = {self.local(p).name: self._forms[p] for p in params}
            self._owners[key] = Owners(_runtime(self, params[0]), forms)
        return self._owners[key]


def _runtime(optimizer: Muon, p: torch.Tensor) -> Runtime:
    home = optimizer.local(p).home
    assert home is not None
    return home.runtime


def _by_runtime(optimizer: Muon, params: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """The parameters of each sharded module, in the same order on every rank."""
    groups: dict[int, list[torch.Tensor]] = {}
    for p in params:
        if optimizer.local(p).home is not None:
            groups.setdefault(id(_runtime(optimizer, p)), []).append(p)
    return groups.values()


class _Running:
    """The matrices of one sharded module, on their way to their owners.

    Args:
      optimizer: whose.
      params: parts of tensors of the module. All ranks take part in the same exchange: those without a gradient
        send zeros.
      mixed: what to orthogonalise, of those with one.
    """

    def __init__(self, optimizer: Muon, params: list[torch.Tensor], mixed: dict[torch.Tensor, torch.Tensor]):
        self._shards: dict[Buffer, torch.Tensor] = {}
        self._parts: dict[torch.Tensor, torch.Tensor] = {}
        self._params = {optimizer.local(p).name: p for p in params}
        for p in params:
            local = optimizer.local(p)
            assert local.home is not None
            slab = local.home.slot.slab
            key = local.home.unit.bucket.name, slab.slab.name
            if key not in self._shards:
                self._shards[key] = torch.zeros(slab.high - slab.low, dtype=torch.float32, device=p.device)
            start = local.placement.offset + local.start - slab.low if p.numel() else 0
            self._parts[p] = self._shards[key][start : start + p.numel()]
            if p in mixed:
                self._parts[p].copy_(mixed[p])
        self._owners = optimizer._owners_of(params)
        self._sending: Sending = self._owners.start(self._shards)

    def finish(self, schulz: dict[torch.Tensor, NewtonSchulz]) -> dict[torch.Tensor, torch.Tensor]:
        """The parts, orthogonalised."""
        own = self._sending.wait()
        alike: dict[Any, list[Owned]] = defaultdict(list)
        for item in self._owners.owned:
            alike[likeness(item.form), schulz[self._params[item.tensor]]].append(item)
        for (_, function), items in alike.items():
            stored = [item.of(own) for item in items]
            for x, made in zip(stored, each_matrix(items[0].form, function, stored), strict=True):
                x.copy_(made)
        self._owners.send_back(own, self._shards)
        return self._parts
