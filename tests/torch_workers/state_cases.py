"""What every rank of a gloo job does with states of `torch_bridge`: `state_cases.py RANK SIZE STORE OUT FOLDER`."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import huggingface_cases
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checks import reads
from fsdp_cases import Block, OddModel, data, loss_of, make, mine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch_jobs import run_cases

import torch_bridge as tb
from ragged_jax.checkpoint import Checkpoint, CheckpointError, read_shard
from ragged_jax.layout import elements, rows, whole
from torch_bridge._fully_shard import runtime_of

FOLDER = Path(sys.argv[5])


@contextmanager
def raises(kind: type[Exception], *texts: str) -> Iterator[None]:
    message = ""
    try:
        yield
    except kind as error:
        message = str(error)
    assert message, "nothing was raised"
    assert all(text in message for text in texts), message


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, eps=1e-4)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> list[float]:
    losses = []
    for batch in mine(tokens):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The state of every parameter, whole, by its name and key."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = {}
    for key in ("exp_avg", "exp_avg_sq"):
        kept = [(p, p.data.clone()) for p in optimizer.state]
        for p, state in optimizer.state.items():
            p.data.copy_(state[key])
        full = tb.full_state_dict(model)
        found |= {f"{key} {names[id(p)]}": full[names[id(p)]] for p in optimizer.state}
        for p, value in kept:
            p.data.copy_(value)
    return found


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].dtype == x.dtype, name
        assert torch.equal(got[name], x), name


def shares() -> tuple[int, ...]:
    return tuple(1 + k for k in range(dist.get_world_size()))


def training_goes_on() -> None:
    """On the same layout bit for bit, as if nothing had been saved; the save is made while training goes on."""
    model = tb.fully_shard(make(), units=Block)
    optimizer = adamw(model)
    first = train(model, optimizer, data()[:2])
    with tb.Checkpointer(FOLDER / "on") as checkpointer:
        checkpointer.save(2, {"model": model, "opt": optimizer, "step": 2}, metadata={"losses": first})
        want = train(model, optimizer, data()[2:4])
    torch.manual_seed(7)
    again = tb.fully_shard(OddModel(), units=Block)
    other = adamw(again)
    checkpointer = tb.Checkpointer(FOLDER / "on")
    state = checkpointer.restore({"model": again, "opt": other, "step": 0})
    assert state == {"model": again, "opt": other, "step": 2}
    assert train(again, other, data()[2:4]) == want
    assert_same(tb.full_state_dict(again), tb.full_state_dict(model))
    with checkpointer.open() as checkpoint:
        assert checkpoint.verify() == []
        assert "opt/opt_state/0/mu/blocks/1/up/weight" in checkpoint
        assert set(checkpoint.layouts) == {"model", "opt/opt_state/0/mu", "opt/opt_state/0/nu"}
        assert checkpoint.layouts["model"] == tb.get_layout(model)
        assert len(checkpoint.metadata["losses"]) == 2


def any_layout() -> None:
    """From one layout to others: uneven, in rows, whole tensors, replicated; and before the first step."""
    model, size = make(), dist.get_world_size()
    chosen = tb.plan_module(model, size, units=Block, block=rows(1), shares=shares())
    tb.fully_shard(model, units=Block, plan=chosen)
    optimizer = adamw(model)
    directory = FOLDER / "layouts"
    tb.Checkpointer(directory, background=False).save(0, {"model": model, "opt": optimizer})
    train(model, optimizer, data()[:1])
    tb.Checkpointer(directory, background=False).save(1, {"model": model, "opt": optimizer})
    want = tb.full_state_dict(model) | moments(model, optimizer)
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))
    for options in ({"block": whole()}, {"units": Block}, {"mesh": mesh}):
        torch.manual_seed(7)
        again = tb.fully_shard(OddModel(), **options)
        other = adamw(again)
        tb.Checkpointer(directory).restore({"model": again, "opt": other}, 0)
        assert not any(state["step"] or state["exp_avg"].any() for state in other.state.values())
        tb.Checkpointer(directory).restore({"model": again, "opt": other})
        assert_same(tb.full_state_dict(again) | moments(again, other), want)
        if "mesh" in options:
            with tb.Checkpointer(FOLDER / "replicas") as checkpointer:
                checkpointer.save(1, {"model": again, "opt": other})
                train(again, other, data()[:1])
                checkpointer.restore({"model": again, "opt": other})
            assert_same(tb.full_state_dict(again) | moments(again, other), want)


class Progress(NamedTuple):
    position: int
    seen: float


def padding_and_other_leaves() -> None:
    """NaN in the padding is not saved; buffers, generators, bfloat16, numbers, and what torch cannot read."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Parameter(torch.randn(33, 7, dtype=torch.bfloat16))
            self.odd = nn.Parameter(torch.randn(5))
            self.register_buffer("table", torch.randn(3, 4).T)
            self.num_calls = 0
            self.register_buffer("scratch", torch.randn(2), persistent=False)

        def get_extra_state(self):
            return {"num_calls": self.num_calls}

        def set_extra_state(self, state):
            self.num_calls = state["num_calls"]

    torch.manual_seed(0)
    model = tb.fully_shard(Mixed(), block=rows(2))
    model.num_calls = 6
    for unit in runtime_of(model).units:
        for memory, slots in unit._slots:
            kept = [slot.shard.detach().clone() for slot in slots]
            memory.shards.fill_(float("nan"))
            for slot, x in zip(slots, kept, strict=True):
                slot.shard.data.copy_(x)
    generator = torch.Generator().manual_seed(5)
    key = tb.AsSaved(torch.tensor([1, 2], dtype=torch.uint32), {"prng_impl": "fry"})
    state = {"model": model, "rest": [generator, 7, 0.5, True, torch.arange(6).view(2, 3).T], "key": key, "no": None}
    state["at"] = Progress(4, 0.5)
    want, table = tb.full_state_dict(model), model.table.clone()
    assert tb.ragged_state_dict(model)["_extra_state"] == want.pop("_extra_state") == {"num_calls": 6}
    with tb.Checkpointer(FOLDER / "leaves") as checkpointer:
        checkpointer.save(3, state)
        drawn = torch.rand(3, generator=generator)
        torch.manual_seed(9)
        model = tb.fully_shard(Mixed())
        empty = [torch.Generator(), 0, 0.0, False, torch.zeros(2, 3, dtype=torch.int64).T]
        like = {"model": model, "rest": empty, "key": tb.AsSaved(), "no": None, "at": Progress(0, 0.0)}
        got = checkpointer.restore(like)
        assert got["at"] == Progress(4, 0.5)
        assert tb.full_state_dict(model).pop("_extra_state") == {"num_calls": 6}
        assert_same({name: x for name, x in tb.full_state_dict(model).items() if name in want}, want)
        assert torch.equal(model.table, table)
        assert torch.equal(torch.rand(3, generator=got["rest"][0]), drawn)
        assert [*map(repr, got["rest"][1:4])] == ["7", "0.5", "True"]
        assert torch.equal(got["rest"][4], torch.arange(6).view(2, 3).T)
        assert got["key"].value.tolist() == [1, 2]
        assert got["key"].attributes == {"prng_impl": "fry"}
        checkpointer.save(4, got)
    with Checkpoint(FOLDER / "leaves" / "step_00000004") as checkpoint:
        assert checkpoint.entry("key").attributes == {"prng_impl": "fry"}
        assert not checkpoint.read("model/wide").astype("float32").max() > 100


def errors_name_everything() -> None:
    model = tb.fully_shard(make(), units=Block)
    checkpointer = tb.Checkpointer(FOLDER / "on")
    other = tb.fully_shard(nn.ModuleDict({"embed": nn.Embedding(1601, 40), "tail": nn.Linear(2, 2)}))
    with raises(ValueError, "embed/weight: saved with shape (1601, 48)", "model/tail/weight", "model/tail/bias"):
        checkpointer.restore({"model": other})
    with raises(ValueError, "saved as float32, wanted as bfloat16", "cast=True"):
        checkpointer.restore({"model": tb.fully_shard(make().bfloat16(), units=Block)})
    half = tb.fully_shard(make().bfloat16(), units=Block)
    checkpointer.restore({"model": half}, cast=True)
    checkpointer.restore({"model": model})
    full = tb.full_state_dict(model)
    assert_same(tb.full_state_dict(half), {k: x.bfloat16() if x.is_floating_point() else x for k, x in full.items()})
    with raises(CheckpointError, "step 9 was not saved: rank 1: TypeError", "what: str"):
        checkpointer.save(9, {"what": "no" if dist.get_rank() == 1 else 1})
        checkpointer.wait()
    with raises(CheckpointError, "what: str", "list/0: object"):
        checkpointer.save(9, {"what": "no", "list": [object()]})
    with raises(CheckpointError, "SGD", "StateNames"):
        checkpointer.save(9, {"model": model, "opt": torch.optim.SGD(model.parameters(), 0.1)})
    with raises(CheckpointError, "opt: parameters of shapes"):
        checkpointer.save(9, {"opt": adamw(model)})
    assert checkpointer.steps() == [2]


def reads_its_own_part() -> None:
    """Bytes read by a rank: its share, and at most a chunk at both ends of each tensor's range."""
    torch.manual_seed(0)
    model = tb.fully_shard(nn.Linear(1024, 1500), block=rows(1))
    optimizer = adamw(model)
    with tb.Checkpointer(FOLDER / "large") as checkpointer:
        checkpointer.save(0, {"model": model, "opt": optimizer})
    again = nn.Linear(1024, 1500)
    tb.fully_shard(again, plan=tb.plan_module(again, dist.get_world_size(), block=rows(1), shares=shares()))
    other = adamw(again)
    with reads() as sizes:
        tb.Checkpointer(FOLDER / "large").restore({"model": again, "opt": other})
    held = 3 * sum(p.nbytes for p in again.parameters())
    assert held <= sum(sizes) <= held + 6 * 2 * (1 << 18), (sum(sizes), held)
    assert_same(tb.full_state_dict(again), tb.full_state_dict(model))


class TwinBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 100)
        self.down = nn.Linear(100, width)
        self.shift = nn.Parameter(torch.zeros(5))


class Twin(nn.Module):
    """The Flax model of tests/models.py."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1601, 48)
        self.blocks = nn.ModuleList([TwinBlock(48) for _ in range(2)])
        self.temperature = nn.Parameter(torch.tensor(4.0))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("num_calls", torch.tensor(0, dtype=torch.int32))
        self.head = nn.Embedding(1601, 48)
        self.head.weight = self.embed.weight


def meta_twin() -> Twin:
    with torch.device("meta"):
        return Twin()


def from_jax(layout: str) -> None:
    """A Flax model's layout, parameters and AdamW state, without a copy; and back into a checkpoint."""
    model = meta_twin()
    names, planned = tb.flax_names(model), tb.load_layout(FOLDER / f"{layout}.json")
    if layout == "listed":
        assert tb.plan_module(model, 3, units=TwinBlock, names=names).layout.fingerprint == planned.fingerprint
    tb.fully_shard(model, units=TwinBlock, plan=planned, names=names)
    with raises(RuntimeError, "made on `meta` and have no values yet: embed/embedding, nothing, temperature"):
        tb.full_state_dict(model)
    optimizer = adamw(model)
    state = {"model": model, "opt": optimizer, "key": tb.AsSaved()}
    state = tb.Checkpointer(FOLDER / "jax_adamw").restore(state)
    full, units = tb.full_state_dict(model), runtime_of(model).units
    saved = FOLDER / "jax_adamw" / "step_00000005"
    assert tb.load_layout(FOLDER / "jax_adamw") == tb.load_layout(saved)
    with Checkpoint(saved) as checkpoint:
        shapes = {rule[0]: checkpoint.entry(f"model/{rule[0]}").shape for rule in names.rules}
        for name, mapped in names.apply(shapes).items():
            link = mapped.links[0]
            want = torch.from_numpy(np.array(link.take(checkpoint.read(f"model/{link.source}"))))
            assert torch.equal(full[name], want), name
        for slot in (slot for unit in units for slot in unit.slots):
            got, (low, high) = optimizer.state[slot.shard], slot.slab.local(slot.placement)
            assert got["step"] == 9
            for key, path in tb.ADAMW.tensors.items():
                stored = checkpoint.read(f"opt/{path}/{slot.placement.tensor.name}").ravel()
                assert np.array_equal(got[key].numpy(), stored[low:high]), slot.placement.tensor.name
        shard = read_shard(checkpoint, planned, dist.get_rank(), prefix="model")
    held = {unit.bucket.name: [s.shard(m.shards) for m in unit._memories for s in m.slabs] for unit in units}
    for (bucket, _), slab in shard.items():  # of a stack, row i is layer i
        layers = [*enumerate(slab)] if planned.bucket(bucket).stack else [("", slab)]
        for at, row in layers:
            mine = held[f"{bucket}/{at}".rstrip("/")]
            assert any(np.array_equal(row, x.numpy()) for x in mine), bucket
    assert model.num_calls == 9
    for name, x in tb.ragged_state_dict(model).items():
        assert torch.equal(x.full_tensor() if isinstance(x, tb.RaggedTensor) else x, full[name]), name
    with tb.Checkpointer(FOLDER / f"torch_{layout}") as checkpointer:
        checkpointer.save(6, state)


def muon_from_jax() -> None:
    """Muon's momentum, and codes and scales of AdamW in 8 bits, on a layout of torch's own."""
    model = meta_twin()
    tb.fully_shard(model, units=TwinBlock, block=elements(256), names=tb.flax_names(model))
    routes = zip(model.parameters(), tb.optim.routing(model).routes, strict=True)
    kinds = {id(p): route.to for p, route in routes}
    muon = tb.optim.Muon([p for p in model.parameters() if kinds[id(p)] == "muon"])
    adamw = tb.optim.AdamW8bit([p for p in model.parameters() if kinds[id(p)] == "adamw"])
    inner = "opt/opt_state/inner/adamw"
    state = {"model": model, "opt": muon, inner: adamw, "key": tb.AsSaved()}
    state_names = {inner: tb.ADAMW.at("")}
    with raises(ValueError, "same name"):
        tb.Checkpointer(FOLDER / "no").save(0, {"m": {"odel": 1}, "m/odel": 2})
    state = tb.Checkpointer(FOLDER / "jax_muon", state_names=state_names).restore(state)
    assert muon.num_steps == adamw.num_steps == 9
    with tb.Checkpointer(FOLDER / "torch_own", state_names=state_names) as checkpointer:
        checkpointer.save(6, state)
        adamw.num_steps = 8
        with raises(ValueError, "have taken 9 and 8 steps"):
            checkpointer.save(7, state)


def initialised() -> None:
    """Layer by layer on every rank, the bits of one device, and never much more than a layer and the shards."""
    with torch.device("meta"):
        model = OddModel()
    names = tb.flax_names(model)
    tb.fully_shard(model, units=Block, names=names)
    with raises(TypeError, "no reset_parameters: blocks/0, blocks/1, blocks/2, (root)"):
        tb.init_parameters(model)
    torch.manual_seed(dist.get_rank())
    with raises(ValueError, "torch.manual_seed"):
        tb.init_parameters(model, lambda module: None)
    torch.manual_seed(0)
    with raises(ValueError, "Embedding was initialised, but these have no values: embed/weight"):
        tb.init_parameters(model, lambda module: None)

    def init(module):
        if isinstance(module, Block):
            nn.init.zeros_(module.shift)
            nn.init.ones_(module.unused)
        elif isinstance(module, OddModel):
            nn.init.constant_(module.temperature, 4.0)
            module.steps.data.copy_(torch.arange(6))
        else:
            module.reset_parameters()

    torch.manual_seed(0)
    tb.init_parameters(model, init)
    assert_same(tb.full_state_dict(model), make().state_dict())


def by_torch_alone() -> None:
    """A module from `meta` has the values that `load_state_dict` or a checkpoint of torch's own gave it."""
    torch.manual_seed(5)
    model = tb.fully_shard(huggingface_cases.Tied(), block=whole())  # not every rank has elements of each
    for load in (
        lambda into: into.load_state_dict(model.state_dict()),
        lambda into: dcp.load(tb.ragged_state_dict(into), checkpoint_id=FOLDER / "dcp"),
    ):
        with torch.device("meta"):
            again = huggingface_cases.Tied()
        tb.fully_shard(again, block=whole())
        with raises(RuntimeError, "up/bias", "no values yet"):
            tb.full_state_dict(again)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's checkpoints use what torch deprecates
            dcp.save(tb.ragged_state_dict(model), checkpoint_id=FOLDER / "dcp")
            load(again)
        assert_same(tb.full_state_dict(again), tb.full_state_dict(model))
        assert runtime_of(again).missing_buffers == {"scratch"}


def never_whole() -> None:
    """Made, initialised, saved and restored within the memory of the shards and a few layers."""

    def tall() -> nn.Module:
        return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(18)])

    def born() -> nn.Module:
        with torch.device("meta"):
            model = tall()
        return tb.fully_shard(model, units=nn.Linear)

    torch.manual_seed(0)
    start = peak(reset=True)
    model, again = born(), born()
    tb.init_parameters(model)
    with tb.Checkpointer(FOLDER / "tall", background=False) as checkpointer:
        checkpointer.save(0, model)
        checkpointer.restore(again)
    grown, want = peak() - start, tall()
    size, layer = sum(p.nbytes for p in want.parameters()), 4 << 20
    assert grown < 2 * size / dist.get_world_size() + 3 * layer < 0.9 * size, (grown, size)
    torch.manual_seed(0)
    assert_same(tb.full_state_dict(again), tall().state_dict())


def peak(*, reset: bool = False) -> int:
    """The most memory that this process has had, in bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10


CASES: dict[str, Callable[[], None]] = {
    "training goes on": training_goes_on,
    "any layout": any_layout,
    "leaves": padding_and_other_leaves,
    "errors": errors_name_everything,
    "reads its part": reads_its_own_part,
    "from jax": lambda: from_jax("listed"),
    "from jax, stacked": lambda: from_jax("stacked"),
    "from jax, muon": muon_from_jax,
    "initialised": initialised,
    "by torch alone": by_torch_alone,
    "never whole": never_whole,
    "hugging face": lambda: huggingface_cases.by_any_names(FOLDER),
    "a real model": lambda: huggingface_cases.a_real_model(FOLDER),
}

if __name__ == "__main__":
    rank, size, store, out, _ = sys.argv[1:]
    run_cases(CASES, int(rank), int(size), store, out)
