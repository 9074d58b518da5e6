"""`torch_bridge.optim` in one process: the bits of numpy and of JAX, and what torch asks of an optimizer.

What ranks do with it is in `torch_workers/optim_cases.py`, which `test_torch_fsdp.py` runs.
"""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the torch extra is not installed")

import ragged_jax as rj  # noqa: E402
import torch_bridge as tb  # noqa: E402
from ragged_jax.optim import code_map, fused_adamw8bit, muon_reference  # noqa: E402
from ragged_jax.optim._reference import Adam8bit  # noqa: E402
from torch_bridge.optim._codes import Scratch, encode  # noqa: E402

SHAPES = {"w": (96, 128), "odd": (101, 48), "experts": (3, 50, 70), "small": (7, 9), "embed": (90, 60)}
OPTIMIZERS = [tb.optim.AdamW, tb.optim.AdamW8bit, tb.optim.Muon]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gradients(step: int) -> dict[str, np.ndarray]:
    """Heavy-tailed, with exact zeros, blocks of zeros and of next to nothing."""
    rng, made = np.random.default_rng(step), {}
    for name, shape in SHAPES.items():
        g = rng.normal(size=shape) * 10 ** rng.uniform(-6, 1, shape) * (rng.random(shape) > 0.1)
        made[name] = g.astype(np.float32)
    made["w"][:2], made["w"][4:8], made["w"][9, 3] = 0, 1e-39, 3e38
    return made


def normal(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def parameters(fill=0.0, names=SHAPES) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.full(SHAPES[name], fill)) for name in names}


def step(optimizer, params, grads) -> None:
    for name, p in params.items():
        p.grad = torch.from_numpy(grads[name].copy())
    optimizer.step()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    "block",
    [rj.elements(256), rj.rows(1), rj.rows(7), rj.rows(3, dim=1), rj.tile(32, 32), rj.whole()],
    ids=repr,
)
def test_8_bit_states_and_updates_have_the_bits_of_numpy(block, nesterov):
    names = [n for n, shape in SHAPES.items() if np.prod(shape) >= 4096 and len(shape) > block.dim + bool(block.dim)]
    params, adam = parameters(names=names), Adam8bit(block=block, nesterov=nesterov)
    optimizer = tb.optim.AdamW8bit(params.items(), lr=-1, weight_decay=0, block=block, nesterov=nesterov, chunk=3000)
    states = {name: adam.init(SHAPES[name]) for name in names}
    for i in range(3):
        for p in params.values():
            p.data.zero_()
        step(optimizer, params, gradients(i))
        for name, p in params.items():
            update, states[name] = adam.update(gradients(i)[name], states[name])
            np.testing.assert_array_equal(p.detach().numpy(), update, err_msg=name)
            for key, x in states[name]._asdict().items():
                got = optimizer.state[p][key].numpy()
                np.testing.assert_array_equal(got, np.reshape(x, got.shape), err_msg=f"{name} {key}")


def test_8_bit_training_has_the_bits_of_jax():
    """Parameters, codes, scales and what stays in float32, weight decay and all."""
    rule = {"embed": None, "experts": rj.tile(10, 10), "*": rj.elements(256)}
    names = ("w", "experts", "small", "embed")
    start, ours = {name: np.full(SHAPES[name], 0.1, np.float32) for name in names}, parameters(0.1, names)
    optimizer = tb.optim.AdamW8bit(ours.items(), lr=1e-2, weight_decay=0.1, block=rule)
    theirs = fused_adamw8bit(1e-2, weight_decay=0.1, block=rule)
    params, state = jax.tree.map(jnp.asarray, start), None
    apply = jax.jit(theirs.apply)
    for i in range(3):
        state = theirs.init(params) if state is None else state
        params, state = apply(params, {name: gradients(i)[name] for name in names}, state)
        step(optimizer, ours, gradients(i))
    named = optimizer.named_state()
    assert {x.part for x in named.values()} == {"codes", "scales", "exact"}
    for name, p in ours.items():
        np.testing.assert_array_equal(p.detach().numpy(), params[name], err_msg=name)
    for x in named.values():
        want = getattr(getattr(state, x.moment.removeprefix("0/")), x.part)[x.tensor]
        np.testing.assert_array_equal(x.data.numpy(), np.asarray(want).reshape(-1), err_msg=x.name)
    assert optimizer.num_steps == int(state.count) == 3


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", ["dynamic", "linear", "fp8"])
def test_codes_are_those_of_a_search(name, signed):
    """A million random numbers; and all midpoints, values and cell edges with their neighbours."""
    table, rng = code_map(name, signed=signed), np.random.default_rng(0)
    edges = (np.arange(table.lowest, 127 * 128 + 1, dtype=np.uint32) << 16).view(np.float32)
    special = np.concatenate([table.midpoints, table.values, edges, -edges, [0.0, -0.0, 1.0]]).astype(np.float32)
    special = np.concatenate([special, *(np.nextafter(special, np.float32(end)) for end in (-2, 2))])
    x = np.concatenate([rng.uniform(-1, 1, 500_000), 10 ** rng.uniform(-12, 0, 500_000), special]).clip(-1, 1)
    x = torch.from_numpy((x if signed else np.abs(x)).astype(np.float32))
    want = torch.bucketize(x, torch.from_numpy(table.midpoints))
    codes = torch.empty(x.shape, dtype=torch.uint8)
    encode(x, torch.ones(()), table, 0, codes, Scratch()(x))
    assert torch.equal(codes.long(), want)


def test_muon_is_the_reference():
    """Torch's weights have outputs first: matrices are transposed against those of Flax."""
    params = parameters(names=("w", "odd", "experts"))
    optimizer = tb.optim.Muon(params.items(), lr=-1.0)
    grads = [
        {n: np.random.default_rng(i).normal(size=s).astype(np.float32) for n, s in SHAPES.items()} for i in range(3)
    ]
    for i, g in enumerate(grads):
        before = {name: p.detach().clone() for name, p in params.items()}
        step(optimizer, params, g)
        for name, p in params.items():
            made = (p.detach() - before[name]).numpy().reshape(-1, *SHAPES[name][-2:])
            for k, update in enumerate(made):
                history = [h[name].reshape(made.shape)[k].T for h in grads[: i + 1]]
                np.testing.assert_allclose(update.T, muon_reference(history)[-1], atol=2e-5, err_msg=name)


@pytest.mark.parametrize("scale", [("spectral", "original"), ("match_rms_adamw", "match_rms_adamw")])
def test_muon_is_that_of_torch(scale):
    """To the precision of bfloat16, which is what torch's multiplies in."""
    ours, theirs = (parameters(0.1, names=("w", "odd")) for _ in range(2))
    options = {"lr": 0.1, "weight_decay": 0.1}
    mine = tb.optim.Muon(ours.items(), scale=scale[0], compute_dtype=torch.bfloat16, **options)
    reference = torch.optim.Muon(list(theirs.values()), adjust_lr_fn=scale[1], **options)
    for i in range(3):
        step(mine, ours, normal(i))
        step(reference, theirs, normal(i))
    for name, p in ours.items():
        torch.testing.assert_close(p, theirs[name], rtol=0, atol=0.02 * float(theirs[name].detach().abs().max()))


def test_convolutions_and_fused_projections_are_matrices():
    conv, qkv = torch.nn.Parameter(torch.zeros(8, 3, 3, 3)), torch.nn.Parameter(torch.zeros(24, 8))
    rng = np.random.default_rng(0)
    g = {"conv": rng.normal(size=conv.shape).astype(np.float32), "qkv": rng.normal(size=qkv.shape).astype(np.float32)}
    dims = {"qkv": tb.optim.MatrixDims(-1, -2, split=3)}
    optimizer = tb.optim.Muon([("conv", conv), ("qkv", qkv)], lr=-1.0, dims=dims)
    step(optimizer, {"conv": conv, "qkv": qkv}, g)
    want = muon_reference([g["conv"].reshape(8, 27).T])[0].T.reshape(conv.shape)
    np.testing.assert_allclose(conv.detach(), want, atol=2e-5)
    want = np.concatenate([muon_reference([part.T])[0].T for part in np.split(g["qkv"], 3)])
    np.testing.assert_allclose(qkv.detach(), want, atol=2e-5)
    assert optimizer.routing["qkv"].matrices == (3, 8, 8)


def test_routing_is_reported_and_overruled():
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(9, 4), "up": torch.nn.Linear(4, 8)})
    optimizer = tb.optim.Muon(model.named_parameters(), route={"embed*": "muon"}, adamw_lr=1e-3)
    assert str(optimizer.routing) == (
        "muon   embed/weight  your rule, 1 of 4 x 9, shape (9, 4)\n"
        "muon   up/weight     a matrix, 1 of 4 x 8, shape (8, 4)\n"
        "adamw  up/bias       a bias, shape (8,)"
    )
    assert [(group["kind"], group["lr"]) for group in optimizer.param_groups] == [("muon", 0.02), ("adamw", 1e-3)]
    report = str(tb.optim.Muon(model.named_parameters(), lr=0.05).routing)
    assert report.endswith("\nAdamW has the learning rate of Muon, 0.05; `adamw_lr=` gives it its own.")
    with pytest.raises(ValueError, match="it is no matrix"):
        tb.optim.Muon(model.named_parameters(), route={"*bias": "muon"})


@pytest.mark.parametrize("scale", [0, 1e-45, 1e-39, 1e-30, 1e20, 3e38])
@pytest.mark.parametrize("kind", OPTIMIZERS[1:])
def test_no_nan_from_finite_gradients(kind, scale):
    p = torch.nn.Parameter(torch.zeros(64, 128))
    optimizer = kind([("w", p)])
    for i in range(3):
        g = torch.randn(64, 128, generator=torch.Generator().manual_seed(i)).clamp(-1, 1) * scale
        g[:4] = 0
        p.grad = g
        optimizer.step()
        assert p.isfinite().all()
        assert all(x.isfinite().all() for x in optimizer.state[p].values())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_torch_asks_of_an_optimizer(kind):
    """State dicts through files, copies, schedules over all groups, closures, and gradients that are not there."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(70, 80), "unused": torch.nn.Linear(3, 3)})
    model["up"].weight.data = model["up"].weight.data.t().contiguous().t()  # not contiguous
    optimizer = kind(model.named_parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    x = torch.randn(5, 70)

    def closure():
        optimizer.zero_grad()
        loss = model["up"](x).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure) for _ in range(3)]
    schedule.step()
    assert losses[2] < losses[0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.005] * len(optimizer.param_groups)
    assert model["unused"].weight not in optimizer.state
    twin = copy.deepcopy(model)
    other = kind(twin.named_parameters(), lr=1.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step(closure)
    twin["up"](x).square().mean().backward()
    other.step()
    assert torch.equal(twin["up"].weight, model["up"].weight)
    other.init_state()  # of what was not used, too
    assert other.num_steps == 4
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(other)
    smaller = torch.nn.ModuleDict({"up": torch.nn.Linear(7, 80), "unused": torch.nn.Linear(3, 3)})
    with pytest.raises(ValueError, match=r"another rank or number of ranks.*\n  up/weight"):
        kind(smaller.named_parameters()).load_state_dict(optimizer.state_dict())


def test_adamw_is_that_of_torch_with_its_state():
    ours, theirs = parameters(0.1), parameters(0.1)
    mine, reference = (kind(p.values(), lr=1e-2) for kind, p in ((tb.optim.AdamW, ours), (torch.optim.AdamW, theirs)))
    for i in range(2):
        step(mine, ours, gradients(i))
        step(reference, theirs, gradients(i))
    mine.load_state_dict(reference.state_dict())  # and on with the same state
    step(mine, ours, gradients(2))
    step(reference, theirs, gradients(2))
    for name, p in ours.items():
        torch.testing.assert_close(p, theirs[name], rtol=1e-6, atol=1e-7)


def test_parameters_in_bfloat16_keep_float32_moments():
    p = torch.nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))
    optimizer = tb.optim.AdamW8bit([p], lr=0.1)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert p.dtype == torch.bfloat16
    assert optimizer.state[p]["mu_scales"].dtype == torch.float32
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[p]["mu_codes"].dtype == torch.uint8
    assert optimizer.state[p]["mu_scales"].dtype == torch.float32


def test_names_are_asked_for():
    with pytest.raises(ValueError, match="named_parameters"):
        tb.optim.AdamW(torch.nn.Linear(2, 2).parameters()).named_state()
    with pytest.raises(TypeError, match="neither a Block"):
        tb.optim.AdamW8bit(torch.nn.Linear(2, 2).parameters(), block=256)
    with pytest.raises(ValueError, match="choose from"):
        tb.optim.Muon(torch.nn.Linear(2, 2).named_parameters(), coefficients="no")
