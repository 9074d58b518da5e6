"""What every rank of a gloo job does with `torch_bridge.fully_shard`: `fsdp_cases.py RANK SIZE STORE OUT`."""

import sys
import warnings
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from checks import raises
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint
from torch_jobs import run_cases

import torch_bridge as tb
from ragged_jax.layout import rows, whole
from torch_bridge import _unit
from torch_bridge._fully_shard import runtime_of

_unit.PLACED_NUMEL = 48 * 3 * 48  # that of `mix`, and not of the others
VOCAB, WIDTH, STEPS, BATCH = 1601, 48, 20, 24


class Block(nn.Module):
    def __init__(self, remat: str = ""):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 100)
        self.down = nn.Linear(100, WIDTH)
        self.shift = nn.Parameter(torch.zeros(5))
        self.unused = nn.Parameter(torch.ones(3, 7))
        self.remat = remat

    def body(self, x):
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.down(nn.functional.gelu(self.up(x))) * (1 + self.shift.sum())

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=self.remat == "reentrant") if self.remat else self.body(x)


class OddModel(nn.Module):
    """Vocabulary 1601, width 48, a bias of 5, a scalar, a zero-size, an unused and an integer parameter, tied."""

    def __init__(self, remat: str = "", twice: bool = False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(remat) for _ in range(3)])
        self.temperature = nn.Parameter(torch.tensor(4.0))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.steps = nn.Parameter(torch.arange(6), requires_grad=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.twice = twice

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
            if self.twice:
                x = x + block(x * 0.5)
        return self.head(x * self.temperature / 8)


def make(**options) -> OddModel:
    torch.manual_seed(0)
    return OddModel(**options)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def data() -> torch.Tensor:
    return torch.randint(0, VOCAB, (STEPS, BATCH, 6), generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, tokens: torch.Tensor, lr: float = 3e-3) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, eps=1e-4)
    losses = []
    for batch in tokens:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def mine(tokens: torch.Tensor) -> torch.Tensor:
    return tokens.chunk(dist.get_world_size(), 1)[dist.get_rank()]


def compare(model: nn.Module, losses: list[torch.Tensor], reference: nn.Module, want: list[torch.Tensor], rtol=1e-5):
    """A parameter that nothing uses is left out: sharded, its gradient is zero, and weight decay moves it."""
    compare_losses(losses, want, rtol)
    compare_states(tb.full_state_dict(model), reference.state_dict(), rtol)


def compare_states(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], rtol: float = 1e-5) -> None:
    for name, x in want.items():
        if "unused" not in name:
            scale = x.abs().max() if x.numel() else 0
            torch.testing.assert_close(got[name], x, rtol=2 * rtol, atol=2 * rtol * float(scale), msg=name)


def compare_losses(losses: list[torch.Tensor], want: list[torch.Tensor], rtol: float = 1e-5) -> None:
    total = torch.stack(losses)
    dist.all_reduce(total)
    torch.testing.assert_close(total / dist.get_world_size(), torch.stack(want), rtol=rtol, atol=0)


def parity(*, steps: int = 5, frozen: bool = False, sharded: dict | None = None, **options) -> None:
    """The losses and parameters of AdamW equal those of one process that sees the whole batch."""
    reference, model = make(**options), make(**options)
    tokens = data()[:steps]
    if frozen:
        for m in (reference, model):
            m.embed.weight.requires_grad_(False)
            m.blocks[1].up.weight.requires_grad_(False)
    tb.fully_shard(model, **{"units": Block, **(sharded or {})})
    compare(model, train(model, mine(tokens)), reference, train(reference, tokens))


def uneven() -> None:
    model, size = make(), dist.get_world_size()
    chosen = tb.plan_module(model, size, units=Block, block=rows(1), shares=tuple(1 + k for k in range(size)))
    assert size == 1 or chosen.layout.shares == tuple(1 + k for k in range(size))
    parity(sharded={"plan": chosen})


def bytes_of_a_rank() -> None:
    model = make()
    tb.fully_shard(model, units=Block)
    layout = tb.get_layout(model)
    held = sum(unit.shard_nbytes for unit in runtime_of(model).units)
    slabs = sum(len(bucket.slabs) for bucket in layout.buckets)
    assert layout.shard_nbytes <= held <= layout.shard_nbytes + 64 * slabs
    train(model, mine(data()[:1]))
    for unit in runtime_of(model).units:
        assert unit.whole_nbytes == 0


def accumulation() -> None:
    reference, model = make(), make()
    tb.fully_shard(model, units=Block)
    tokens = data()[:3]
    for m, share in ((reference, lambda x: x), (model, mine)):
        for i, batch in enumerate(share(tokens)):
            if m is model:
                tb.set_requires_gradient_sync(model, i == 2)
            loss_of(m, batch).backward()
    want = dict(reference.named_parameters())
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.copy_(p.grad)
    for name, x in tb.full_state_dict(model).items():
        if name in want and want[name].grad is not None:
            grad = want[name].grad
            torch.testing.assert_close(x, grad, rtol=1e-5, atol=1e-5 * float(grad.abs().max()), msg=name)


def products_in_place() -> None:
    """Large gradients of linear layers are written where they are reduced from, also of layers that are used twice.

    But not where autograd is asked for them or a graph of them is, and not through an autocast.
    """
    model = make(twice=True)
    tb.fully_shard(model, units=Block, names=tb.flax_names(model))
    tb.set_requires_gradient_sync(model, False)
    loss_of(model, mine(data())[0]).backward()
    for unit in runtime_of(model).units[1:]:
        found = {
            s.placement.tensor.name: m.has_gradient(s.whole.grad)
            for m, ss in unit._slots
            for s in ss
            if s.whole.grad is not None
        }
        assert {name for name, inside in found.items() if inside} == {n for n in found if n.endswith("mix/kernel")}, (
            found
        )
    tb.forget_gradients(model)
    x = torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(2), requires_grad=True)
    layer = tb.fully_shard(nn.Linear(WIDTH, 150))
    with tb.unsharded(layer):
        weight, plain = layer.weight, nn.Linear(WIDTH, 150)
        plain.load_state_dict(layer.state_dict())
        for inputs in ((x,), (x, weight), (weight,)):
            for graph in (False, True):
                got = torch.autograd.grad(layer(x).square().sum(), inputs, create_graph=graph)
                like = [plain.weight if y is weight else y for y in inputs]
                want = torch.autograd.grad(plain(x).square().sum(), like, create_graph=graph)
                for a, b in zip(got, want, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
        assert weight.grad is None
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16


class Oddities(nn.Module):
    """Complex weights, no features, a bias for each row, sparse gradients, a subclass of tensors."""

    class Named(torch.Tensor):
        pass

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 6, sparse=True)
        self.wave = nn.Linear(6, 6, dtype=torch.complex64)
        self.narrow, self.widen = nn.Parameter(torch.zeros(0, 6)), nn.Parameter(torch.zeros(6, 0))
        self.rows = nn.Parameter(torch.randn(2, 6))
        self.last = nn.Linear(6, 6)

    def forward(self, tokens):
        x = torch.view_as_real(self.wave(self.embed(tokens) * (1 + 2j)))[..., 1]
        x = torch.stack([nn.functional.linear(pair, self.last.weight, self.rows) for pair in x.split(2)])
        x = x + nn.functional.linear(nn.functional.linear(x, self.narrow), self.widen)
        x = self.last(x.as_subclass(self.Named))
        assert type(x) is self.Named
        return x.as_subclass(torch.Tensor)


def oddities() -> None:
    size, tokens = dist.get_world_size(), torch.arange(24).reshape(12, 2)[:, 0] % 30
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=torch.float64)):
        torch.manual_seed(0)
        reference = Oddities()
        torch.manual_seed(0)
        model = tb.fully_shard(Oddities(), mp_policy=policy)
        for m, batch in ((reference, tokens), (model, tokens.chunk(size)[dist.get_rank()])):
            m(batch).square().mean().backward()
            with torch.no_grad():
                for p in m.parameters():
                    p -= p.grad.to_dense() if p.grad.is_sparse else p.grad
        compare_states(tb.full_state_dict(model), reference.state_dict())
    x = torch.randn(4, 6, requires_grad=True)
    layer = tb.fully_shard(nn.Linear(6, 6))
    (grad,) = torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)
    with raises("differentiate twice"):
        grad.square().sum().backward()


def a_sum_that_float16_does_not_hold() -> None:
    layer = tb.fully_shard(
        nn.Linear(1, 1, bias=False).half(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)
    )
    (layer(torch.ones(1, 1).half()) * 40000).sum().backward()
    assert all(float(p.grad) == 40000 for p in layer.parameters() if p.numel())


def sums_of_many_passes() -> None:
    """Gradients of passes without a reduction add up in the dtype in which ranks' gradients are summed."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for width in (2, 300):  # the products of the second are made in place
        layer = tb.fully_shard(nn.Linear(width, width, bias=False), mp_policy=policy)
        for i, x in enumerate((256.0, 1.0, 1.0, 1.0)):
            tb.set_requires_gradient_sync(layer, i in (2, 3))
            layer(torch.full((1, width), x)).sum().backward()
        assert all(bool((p.grad == 259).all()) for p in layer.parameters())


class Sometimes(nn.Linear):
    def forward(self, x, used):
        return super().forward(x) if used else x


def passes_in_which_one_rank_uses_nothing() -> None:
    """All ranks send gradients in one dtype, whatever each has of earlier passes without a reduction."""
    policy, size = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), dist.get_world_size()
    layer = tb.fully_shard(Sometimes(8, 8, bias=False), mp_policy=policy)
    for sync, x, used in ((False, 256.0, dist.get_rank() > 0), (True, 1.0, True), (True, 1.0, True)):
        tb.set_requires_gradient_sync(layer, sync)
        layer(torch.full((1, 8), x, requires_grad=True), used).sum().backward()
    want = torch.tensor((256.0 * (size - 1) + 2 * size) / size)
    for p in layer.parameters():
        torch.testing.assert_close(p.grad, want.expand_as(p))


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x, both):
        y = self.first(x)
        return y + self.second(y.double()) if both else y


def a_dtype_that_one_rank_uses() -> None:
    size = dist.get_world_size()
    torch.manual_seed(3)
    reference = TwoDtypes()
    torch.manual_seed(3)
    model, x = tb.fully_shard(TwoDtypes()), torch.arange(6.0) / 6
    sum(reference(x, k == 0).sum() / size for k in range(size)).backward()
    model(x, dist.get_rank() == 0).sum().backward()
    with torch.no_grad():
        for m in (reference, model):
            for p in m.parameters():
                p.copy_(p.grad)
    compare_states(tb.full_state_dict(model), reference.state_dict())


def compiled() -> None:
    def make_compiled():
        model = make()
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return model

    reference, model = make(), make_compiled()
    tb.fully_shard(model, units=Block)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo looks at gradients of tensors that are no leaves
        compare(model, train(model, mine(data()[:3])), reference, train(reference, data()[:3]))


def mixed_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reference, model = make(), make()
    tb.fully_shard(model, units=Block, mp_policy=policy)
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
        loss_of(model, mine(data()[0:1])[0]).backward()
    # Gradients go as they are, and are summed in float32: what one rank made in bfloat16 is not rounded again.
    assert {call.args[1].dtype for call in exchange.call_args_list} == {torch.bfloat16}
    grads = [p.grad for p in model.parameters() if p.grad is not None and p.numel()]
    assert {g.dtype for g in grads} == {torch.float32}
    assert dist.get_world_size() == 1 or any(bool((g != g.bfloat16()).any()) for g in grads)
    model.zero_grad()
    losses, want = torch.stack(train(model, mine(data()))), torch.stack(train(reference, data()))
    dist.all_reduce(losses)
    torch.testing.assert_close(losses / dist.get_world_size(), want, rtol=5e-3, atol=0)
    assert next(model.parameters()).dtype == torch.float32
    with torch.no_grad(), tb.unsharded(model, writeback=True):
        before = tb.full_state_dict(model)
        model.temperature.fill_(0.1)
    before["temperature"] = torch.tensor(0.1).bfloat16().float()
    compare_states(tb.full_state_dict(model), before, rtol=0)  # not rounded to bfloat16, but for what was written


def hsdp() -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    parity(sharded={"mesh": mesh})


def evaluation() -> None:
    reference, model = make(), make()
    tb.fully_shard(model, units=Block)
    with torch.no_grad():
        torch.testing.assert_close(model(data()[0]), reference(data()[0]))
    assert all(p.ndim == 1 for p in model.parameters())


def clipping() -> None:
    reference, model = make(), make()
    tb.fully_shard(model, units=Block)
    loss_of(model, mine(data()[:1])[0]).backward()
    loss_of(reference, data()[0]).backward()
    for kind in (2.0, float("inf")):
        norm = tb.clip_grad_norm_(model, 0.1, kind)
        want = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, kind)
        torch.testing.assert_close(norm, want, rtol=1e-5, atol=0)
    for dtype in (torch.float64, torch.complex64):
        layer = nn.Linear(7, 5, bias=False, dtype=dtype)
        for weight in (layer.weight, tb.fully_shard(layer).weight):
            weight.grad = weight.detach().clone()
        whole = torch.linalg.vector_norm(full := tb.full_state_dict(layer)["weight"])
        torch.testing.assert_close(tb.clip_grad_norm_(layer, 0.5), whole)
        torch.testing.assert_close(layer.weight.grad, layer.weight.detach() * (0.5 / (whole + 1e-6)))
        layer.weight.grad.fill_(float("nan") if dist.get_rank() else 1)
        assert full.dtype == dtype
        assert dist.get_world_size() == 1 or tb.clip_grad_norm_(layer, 0.5, float("inf")).isnan()


def padding_is_invisible() -> None:
    clean, poisoned = make(), make()
    for model in (clean, poisoned):
        tb.fully_shard(model, units=Block)
    for unit in runtime_of(poisoned).units:
        for memory, slots in unit._slots:
            if memory.shards.is_floating_point():
                kept = [slot.shard.detach().clone() for slot in slots]
                memory.shards.fill_(float("nan"))
                for slot, x in zip(slots, kept, strict=True):
                    slot.shard.data.copy_(x)
    a, b = (train(model, mine(data()[:3])) for model in (clean, poisoned))
    assert torch.equal(torch.stack(a), torch.stack(b))
    for x, y in zip(tb.full_state_dict(clean).values(), tb.full_state_dict(poisoned).values(), strict=True):
        assert torch.equal(x, y)


def whole_inside_unsharded() -> None:
    reference, model = make(), make()
    tb.fully_shard(model, units=Block)
    with torch.no_grad(), tb.unsharded(model, writeback=True):
        for x, y in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(x, y)
        model.temperature.fill_(2.0)
        full = tb.full_state_dict(model)  # of memory of its own, and of the parameters as they are without
    compare_states(full, reference.state_dict(), rtol=0)
    assert tb.full_state_dict(model)["temperature"] == 2


def after_an_exception(where: str) -> None:
    """A pass that raises in the middle leaves nothing behind that a later step would see."""
    reference, model = make(), make()
    tb.fully_shard(model, units=Block)
    tokens = data()[:3]

    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("boom")

    def fail(module, args, output):
        if where == "forward":
            raise RuntimeError("boom")
        return Boom.apply(output)

    def train_once(m, batch):
        optimizer = torch.optim.SGD(m.parameters(), 0.1)
        loss_of(m, batch).backward()
        handle = m.blocks[1].register_forward_hook(fail)
        with raises("boom"):
            loss_of(m, batch).backward()
        handle.remove()
        if where == "backward":  # what reached some gradients is to be thrown away, as a user would
            optimizer.zero_grad()
            loss_of(m, batch).backward()
        optimizer.step()

    train_once(reference, tokens[0])
    train_once(model, mine(tokens)[0])
    compare(model, [loss_of(model, mine(tokens)[1]).detach()], reference, [loss_of(reference, tokens[1]).detach()])


def ranks_that_differ() -> None:
    """All of them fail, with one message, before anything is sent."""
    if dist.get_world_size() == 1:
        return
    odd = dist.get_rank() == dist.get_world_size() - 1
    replicas = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    for mesh in (None, replicas):
        with raises("weight: float32[2, 4]", ValueError):
            tb.fully_shard(nn.Linear(5 if odd else 4, 2), mesh)
    with raises("limit: 2", ValueError):
        tb.fully_shard(nn.Linear(4, 2), limit=3 if odd else 2)


def moved_parameters_are_noticed() -> None:
    model = make()
    tb.fully_shard(model, units=Block)
    model.double()
    with raises("replaced or moved"):
        model(mine(data())[0])


CASES: dict[str, Callable[[], None]] = {
    "plain": lambda: parity(steps=STEPS),
    "frozen": lambda: parity(frozen=True),
    "twice": lambda: parity(twice=True),
    "remat": lambda: parity(remat="yes"),
    "remat reentrant": lambda: parity(remat="reentrant"),
    "transposed": lambda: parity(sharded={"names": tb.flax_names(make())}),
    "keep": lambda: parity(sharded={"reshard_after_forward": False}),
    "no units": lambda: parity(sharded={"units": None}),
    "no prefetch": lambda: parity(sharded={"prefetch": 0, "limit": 1}),
    "rows": lambda: parity(sharded={"block": rows(32)}),
    "whole": lambda: parity(sharded={"block": whole()}),
    "uneven": uneven,
    "bytes": bytes_of_a_rank,
    "accumulation": accumulation,
    "products in place": products_in_place,
    "oddities": oddities,
    "float16": a_sum_that_float16_does_not_hold,
    "mixed precision": mixed_precision,
    "many passes": sums_of_many_passes,
    "one rank uses nothing": passes_in_which_one_rank_uses_nothing,
    "two dtypes": a_dtype_that_one_rank_uses,
    "evaluation": evaluation,
    "clipping": clipping,
    "padding": padding_is_invisible,
    "unsharded": whole_inside_unsharded,
    "exception in forward": lambda: after_an_exception("forward"),
    "exception in backward": lambda: after_an_exception("backward"),
    "moved": moved_parameters_are_noticed,
    "ranks that differ": ranks_that_differ,
}
FOUR_RANKS = {"plain": lambda: parity(steps=STEPS), "hsdp": hsdp}


if __name__ == "__main__":
    import autograd_cases
    import optim_cases  # imports this module

    rank, size, *files = sys.argv[1:]
    cases = FOUR_RANKS | optim_cases.FOUR_RANKS if size == "4" else CASES | autograd_cases.CASES | optim_cases.CASES
    if size == "2":
        cases |= optim_cases.TWO_RANKS | {"compiled": compiled}
    run_cases(cases, int(rank), int(size), *files)
