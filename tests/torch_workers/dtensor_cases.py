"""What every rank of a gloo job does with `torch_bridge.RaggedTensor`: `dtensor_cases.py RANK SIZE STORE OUT`."""

import copy
import io
import itertools
import math
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checks import raises, scratch
from operations import refused, works
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch_jobs import run_cases

import torch_bridge as tb
from ragged_jax import layout as values
from ragged_jax.layout import Bucket, Layout, Placement, Slab, Split, TensorSpec
from torch_bridge._fully_shard import runtime_of

SHAPES = ((7, 4), (5,), (), (0, 3), (3, 2, 5), (1, 6))


def mesh_1d() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 17 * len(shape)))
    return (x * 3 > 0) if dtype == torch.bool else (x * 3).to(dtype)


def placement(shape: tuple[int, ...], kind: int = 0, size: int | None = None) -> tb.RaggedShard:
    """Cuts inside of rows; `kind` 1 leaves the last rank all, 2 is even where that is possible."""
    size, numel = size or dist.get_world_size(), math.prod(shape)
    if kind == 1:
        numels = [0] * (size - 1) + [numel]
    elif kind == 2 and numel % size == 0:
        numels = [numel // size] * size
    else:
        ends = [numel * (2 * k + k * k) // (2 * size + size * size) for k in range(size + 1)]
        numels = [b - a for a, b in itertools.pairwise(ends)]
    return tb.RaggedShard.of(values.RaggedShard.from_numels(shape, numels))


def ragged(x: torch.Tensor, kind: int = 0) -> tb.RaggedTensor:
    return tb.RaggedTensor.from_full(x, mesh_1d(), [placement(tuple(x.shape), kind)])


def equal(got: torch.Tensor, want: torch.Tensor) -> None:
    whole = got.full_tensor() if isinstance(got, DTensor) else got
    assert (whole.dtype, whole.shape) == (want.dtype, want.shape), (whole, want)
    wide = torch.float32 if want.dtype.itemsize == 1 and want.is_floating_point() else want.dtype
    assert torch.equal(whole.to(wide), want.to(wide)), (whole, want)


def redistribution() -> None:
    """Ragged to ragged, to Shard, to Replicate and back, with empty ranks, transposed tensors and small dtypes."""
    for shape, dtype in itertools.product(SHAPES, (torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn)):
        whole = numbers(shape, dtype)
        for x in (whole, whole.mT.contiguous().mT if whole.ndim > 1 else whole):
            for a, b in itertools.product(range(3), repeat=2):
                held = ragged(x, a)
                equal(held, x)
                other = held.redistribute(placements=[placement(shape, b)])
                equal(other, x)
                assert torch.equal(other.to_local().view(torch.uint8), ragged(x, b).to_local().view(torch.uint8))
            if dtype != torch.float32:
                continue
            for p in (Replicate(), *(Shard(dim) for dim in range(x.ndim))):
                ordinary = distribute_tensor(x, mesh_1d(), [p])
                there = ragged(x).redistribute(placements=[p])
                assert type(there) is DTensor
                assert torch.equal(there.to_local(), ordinary.to_local()), (shape, p)
                assert torch.equal(
                    tb.RaggedTensor.from_dtensor(ordinary, [placement(shape)]).to_local(), ragged(x).to_local()
                )


def sums() -> None:
    """Partial sums are reduced straight to the pieces; nothing is all-reduced."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x, forbidden = numbers((7, 4)).round(), dist.all_reduce
    dist.all_reduce = lambda *_, **__: 1 / 0
    try:
        for kind, op in itertools.product(range(3), ("sum", "avg")):
            mine = x * (rank + 1)
            partial = DTensor.from_local(mine, mesh_1d(), [Partial(op)])
            made = tb.RaggedTensor.from_dtensor(partial, [placement((7, 4), kind)])
            torch.testing.assert_close(made.full_tensor(), x * (size + 1) / 2 * (1 if op == "avg" else size))
            assert torch.equal(mine, x * (rank + 1))
    finally:
        dist.all_reduce = forbidden


def dtensor_cannot_move_it() -> None:
    """Its own code would change the label and not the data, so it must not take the placement."""
    x, ours = numbers((7, 4)), placement((7, 4))
    for p in (Replicate(), Shard(0), Partial()):
        with raises("from_dtensor", TypeError):
            DTensor.from_local(x, mesh_1d(), [p]).redistribute(placements=[ours])
    with raises("", Exception):
        distribute_tensor(x, mesh_1d(), [ours])
    false = DTensor.from_local(x.view(-1), mesh_1d(), [ours], shape=x.shape, stride=x.stride())
    for operation in (lambda: false * 2, false.clone, lambda: false + ragged(x), lambda: ragged(x).copy_(false)):
        with raises("", Exception):
            operation()


def gradients() -> None:
    """Of what goes through ragged tensors: to and from elements, whole tensors and other placements."""
    x, y, scale = numbers((7, 4)), numbers((7, 4), seed=1), dist.get_world_size()
    want = torch.autograd.grad((lambda t: (t.sin() * y * t).sum())(p := x.clone().requires_grad_()), p)[0]
    other = [placement((7, 4), 1)]

    def through_local(t):
        return tb.RaggedTensor.from_local(t.to_local().sin(), t.device_mesh, t.placements, shape=t.shape)

    def through_other(t):
        return (t.redistribute(placements=other).sin() * 1).redistribute(placements=t.placements)

    for loss in (
        lambda t: (t.sin() * ragged(y) * t).sum().full_tensor(),
        lambda t: (t.full_tensor().sin() * y * t.full_tensor()).sum(),
        lambda t: (t.redistribute(placements=[Shard(0)]).sin().full_tensor() * y * t.full_tensor()).sum(),
        lambda t: (through_local(t) * ragged(y) * t).sum().full_tensor(),
        lambda t: (through_other(t) * ragged(y) * t).sum().full_tensor(),
        lambda t: (t.T.full_tensor().sin() * y.T * t.T.full_tensor()).sum(),
    ):
        leaf = nn.Parameter(ragged(x))
        loss(leaf).backward()
        assert isinstance(leaf.grad, tb.RaggedTensor)
        torch.testing.assert_close(leaf.grad.full_tensor(), want)
    leaf = nn.Parameter(ragged(x))  # each rank has a loss of its own: their gradients add up
    ((dist.get_rank() + 1) * leaf.full_tensor(grad_placements=[Partial()]) * y).sum().backward()
    torch.testing.assert_close(leaf.grad.full_tensor(), y * (scale * (scale + 1) / 2))


def copies() -> None:
    """deepcopy, pickle, torch.save and nn.Parameter keep the elements, the placements and what they are."""
    x = ragged(numbers((7, 4)).mT.contiguous().mT)
    parameter = nn.Parameter(x)
    assert isinstance(parameter, nn.Parameter)
    assert isinstance(parameter, tb.RaggedTensor)
    module = nn.Module()
    module.weight = parameter
    file = io.BytesIO()
    torch.save({"weight": parameter}, file)
    file.seek(0)
    for twin in (
        copy.deepcopy(parameter),
        copy.deepcopy(module).weight,
        pickle.loads(pickle.dumps(parameter)),
        torch.load(file, weights_only=True)["weight"],
    ):
        assert isinstance(twin, nn.Parameter)
        assert type(twin) is tb.RaggedTensor
        assert twin.placements == x.placements
        assert twin.stride() == x.stride()
        equal(twin.detach(), x.full_tensor())
        with torch.no_grad():
            twin.add_(1)
    equal(parameter.detach(), numbers((7, 4)))
    assert f"here elements {x.geometry.range[0]}:" in repr(x)
    assert "RaggedShard(dims=" in repr(x)
    assert pickle.loads(pickle.dumps(x.placements)) == x.placements


def optimizers() -> None:
    """Every implementation of AdamW, SGD and clipping equals a run on whole tensors."""
    shapes = [shape for shape in SHAPES if math.prod(shape)]
    for make in (
        *(lambda p, how=how: torch.optim.AdamW(p, 0.1, weight_decay=0.1, **how)
          for how in ({"foreach": False}, {"foreach": True}, {"fused": True})),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    ):  # fmt: skip
        plain = [nn.Parameter(numbers(shape)) for shape in shapes]
        ours = [nn.Parameter(ragged(x.detach())) for x in plain]
        optimizers = make(plain), make(ours)
        for step in range(3):
            for x, y in zip(plain, ours, strict=True):
                x.grad = numbers(tuple(x.shape), seed=step)
                y.grad = ragged(x.grad)
            a = nn.utils.clip_grad_norm_(plain, 1.0, foreach=True)
            b = nn.utils.clip_grad_norm_(ours, 1.0, foreach=step > 0)
            torch.testing.assert_close(b.full_tensor(), a)
            for optimizer in optimizers:
                optimizer.step()
        for x, y in zip(plain, ours, strict=True):
            assert isinstance(y, tb.RaggedTensor)
            torch.testing.assert_close(y.detach().full_tensor(), x.detach())


def scaler() -> None:
    """What one rank finds is found by all."""
    grad = numbers((7, 4))
    grad[0, 0] = math.inf  # on the first rank alone, under this placement
    for x, want in ((grad, 1.0), (numbers((7, 4)), 0.0)):
        found, held = torch.zeros(1), ragged(x)
        torch._amp_foreach_non_finite_check_and_unscale_([held], found, torch.tensor(0.5))
        assert found.item() == want
        equal(held, x * 0.5)


def checkpoints() -> None:
    """torch.distributed.checkpoint: ragged to whole, ragged, other cuts and Shard, and back from Shard."""
    shapes = dict(zip("abcdef", SHAPES, strict=True))

    def state(how: Callable[[torch.Tensor], torch.Tensor], fill: bool = False) -> dict[str, torch.Tensor]:
        x = {name: numbers(shape) for name, shape in shapes.items()} | {"t": numbers((4, 7)).mT}
        return {name: how(torch.full_like(each, -1) if fill else each) for name, each in x.items()}

    ways = {
        "ragged": ragged,
        "other": lambda x: ragged(x, 1),
        "even": lambda x: ragged(x, 2),
        "rows": lambda x: distribute_tensor(x, mesh_1d(), [Shard(0) if x.ndim else Replicate()]),
        "whole": lambda x: x.contiguous(),
    }
    want = state(lambda x: x)
    for saved, loaded in (
        *(("ragged", way) for way in ways),
        ("rows", "ragged"),
        ("whole", "other"),
        ("other", "even"),
    ):
        with scratch() as folder:
            dcp.save(state(ways[saved]), checkpoint_id=folder)
            got = state(ways[loaded], fill=True)
            dcp.load(got, checkpoint_id=folder)
            for name, x in want.items():
                equal(got[name], x.contiguous() if loaded == "whole" else x)


class Two(nn.Module):
    def __init__(self, kind: int):
        super().__init__()
        self.weight = nn.Parameter(ragged(numbers((7, 4)), kind))
        self.bias = nn.Parameter(ragged(numbers((5,)), kind))


def state_dicts() -> None:
    """`get_state_dict` and `set_state_dict` with an optimizer's state, through a checkpoint under other cuts."""

    def trained(kind: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = Two(kind)
        optimizer = torch.optim.AdamW(module.parameters(), 0.1)
        for step in range(steps):
            for p in module.parameters():
                p.grad = ragged(numbers(tuple(p.shape), seed=step), kind)
            optimizer.step()
        return module, optimizer

    module, optimizer = trained(0, 2)
    with scratch() as folder:
        dcp.save(dict(zip(("model", "optim"), get_state_dict(module, optimizer), strict=True)), checkpoint_id=folder)
        other, its = trained(1, 1)
        state = dict(zip(("model", "optim"), get_state_dict(other, its), strict=True))
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(other, its, model_state_dict=state["model"], optim_state_dict=state["optim"])
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        equal(b.detach(), a.detach().full_tensor())
        for key, value in optimizer.state[a].items():
            equal(its.state[b][key], value.full_tensor() if isinstance(value, DTensor) else value)
    whole, _ = get_state_dict(module, (), options=StateDictOptions(full_state_dict=True, cpu_offload=False))
    equal(whole["weight"], module.weight.detach().full_tensor())


def small_layout(size: int, splits: tuple[Split, ...] = (), slices: int = 1) -> Layout:
    """A transposed tensor, one that is cut inside of rows, and one on the last shard alone."""
    a = Placement(TensorSpec("a", (4, 6), splits=splits), 0, axis_order=(1, 0))
    b = Placement(TensorSpec("b", (5, 2), splits=splits), 24)
    return Layout(size, (Bucket("", (Slab("s", "float32", -(-34 // size), 1, (a, b)),)),)).check()


def layouts() -> None:
    """A layout's tensors from a rank's elements, and the exchange form back."""
    size, rank = dist.get_world_size(), dist.get_rank()
    layout = small_layout(size)
    for name, shape, order in (("a", (4, 6), (1, 0)), ("b", (5, 2), (0, 1))):
        x, (low, high) = numbers(shape), layout.ranges(name)[rank]
        local = x.permute(order).reshape(-1)[low:high].clone()
        made = tb.RaggedTensor.from_layout(layout, name, local, mesh_1d())
        equal(made, x)
        assert made.to_local().data_ptr() == local.data_ptr() or low == high
    assert made.placements[0].value == layout.ragged_shard("b")
    assert tb.RaggedShard.of(layout.ragged_shard("b")) == made.placements[0]
    with raises("elements here", ValueError):
        tb.RaggedTensor.from_layout(layout, "b", torch.zeros(11), mesh_1d())


class Model(nn.Module):
    """Transposed and odd sizes, tied, a buffer, a scalar."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, tokens):
        return self.head(self.down(self.up(self.embed(tokens)).relu()) * self.scale)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        tokens = torch.randint(0, 13, (4, 5), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def fully_sharded(mesh: DeviceMesh | None = None) -> None:
    """A module's state as ragged tensors goes through DCP into a module that is sharded in another way."""

    def make(**options) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Model()
        tb.fully_shard(model, mesh, **options)
        return model, torch.optim.AdamW(model.parameters(), 0.01)

    def state(model, optimizer):
        return {"model": tb.ragged_state_dict(model), "optim": tb.ragged_optimizer_state_dict(model, optimizer)}

    (a, opt_a), (b, opt_b) = make(names=tb.flax_names(Model())), make(units=nn.Linear, block=values.rows(2))
    train(a, opt_a, 2)
    train(b, opt_b, 1)
    for name, x in tb.full_state_dict(a).items():
        equal(state(a, opt_a)["model"][name], x)
    with scratch() as folder:
        dcp.save(state(a, opt_a), checkpoint_id=folder)
        dcp.load(state(b, opt_b), checkpoint_id=folder)
        reference = Model()
        whole = {"model": reference.state_dict()}
        dcp.load(whole, checkpoint_id=folder)
        for name, x in tb.full_state_dict(a).items():
            equal(whole["model"][name], x)
    for model, optimizer in ((a, opt_a), (b, opt_b)):
        train(model, optimizer, 2)
    for x, y in zip(tb.full_state_dict(a).values(), tb.full_state_dict(b).values(), strict=True):
        torch.testing.assert_close(x, y)
    slot = runtime_of(a).units[0].slots[0]
    opt_a.state[slot.shard]["codes"] = torch.zeros(3, 3)
    with raises("codes of", ValueError):
        tb.ragged_optimizer_state_dict(a, opt_a)


def tensor_parallel() -> None:
    """Where another mesh dim cuts first: any dim, on a 2 x 2 mesh, whichever of its dims is the ragged one."""
    for names, dim in itertools.product((("fsdp", "tp"), ("tp", "fsdp")), (0, 1)):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        layout = small_layout(2, (Split(dim, 2, "tp"),))
        for name, order in (("a", (1, 0)), ("b", (0, 1))):
            spec = layout.locate(name).placement.tensor
            x = numbers(spec.full_shape)
            part = x.chunk(2, dim)[mesh.get_local_rank("tp")]
            low, high = layout.ranges(name)[mesh.get_local_rank("fsdp")]
            made = tb.RaggedTensor.from_layout(layout, name, part.permute(order).reshape(-1)[low:high].clone(), mesh)
            equal(made, x)
            if name == "b":
                assert made.placements[names.index("fsdp")].value == layout.ragged_shard("b")
            equal((made * 2).add_(made), x * 2 + x)
            torch.testing.assert_close(made.norm().full_tensor(), x.norm())
            torch.testing.assert_close(made.max().full_tensor(), x.max())
            whole = x if name == "b" else x.mT.contiguous().mT
            for back in (
                distribute_tensor(whole, mesh, [Replicate(), Replicate()]),
                distribute_tensor(whole, mesh, [Shard(0), Replicate()]),
            ):
                assert torch.equal(tb.RaggedTensor.from_dtensor(back, made.placements).to_local(), made.to_local())
            sums = DTensor.from_local(part, mesh, [Partial() if n == "fsdp" else Shard(dim) for n in names],
                                      shape=x.shape, stride=whole.stride())  # fmt: skip
            equal(tb.RaggedTensor.from_dtensor(sums, made.placements), x * 2)
            with scratch() as folder:
                dcp.save({"x": made}, checkpoint_id=folder)
                for target in (torch.zeros_like(x), made * 0, distribute_tensor(x * 0, mesh, [Shard(0), Shard(1)])):
                    state = {"x": target}
                    dcp.load(state, checkpoint_id=folder)
                    equal(state["x"], x)
            with raises("RaggedTensor", NotImplementedError):
                made.view(-1) if name == "b" else made.flatten()


def replicas() -> None:
    """Copies over one mesh dim: sums over both, checkpoints, and a module that is sharded so."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    x, placements = numbers((7, 4)).round(), (Replicate(), placement((7, 4), 0, 2))
    held = tb.RaggedTensor.from_full(x, mesh, placements)
    equal(held, x)
    torch.testing.assert_close(held.sum().full_tensor(), x.sum())
    partial = DTensor.from_local(x * (1 + dist.get_rank()), mesh, [Partial(), Partial()])
    equal(tb.RaggedTensor.from_dtensor(partial, placements), x * 10)
    fully_sharded(mesh)


def wrong_arguments() -> None:
    """Errors say what does not fit."""
    size, mesh, x = dist.get_world_size(), mesh_1d(), numbers((7, 4))
    with raises(f"mesh dim 0 has {size}", ValueError):
        tb.RaggedTensor.from_full(x, mesh, [tb.RaggedShard((0,), (1,) * (size + 1))])
    with raises("one a RaggedShard", ValueError):
        tb.RaggedTensor.from_full(x, mesh, [Shard(0)])
    with raises("does not divide", ValueError):
        tb.RaggedTensor.from_full(x, mesh, [tb.RaggedShard((0,), (28 - 1 + 29,) + (1,) * (size - 1))])
    with raises("splits", ValueError), suppress(AttributeError):
        tb.RaggedTensor.from_full(x, mesh, [tb.RaggedShard((0,), (1,) * size, ((0, 1),))])
    with raises("torch.compile", NotImplementedError):
        ragged(x).__tensor_flatten__()


def check(name: str, got: object, want: object) -> None:
    if isinstance(want, torch.Tensor):
        whole = got.full_tensor() if isinstance(got, DTensor) else got
        assert isinstance(whole, torch.Tensor), (name, got)
        close = {"rtol": 1e-2, "atol": 1e-2} if want.dtype == torch.bfloat16 else {}
        torch.testing.assert_close(whole, want, equal_nan=True, msg=lambda text: f"{name}: {text}", **close)
    elif isinstance(want, tuple | list):
        assert len(got) == len(want), name
        for a, b in zip(got, want, strict=True):
            check(name, a, b)
    else:
        assert got == want or want != want, name


def sweep(kind: int) -> None:
    """Every operation either equals the run on whole tensors, with its shape and dtype, or raises by name."""
    faults = []
    for name, case in works():
        held = [numbers((7, 4)), numbers((7, 4), seed=1).abs() + 0.1]
        try:
            check(name, case(*(ragged(x, kind) for x in held)), case(*held))
        except Exception as error:
            faults.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    for name, case in refused():
        try:
            case(*(ragged(numbers((7, 4), seed=i), kind) for i in range(2)))
            faults.append(f"{name}: did not raise")
        except NotImplementedError as error:
            if "ragged" not in str(error).lower() or ("aten." not in str(error)):
                faults.append(f"{name}: {error}")
        except Exception as error:
            faults.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    assert not faults, "\n".join(faults)


def sweep_of_scalars() -> None:
    """0-d tensors: all elements on one rank, and other rules for dtypes."""
    for a, b in itertools.product((torch.float32, torch.bfloat16, torch.int64, torch.float64), repeat=2):
        x, y = numbers((), a), numbers((), b, seed=1)
        for case in (lambda x, y: x + y, lambda x, y: y * x, lambda x, y: (x * 2.5, x.sum(), x + True)):
            check(f"{a} {b}", case(ragged(x), y), case(x, y))
            check(f"{a} {b}", case(ragged(x), ragged(y)), case(x, y))


def the_same_on_every_rank() -> None:
    """What one rank without elements would not notice is noticed there too, else the others wait for it."""
    for ord, dtype in itertools.product((2.0, math.inf, -1.0), (torch.int64, torch.bool)):
        with raises("norm", RuntimeError):
            torch.linalg.vector_norm(ragged(numbers((5,), dtype), 1), ord)
    for reduce in (lambda x: torch.linalg.vector_norm(x, math.inf), lambda x: torch._foreach_max([x])):
        with raises("elements", RuntimeError):
            reduce(ragged(numbers((0, 3))))
    one = torch.tensor(1.0)
    for x, y in itertools.product((one, one * 2), (one, DTensor.from_local(one, mesh_1d(), [Replicate()]))):
        assert torch.equal(ragged(x), y) == torch.equal(x, one)
    for operation in (
        lambda x: torch.any(x, dim=()),  # as many bools as elements
        lambda x: torch.all(x, dim=()),
        lambda x: torch.add(one, one, out=x),
    ):
        with raises("Ragged", NotImplementedError):
            operation(ragged(numbers((7, 4))))


def replicated_operands() -> None:
    """A replicated DTensor gives its elements, wherever they are; one that is sharded is refused."""
    x, y = numbers((7, 4)), numbers((7, 4), seed=1)
    equal(ragged(x) * DTensor.from_local(y, mesh_1d(), [Replicate()]), x * y)
    equal(ragged(x).copy_(DTensor.from_local(y, mesh_1d(), [Replicate()])), y)
    if dist.get_world_size() > 1:
        for other in (distribute_tensor(y, mesh_1d(), [Shard(0)]), ragged(y, 1)):
            for operation in (lambda z: ragged(x) + z, lambda z: ragged(x).copy_(z), lambda z: z.mul_(ragged(x))):
                with raises("Ragged", NotImplementedError):
                    operation(other)


CASES: dict[str, Callable[[], None]] = {
    "redistribution": redistribution,
    "sums": sums,
    "DTensor cannot move it": dtensor_cannot_move_it,
    "gradients": gradients,
    "copies": copies,
    "optimizers": optimizers,
    "scaler": scaler,
    "sweep": lambda: sweep(0),
    "sweep with empty ranks": lambda: sweep(1),
    "sweep of scalars": sweep_of_scalars,
    "the same on every rank": the_same_on_every_rank,
    "replicated operands": replicated_operands,
    "checkpoints": checkpoints,
    "state dicts": state_dicts,
    "layouts": layouts,
    "fully sharded": fully_sharded,
    "wrong arguments": wrong_arguments,
}
ONE_RANK = {name: CASES[name] for name in ("redistribution", "copies", "optimizers", "checkpoints", "fully sharded")}
THREE_RANKS = {
    name: CASES[name] for name in ("redistribution", "sums", "checkpoints", "layouts", "fully sharded")
} | {"sweep with empty ranks": lambda: sweep(1)}
FOUR_RANKS = {"tensor parallel": tensor_parallel, "replicas": replicas}


if __name__ == "__main__":
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    run_cases({1: ONE_RANK, 2: CASES, 3: THREE_RANKS, 4: FOUR_RANKS}[size], rank, size, *sys.argv[3:])
