"""What every rank does with modules of which autograd, not their outputs alone, decides when they are whole."""

import copy
import pickle
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from checks import raises
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import torch_bridge as tb
from torch_bridge._fully_shard import runtime_of

WIDTH, ROWS = 12, 24


@dataclass
class Output:
    hidden: torch.Tensor
    extra: Any = None


@dataclass(frozen=True)
class Frozen:
    hidden: torch.Tensor
    extra: Any = None
    made: int = field(default=0, init=False)


@dataclass(slots=True)
class Slotted:
    hidden: torch.Tensor
    extra: Any = None


class Named(namedtuple("Named", "hidden extra")):
    pass


class Both(Output, dict):
    """A dataclass that is a dict as well, as outputs of Hugging Face are."""

    def __post_init__(self):
        self.update(hidden=self.hidden, extra=self.extra)


Make = Callable[[torch.Tensor, torch.Tensor], Any]
OUTPUTS: dict[str, Make] = {
    "dataclass": Output,
    "frozen": Frozen,
    "slots": Slotted,
    "namedtuple": Named,
    "both": Both,
    "nested": lambda x, y: Frozen(x, {"more": [Output(y, (None, "text"))]}),
}


def opened(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, extra = output if type(output) is tuple else (output.hidden, output.extra)
    return hidden, extra if isinstance(extra, torch.Tensor) else extra["more"][0].hidden


class Layer(nn.Module):
    """Two products of what comes in, in an output that `make` makes."""

    def __init__(self, make: Make):
        super().__init__()
        self.make, self.first, self.second = make, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        hidden, extra = opened(x) if not isinstance(x, torch.Tensor) else (x, x)
        return self.make(self.first(hidden).tanh(), self.second(extra).sin())


class Auxiliary(nn.Module):
    """Keeps losses of its own; one of them is derived from the bias alone, one from the weights alone."""

    def __init__(self, where: str = "attribute"):
        super().__init__()
        self.up, self.down, self.where = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), where
        self.register_buffer("last", None, persistent=False)

    def forward(self, x):
        y = self.down(self.up(x).tanh())
        loss = {
            "attribute": lambda: self.up(y).square().mean(),
            "list": lambda: self.up(y).square().mean(),
            "buffer": lambda: self.up(x).square().mean(),
            "weight": lambda: self.down.weight.square().sum(),
            "bias": lambda: self.down.bias.sum(),
            "outside": lambda: self.up(y).square().mean(),
        }[self.where]()
        if self.where == "outside":
            OUTSIDE.append(loss)
        elif self.where == "buffer":
            self.last = loss
        else:
            self.up.kept = [{"losses": Output(loss)}, {}] if self.where == "list" else loss
        return x + y

    @property
    def aux(self) -> torch.Tensor:
        if self.where == "outside":
            return OUTSIDE[-1]
        kept = self.last if self.where == "buffer" else self.up.kept
        return kept[0]["losses"].hidden if self.where == "list" else kept


OUTSIDE: list[torch.Tensor] = []


def rows() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(7))


def mine() -> torch.Tensor:
    return rows().chunk(dist.get_world_size())[dist.get_rank()]


def pair(make: Callable[[], nn.Module], **options) -> tuple[nn.Module, nn.Module]:
    """The same module twice, the second one sharded."""
    modules = []
    for _ in range(2):
        torch.manual_seed(3)
        modules.append(make())
    return modules[0], tb.fully_shard(modules[1], **options)


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """Whole, of a sharded module as well. Parameters are lost."""
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    return tb.full_state_dict(module) if hasattr(module, "_ragged_runtime") else dict(module.named_parameters())


def same_gradients(reference: nn.Module, model: nn.Module) -> None:
    want, got = gradients(reference), gradients(model)
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-5, atol=1e-6, msg=name, check_dtype=False)


def containers() -> None:
    """Tensors of a unit's outputs and inputs are found in dataclasses, and cast there."""
    for name, make in OUTPUTS.items():
        reference, model = pair(lambda make=make: nn.Sequential(*(Layer(make) for _ in range(3))), units=Layer)
        for m, x in ((reference, rows()), (model, mine())):
            out = m(x)
            assert type(out) is type(make(x, x)), name
            (opened(out)[0].square().mean() + opened(out)[1].mean()).backward()
        assert all(not unit.whole_nbytes for unit in runtime_of(model).units)
        same_gradients(reference, model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    for make in OUTPUTS.values():
        out = tb.fully_shard(Layer(make), mp_policy=policy)(make(mine(), mine()))
        assert {x.dtype for x in opened(out)} == {torch.float64}


def auxiliary(where: str) -> None:
    """What a unit keeps can be backpropagated alone, before the outputs, after them, or with them."""

    def backward(m, x, order):
        out = m(x).square().mean()
        aux = m[1].aux
        if order == "sum":
            (out + 0.5 * aux).backward()
        else:
            for loss in {"alone": (aux,), "first": (aux, out), "last": (out, aux)}[order]:
                loss.backward(retain_graph=order == "first")

    for order in ("alone", "first", "sum", "last"):
        if order == "last" and where not in ("weight", "bias"):  # its graph is that of the outputs in part
            continue
        reference, model = pair(lambda: nn.Sequential(*(Auxiliary(where) for _ in range(3))), units=Auxiliary)
        backward(reference, rows(), order)
        backward(model, mine(), order)
        same_gradients(reference, model)


class Adding(nn.Module):
    """Adds a loss to a container that it is given, and takes the last one of another."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, notes):
        y = self.linear(notes.hidden).tanh()
        notes.extra["losses"].append(y.square().mean())
        notes.hidden = x + y
        return notes.hidden


class Around(nn.Module):
    def __init__(self, make: Make):
        super().__init__()
        self.make, self.layers = make, nn.ModuleList(Adding() for _ in range(3))

    def forward(self, x):
        notes = self.make(x, {"losses": []})
        notes.extra["self"] = notes
        for layer in self.layers:
            x = layer(x, notes)
        losses = notes.extra["losses"]
        assert len(losses) == len(self.layers)
        return x.square().mean() + sum(losses), losses[0]


def changed_inputs() -> None:
    """What a module adds to a container among its inputs is found there, also where that one contains itself."""
    for make in (Output, Slotted):
        reference, model = pair(lambda make=make: Around(make), units=Adding)
        for m, x in ((reference, rows()), (model, mine())):
            m(x)[0].backward()
        same_gradients(reference, model)
    model = tb.fully_shard(Adding(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    earlier = mine().sum().requires_grad_()
    notes = Output(mine(), {"losses": [earlier]})
    model(mine(), notes)
    assert [x.dtype for x in notes.extra["losses"]] == [torch.float32, torch.bfloat16]
    assert notes.extra["losses"][0] is earlier
    kept = notes.hidden
    with raises("losses", KeyError):
        model(mine(), Output(kept, lost := {"other": earlier}))
    assert lost["other"] is earlier


def out_of_sight() -> None:
    """A loss that is kept outside of the modules cannot have its unit gathered, and must not be computed without."""
    _, model = pair(lambda: nn.Sequential(*(Auxiliary("outside") for _ in range(2))), units=Auxiliary)
    model(mine())
    with raises("modified by an inplace operation"):
        OUTSIDE[-1].backward()
    OUTSIDE.clear()


class Returning(nn.Module):
    def __init__(self, copies: bool):
        super().__init__()
        self.linear, self.copies = nn.Linear(WIDTH, WIDTH), copies

    def forward(self, x):
        weight = self.linear.weight
        return x @ (weight.clone() if self.copies else weight), weight.clone() if self.copies else weight.T


def returned_parameters() -> None:
    """A unit that returns a view of its parameters would have it read when its memory was dropped."""
    _, model = pair(lambda: nn.ModuleDict({"of": Returning(False)}), units=Returning)
    with raises("unit 'of' returns a parameter"):
        model["of"](mine())
    reference, model = pair(lambda: nn.ModuleDict({"of": Returning(True)}), units=Returning)
    for m, x in ((reference, rows()), (model, mine())):
        y, weight = m["of"](x)
        (y.square().mean() + weight.square().sum()).backward()
    same_gradients(reference, model)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise RuntimeError("boom")
        return grad, None


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Layer(lambda *both: both) for _ in range(3)))
        self.fails = True

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 1:
                x = Fails.apply(x[0], self.fails), x[1]
        return (x[0] + x[1]).square().mean()


def failed_backward(then: str) -> None:
    """What comes after a backward that raised has the gradients that it would have had without."""

    def steps(m, x):
        m.fails = False
        other = m(x * 2)
        m.fails = True
        loss = m(x)
        with raises("boom"):
            loss.backward()
        m.zero_grad()
        if then == "other loss":  # whose forward was before
            return other.backward()
        m.fails = False
        if then == "part":  # of the model
            return m.layers[0](x)[0].sum().backward()
        if then == "twice":
            loss = m(x)
            loss.backward(retain_graph=True)
            return loss.backward()
        return m(x).backward()

    reference, model = pair(Failing, units=Layer)
    steps(reference, rows())
    steps(model, mine())
    if then == "part":  # a sum over rows, of which each rank has its part, and a mean over ranks
        for p in reference.parameters():
            p.grad = None if p.grad is None else p.grad / dist.get_world_size()
    same_gradients(reference, model)


def held_whole() -> None:
    """Passes inside of `unsharded` leave the parameters whole."""
    _, model = pair(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), units=nn.Linear)
    before = tb.full_state_dict(model)
    with tb.unsharded(model, writeback=True):
        model(mine()).sum().backward()
        assert model[0].weight.shape == (WIDTH, WIDTH)
        with tb.unsharded(model):
            pass
        with torch.no_grad():
            model[0].weight.mul_(2)
    assert all(p.grad is not None for p in model.parameters() if p.numel())
    assert torch.equal(tb.full_state_dict(model)["0.weight"], before["0.weight"] * 2)
    assert not any(unit.whole_nbytes for unit in runtime_of(model).units)


def copies() -> None:
    """Copying says what to do instead, and that does it."""
    _, model = pair(lambda: nn.Sequential(*(Layer(Output) for _ in range(2))), units=Layer)
    parent = nn.ModuleList([model])
    for part in (model, model[0], parent):
        for copying in (copy.deepcopy, pickle.dumps):
            with raises("copy the module before `fully_shard`", TypeError):
                copying(part)
    second = nn.Sequential(*(Layer(Output) for _ in range(2)))
    tb.fully_shard(second, units=Layer, plan=tb.get_layout(model))
    second.load_state_dict(model.state_dict())
    for x, y in zip(tb.full_state_dict(second).values(), tb.full_state_dict(model).values(), strict=True):
        assert torch.equal(x, y)


def parts_between_passes() -> None:
    """Between forward and backward a module shows parts, also where it is kept whole for backward."""
    for keep in (False, True):
        reference, model = pair(Failing, units=Layer, reshard_after_forward=not keep)
        for m, x in ((reference, rows()), (model, mine())):
            m.fails = False
            for _ in range(2):
                loss = m(x)
                m.zero_grad()  # a second pass does not add to the first one
                assert m is reference or all(p.ndim == 1 for p in m.parameters())
                loss.backward()
        m(x)
        assert {type(x) for x in tb.ragged_state_dict(model).values()} == {tb.RaggedTensor}
        for name, x in tb.full_state_dict(model).items():
            assert torch.equal(x, reference.state_dict()[name])
        same_gradients(reference, model)


class Spanning(nn.Module):
    """A checkpoint over many units."""

    def __init__(self, use_reentrant: bool):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Adding() for _ in range(6))
        self.use_reentrant, self.most = use_reentrant, 0

    def forward(self, x):
        return checkpoint(self.run, self.first(x), use_reentrant=self.use_reentrant)

    def run(self, x):
        for layer in self.layers:
            x = layer(x, Output(x, {"losses": []}))
            if hasattr(self, "_ragged_runtime"):
                self.most = max(self.most, sum(unit.is_whole for unit in runtime_of(self).units[1:]))
        return x


def checkpoint_over_units() -> None:
    """It is recomputed unit by unit: no more of them are whole than otherwise, and all at their backward."""
    for use_reentrant in (False, True):
        reference, model = pair(lambda use=use_reentrant: Spanning(use), units=Adding)
        for m, x in ((reference, rows()), (model, mine())):
            m(x).square().mean().backward()
        assert model.most <= 3, model.most  # the one that runs, the last one, and one that was gathered ahead
        assert not any(unit.num_open_backwards for unit in runtime_of(model).units)
        same_gradients(reference, model)


class Calling(nn.Module):
    """A unit whose forward calls itself."""

    def __init__(self):
        super().__init__()
        self.linear, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, depth: int = 2):
        y = self(self.linear(x).tanh(), depth - 1) if depth else x
        return self.last(y)


def recursion() -> None:
    for units in (None, Calling):
        reference, model = pair(lambda: nn.Sequential(Calling(), Calling()), units=units)
        for m, x in ((reference, rows()), (model, mine())):
            m(x).square().mean().backward()
        same_gradients(reference, model)


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(self.layer(self.layer(x)).tanh()).square().mean()


def hooks_of_parameters() -> None:
    """Those of parts see the gradient of a whole pass, may change it, and may make the step."""
    with raises("would be lost, add them after `fully_shard`: layer/weight", ValueError):
        hooked = Reused()
        hooked.layer.weight.register_hook(print)
        tb.fully_shard(hooked)
    reference, model = pair(Reused, units=nn.Linear)
    calls: dict[int, list[str]] = {}
    for m, x in ((reference, rows()), (model, mine())):
        kept = []

        def clamp(grad):
            calls.setdefault(id(m), []).append("before")  # noqa: B023
            return grad.clamp(-1e-3, 1e-3)

        def step(p, optimizers):
            calls.setdefault(id(m), []).append("after")  # noqa: B023
            optimizers[p].step()
            optimizers[p].zero_grad()

        optimizers = {p: torch.optim.AdamW([p], 1e-2) for p in m.parameters()}
        for p in m.parameters():
            kept.append(p.register_hook(clamp))
            p.register_post_accumulate_grad_hook(lambda p, of=optimizers: step(p, of))
        m(x).backward()
        m(x).backward()
        for handle in kept:
            handle.remove()
        m(x).backward()
        assert all(p.grad is None for p in m.parameters())
    assert sorted(calls[id(model)]) == sorted(calls[id(reference)])
    for name, x in tb.full_state_dict(model).items():
        torch.testing.assert_close(x, reference.state_dict()[name], rtol=1e-5, atol=1e-6)
    layer = tb.fully_shard(nn.Linear(300, 300))
    seen = []
    with tb.unsharded(layer):
        layer.weight.register_hook(lambda grad: seen.append(grad.shape))
    layer(torch.ones(2, 300)).sum().backward()
    assert seen == [(300, 300)]


CASES: dict[str, Callable[[], None]] = {
    "containers": containers,
    "changed inputs": changed_inputs,
    **{f"auxiliary: {w}": lambda w=w: auxiliary(w) for w in ("attribute", "list", "buffer", "weight", "bias")},
    "out of sight": out_of_sight,
    "returned parameters": returned_parameters,
    "held whole": held_whole,
    "parts between passes": parts_between_passes,
    "recursion": recursion,
    "checkpoint over units": checkpoint_over_units,
    "copies": copies,
    "hooks of parameters": hooks_of_parameters,
    **{f"failed, then {t}": lambda t=t: failed_backward(t) for t in ("again", "other loss", "part", "twice")},
}
