"""One small model in five kinds, which do the same arithmetic on parameters of the same values, and an oracle.

No parameter starts at zero. After a few steps of Adam such a one is nothing but steps, whose size does not depend on
that of the gradient: in bfloat16, biases that started at zero were off by 14 % of the largest; gradients agreed to
0.6 %. So parameters, too, are compared element by element.

By name, `layers/1/up/kernel`, the parameters are the same for all kinds; what differs is how they are held.
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from models import flat, poison_padding

import ragged_jax as rj
from ragged_jax.adapters._nnx import _units

VOCAB, WIDTH, HIDDEN, LAYERS = 67, 12, 46, 2
KINDS = ("nnx list", "nnx scan", "linen list", "linen scan", "pytree")
DTYPES = ("float32", "bfloat16")
FEATURES = ("plain", "accumulate", "frozen", "tied", "hsdp", "tp")
DATA = np.random.default_rng(1).integers(0, VOCAB, (3, 1680, 4))  # divides over 1 to 8 devices, 2 microbatches each
TRAINED = ("*/up/*", "*/shift", "scale")  # where the rest is frozen
SPECS = {"*/up/kernel": (None, "tp"), "*/up/bias": ("tp",), "*/down/kernel": ("tp",)}
KEY, ONES = jax.random.key(0), nn.initializers.ones
QUICK = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is what a cell costs
Named = dict[str, Any]


@cache
def values(tied: bool) -> Named:
    """The parameters by name: awkward sizes, a scalar, one that is empty."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: (rng.normal(size=shape) / 4).astype(np.float32)
    layer = lambda: {
        "norm": 1 + normal(WIDTH),
        "up/kernel": normal(WIDTH, HIDDEN),
        "up/bias": normal(HIDDEN),
        "down/kernel": normal(HIDDEN, WIDTH),
        "shift": normal(5),
    }
    root = {"embedding": normal(VOCAB, WIDTH), "scale": np.float32(2), "nothing": np.zeros((0, 3), np.float32)}
    layers = {f"layers/{i}/{name}": x for i in range(LAYERS) for name, x in layer().items()}
    return {**root, **({} if tied else {"head": normal(VOCAB, WIDTH)}), **layers}


def mix(x, norm, shift, up, down):
    """A layer, of its parameters and two linear ones."""
    x32 = x.astype(jnp.float32)
    h = x * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + 1e-3).astype(x.dtype) * norm
    return x + down(jax.nn.gelu(up(h))) * (1 + shift.sum())


def tree_layer(w, x):
    up, down = w["up"], w["down"]
    return mix(x, w["norm"], w["shift"], lambda h: h @ up["kernel"] + up["bias"], lambda h: h @ down["kernel"])


def cross_entropy(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean()


def tree_loss(params, tokens, wrap=lambda layer: layer):
    x = params["embedding"][tokens[:, :-1]]
    for w in params["layers"]:
        x = wrap(tree_layer)(w, x)
    return cross_entropy((x * params["scale"]) @ params.get("head", params["embedding"]).T, tokens)


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm, self.shift = nnx.Param(jnp.ones(WIDTH)), nnx.Param(jnp.ones(5))
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return mix(x, self.norm[...], self.shift[...], self.up, self.down)


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, scan: bool, tied: bool):
        self.embedding = nnx.Param(jnp.ones((VOCAB, WIDTH)))
        self.head = self.embedding if tied else nnx.Param(jnp.ones((VOCAB, WIDTH)))
        self.scale, self.nothing = nnx.Param(jnp.ones(())), nnx.Param(jnp.ones((0, 3)))
        self.calls, self.scan = nnx.Variable(jnp.array(0)), scan
        if scan:
            self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(NnxBlock))(rngs)
        else:
            self.layers = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])

    def __call__(self, tokens):
        self.calls[...] += 1
        x = self.embedding[...][tokens]
        if self.scan:
            x = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)
        else:
            for layer in self.layers:
                x = layer(x)
        return (x * self.scale[...]) @ self.head[...].T


class LinenBlock(nn.Module):
    dtype: str

    @nn.compact
    def __call__(self, x, _=None):
        norm, shift = (self.param(n, ONES, (m,), self.dtype) for n, m in (("norm", WIDTH), ("shift", 5)))
        up = nn.Dense(HIDDEN, param_dtype=self.dtype, name="up")
        return mix(x, norm, shift, up, nn.Dense(WIDTH, use_bias=False, param_dtype=self.dtype, name="down")), None


class LinenModel(nn.Module):
    dtype: str
    scan: bool
    tied: bool

    @nn.compact
    def __call__(self, tokens):
        param = lambda name, *shape: self.param(name, ONES, shape, self.dtype)
        embedding = param("embedding", VOCAB, WIDTH)
        head = embedding if self.tied else param("head", VOCAB, WIDTH)
        scale, _ = param("scale"), param("nothing", 0, 3)
        x = embedding[tokens]
        if self.scan:
            over = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": LAYERS}
            x, _ = nn.scan(LinenBlock, **over)(self.dtype, name="layers")(x, None)
        else:
            for i in range(LAYERS):
                x, _ = LinenBlock(self.dtype, name=f"layers_{i}")(x)
        return (x * scale) @ head.T


@dataclass(frozen=True)
class Case:
    """A cell of the grid."""

    kind: str
    dtype: str
    feature: str
    num_devices: int

    def __str__(self):
        return f"{self.kind}-{self.dtype}-{self.feature}-{self.num_devices}".replace(" ", "-")

    @property
    def scan(self) -> bool:
        return "scan" in self.kind

    @property
    def tied(self) -> bool:
        return self.feature == "tied"

    @property
    def frozen(self) -> bool:
        return self.feature == "frozen"

    @cached_property
    def mesh(self) -> jax.sharding.Mesh:
        n, kind = self.num_devices, AxisType.Auto if self.num_devices in (4, 7) else AxisType.Explicit
        sizes = {"hsdp": {"replica": 2, "fsdp": n // 2}, "tp": {"fsdp": n // 2, "tp": 2}}.get(
            self.feature, {"fsdp": n}
        )
        names, kinds = tuple(sizes), (kind,) * len(sizes)
        return jax.make_mesh(tuple(sizes.values()), names, axis_types=kinds, devices=jax.devices()[:n])

    @property
    def axis(self) -> tuple[str, ...]:
        return ("replica", "fsdp") if self.feature == "hsdp" else ("fsdp",)

    @property
    def grad_options(self) -> dict[str, Any]:
        if self.feature != "accumulate":
            return {}
        return {"num_microbatches": 2, "reduce": "each" if self.num_devices in (3, 8) else "once"}

    def options(self, model: Any, units: Any, *inputs: Any) -> dict[str, Any]:
        """What sharding takes: a plan in which some slabs hold one tensor and some several, whatever the size."""
        how: dict[str, Any] = {"units": units, "block": rj.rows(1)}
        if self.scan and not self.kind.startswith("linen"):
            how["stacked"] = units
        if self.frozen:
            how["label"] = dict.fromkeys(TRAINED, "trained")
        if self.feature == "tp":
            how["specs"] = {p: PartitionSpec(*(None,) * self.scan, *spec) for p, spec in SPECS.items()}
        sizes = {"axis_sizes": {"tp": 2}} if self.feature == "tp" else {}
        plan = rj.plan(model, self.mesh.shape["fsdp"], *inputs, **how, **sizes, min_slab_nbytes=512)
        return {"axis": self.axis, "plan": plan, **how}

    def held(self, named: Named) -> Named:
        """Parameters by name, as this kind calls and stacks them."""
        if self.kind == "linen list":
            return {re.sub(r"^layers/", "layers_", name): x for name, x in named.items()}
        if not self.scan:
            return named
        own = {name: x for name, x in named.items() if not name.startswith("layers/")}
        layers = [
            {n.removeprefix(f"layers/{i}/"): x for n, x in named.items() if f"/{i}/" in n} for i in range(LAYERS)
        ]
        return own | {f"layers/{name}": np.stack([layer[name] for layer in layers]) for name in layers[0]}

    def named(self, held: Named) -> Named:
        """The inverse of `held`."""
        if self.kind == "linen list":
            return {re.sub(r"^layers_", "layers/", name): x for name, x in held.items()}
        if not self.scan:
            return held
        own = {name: x for name, x in held.items() if not name.startswith("layers/")}
        stacked = {n.removeprefix("layers/"): x for n, x in held.items() if n.startswith("layers/")}
        return own | {f"layers/{i}/{name}": x[i] for i in range(LAYERS) for name, x in stacked.items()}

    def start(self) -> Named:
        return {name: jnp.asarray(x, self.dtype) for name, x in self.held(values(self.tied)).items()}


def nested(named: Named) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, x in named.items():
        *above, last = name.split("/")
        node = tree
        for step in above:
            node = node.setdefault(step, {})
        node[last] = x
    return tree


def tree_of(named: Named) -> dict[str, Any]:
    """As a pytree with a list of layers."""
    tree = nested(named)
    return {**tree, "layers": [tree["layers"][str(i)] for i in range(LAYERS)]}


def names_of(tree: Any) -> Named:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in leaves}


def is_trained(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in TRAINED)


def optimizer() -> optax.GradientTransformation:
    return optax.adamw(3e-3, eps=1e-4)


@cache
def oracle(dtype: str, tied: bool, frozen: bool) -> tuple[list[float], Named, Named]:
    """Losses, first gradients and parameters of one device."""
    params = {name: jnp.asarray(x, dtype) for name, x in values(tied).items()}
    trained = {name: x for name, x in params.items() if not frozen or is_trained(name)}
    tx = optimizer()

    @QUICK
    def step(trained, state, tokens):
        loss, grads = jax.value_and_grad(lambda w: tree_loss(tree_of({**params, **w}), tokens))(trained)
        updates, state = tx.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state, loss, grads

    losses, grads, state = [], [], tx.init(trained)
    for tokens in DATA:
        trained, state, loss, g = step(trained, state, tokens)
        losses.append(float(loss))
        grads.append(g)
    return losses, grads[0], {**params, **trained}


@dataclass
class Functional:
    """A model whose parameters are a tree: Linen and pytrees."""

    case: Case

    def __post_init__(self):
        case, start = self.case, self.case.start()
        if case.kind == "pytree":
            params = tree_of(start)
            self.params = rj.shard_tree(params, case.mesh, **case.options(params, "layers/*"))
            self.loss = lambda p, t: tree_loss(p, t, rj.unsharded)
            return
        model = LinenModel(case.dtype, case.scan, case.tied)
        tokens = jax.ShapeDtypeStruct(DATA[0][:, :-1].shape, DATA.dtype)
        sharded = rj.fully_shard(model, case.mesh, **case.options(model, LinenBlock, tokens))
        like = jax.eval_shape(sharded.init, KEY, tokens)["params"]
        self.params = rj.shard_like(nested(start), like)
        self.loss = lambda p, t: cross_entropy(model.apply({"params": p}, t[:, :-1]), t)

    def poison(self):
        self.params = poison_tree(self.params)

    @property
    def sharded(self):
        return self.params

    @property
    def arrays(self):
        return self.params

    def train(self) -> tuple[list[float], Named, Named]:
        case, tx, full = (
            self.case,
            optimizer(),
            lambda tree: case.named(names_of(rj.full_params(tree))),
        )
        wrt, rest = rj.partition(self.params, tuple(TRAINED)) if case.frozen else (self.params, None)
        both = (lambda w, r: rj.combine(w, r)) if case.frozen else lambda w, _: w
        grad_fn = rj.value_and_grad(lambda w, r, t: self.loss(both(w, r), t), **case.grad_options)

        @QUICK
        def step(wrt, rest, state, tokens):
            loss, grads = grad_fn(wrt, rest, tokens)
            updates, state = tx.update(grads, state, wrt)
            return optax.apply_updates(wrt, updates), state, loss, grads

        losses, grads, state = [], [], tx.init(wrt)
        for tokens in DATA:
            wrt, state, loss, g = step(wrt, rest, state, tokens)
            losses.append(float(loss))
            grads.append(g)
        return losses, full(grads[0]), full(both(wrt, rest))


@dataclass
class Stateful:
    """An NNX module."""

    case: Case

    def __post_init__(self):
        case = self.case
        self.sharded = nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0), case.scan, case.tied))
        start = {**case.start(), "calls": jnp.array(0)}
        for path, variable in nnx.iter_graph(self.sharded):
            if isinstance(variable, nnx.Variable):
                variable.set_raw_value(start["/".join(map(str, path))])
        rj.fully_shard(self.sharded, case.mesh, **case.options(self.sharded, NnxBlock))

    def poison(self):
        for _, module, info in _units(self.sharded):
            info.put_slabs(module, poison_padding(info.unit, info.slabs(module)))

    @property
    def arrays(self):
        return nnx.state(self.sharded, nnx.Param)

    def train(self) -> tuple[list[float], Named, Named]:
        case, model = self.case, self.sharded
        wrt = rj.labelled("trained") if case.frozen else nnx.Param
        opt = nnx.Optimizer(model, optimizer(), wrt=wrt)
        argnums = nnx.DiffState(0, wrt) if case.frozen else 0
        loss_fn = lambda model, tokens: cross_entropy(model(tokens[:, :-1]), tokens)
        grad_fn = rj.value_and_grad(loss_fn, argnums, **case.grad_options)

        @QUICK
        def step(state, tokens):
            model, opt = nnx.merge(graphdef, state)
            loss, grads = grad_fn(model, tokens)
            opt.update(model, grads)
            return nnx.state((model, opt)), loss, grads

        graphdef, state = nnx.split((model, opt))
        done = []
        for tokens in DATA:
            state, *out = step(state, tokens)
            done.append(out)
        nnx.update((model, opt), state)
        assert model.calls[...] == len(DATA) * case.grad_options.get("num_microbatches", 1)
        full = lambda state: case.named(flat(rj.full_params(state, like=model)))
        return [float(loss) for loss, _ in done], full(done[0][1]), full(nnx.state(model, nnx.Param))


def poison_tree(tree: rj.ShardedTree) -> rj.ShardedTree:
    children = {name: poison_tree(child) for name, child in tree.children.items()}
    return tree.replace(poison_padding(tree.unit, tree.slabs), children)


def make(case: Case) -> Functional | Stateful:
    return (Stateful if case.kind.startswith("nnx") else Functional)(case)
