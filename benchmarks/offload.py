"""What offloading leaves on the accelerator: one AdamW step, compiled ahead of time for H100 and TPU.

Eight layers of two matrices, stacked and scanned, bf16 work on f32 parameters. The rows differ in what lies in host
memory between steps: nothing, the optimizer's state, or that and the parameters.

    python benchmarks/offload.py --target h100 --target v5p
"""

import argparse
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from untile import MIB, TARGETS, devices_of

import ragged_jax as rj
from ragged_jax.fsdp import Unit

LAYERS, WIDTH, HIDDEN, TOKENS = 8, 2048, 8192, 1024  # tokens a device


def abstract_tree(mesh: Mesh, memory_kind: str) -> rj.ShardedTree:
    """The parameters without their values, as an accelerator that is not here would hold them."""
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
    params = {"layers": {"up": f32(LAYERS, WIDTH, HIDDEN), "down": f32(LAYERS, HIDDEN, WIDTH)}}
    plan = rj.plan(params, mesh.size, units="layers", stacked="layers")

    def tree(name: str, names: list[str], children: dict, treedef) -> rj.ShardedTree:
        unit = Unit(plan.layout.bucket(name), mesh, ("fsdp",), precision=rj.MixedPrecision("bfloat16"))
        slabs: Any = {
            slab.name: jax.ShapeDtypeStruct(
                unit.shape(slab), slab.dtype, sharding=unit.sharding(slab).with_memory_kind(memory_kind)
            )
            for slab in unit.bucket.slabs
        }
        return rj.ShardedTree(slabs, children, unit, treedef, tuple(names))

    layers = tree("layers", ["layers/down", "layers/up"], {}, jax.tree.structure(params["layers"]))
    return tree("", ["layers"], {"layers": layers}, jax.tree.structure({"layers": 0}))


def loss(params, x):
    def layer(w, x):
        return x + jax.nn.relu(x @ w["up"]) @ w["down"]

    x, _ = jax.lax.scan(lambda x, w: (rj.unsharded(layer)(w, x), None), x, params["layers"])
    return (x.astype(jnp.float32) ** 2).mean()


def compile_step(mesh: Mesh, state_on_host: bool, params_on_host: bool):
    tx = rj.offload(optax.adamw(1e-3)) if state_on_host else optax.adamw(1e-3)
    params = abstract_tree(mesh, "pinned_host" if params_on_host else "device")
    kind = "pinned_host" if state_on_host else "device"
    everywhere = NamedSharding(mesh, PartitionSpec())

    def placed(x, like):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=like.sharding.with_memory_kind(kind))

    moments = jax.tree.map(lambda p: placed(p, p), params)
    count: Any = jax.ShapeDtypeStruct((), "int32", sharding=everywhere)
    state = (optax.ScaleByAdamState(count, moments, moments), optax.EmptyState(), optax.EmptyState())

    def step(params, state, x):
        params = rj.to_memory(params, "device")
        _, grads = rj.value_and_grad(loss)(params, x)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return rj.to_memory(params, "pinned_host") if params_on_host else params, state

    batch = NamedSharding(mesh, PartitionSpec("fsdp", None))
    x = jax.ShapeDtypeStruct((TOKENS * mesh.size, WIDTH), "bfloat16", sharding=batch)
    out = jax.tree.map(lambda a: a.sharding, (params, state))
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=out).lower(params, state, x).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    args = parser.parse_args()
    print("| target | on the host | device arguments | device temporary | host arguments | host temporary |")
    print("|---|---|---:|---:|---:|---:|")
    for target in args.target or TARGETS:
        mesh = Mesh(np.array(devices_of(target)), ("fsdp",), axis_types=(AxisType.Auto,))
        for name, where in {"nothing": (0, 0), "state": (1, 0), "state and parameters": (1, 1)}.items():
            m: Any = compile_step(mesh, *map(bool, where)).memory_analysis()
            sizes = (m.argument_size_in_bytes, m.temp_size_in_bytes)
            host = (m.host_argument_size_in_bytes, m.host_temp_size_in_bytes)
            cells = " | ".join(f"{n / MIB:.0f} MiB" for n in (*sizes, *host))
            print(f"| {target}, {mesh.size} devices | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
