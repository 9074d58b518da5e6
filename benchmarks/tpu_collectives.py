"""What a TPU's compiler makes of gathers and reduce-scatters over all chips of a slice.

python benchmarks/tpu_collectives.py
"""

import os
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # a compiler without its machine asks nobody for metadata
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # the lock is for chips, and here are none

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragged_jax.fsdp._compiler_options import _SPARSE_CORE
from ragged_jax.fsdp._torus import all_gather
from ragged_jax.preflight import hlo_report

TOPOLOGIES = ("v4:2x4x4", "v5e:8x8", "v5p:2x2x2", "v5p:2x2x4", "v5p:2x4x4", "v5p:4x4x4", "v5p:4x8x8")
TOPOLOGIES += ("v6e:2x4", "v6e:4x4", "v6e:4x8", "v6e:8x8", "v6e:16x16")
SPARSE_CORE: dict[str, bool | str] = dict.fromkeys(_SPARSE_CORE, True)


def made_of(local: Callable, mesh: Mesh, options: dict[str, bool | str] | None = None) -> str:
    """The collectives of a program that applies `local` to one part of [chips, 64 chips, 4096] for each chip."""
    spec = PartitionSpec("fsdp")
    x = jax.ShapeDtypeStruct((mesh.size, 64 * mesh.size, 4096), "bfloat16", sharding=NamedSharding(mesh, spec))
    f = jax.jit(jax.shard_map(lambda x: local(jnp.sin(x)), mesh=mesh, in_specs=spec, out_specs=spec))
    found = hlo_report(f.lower(x).compile(compiler_options=options)).collectives
    return ", ".join(f"{c.static} {kind}" for kind, c in found.items())


def main() -> None:
    print("| slice | gather | as `unshard` gathers | psum_scatter | on the SparseCores |\n|---|---|---|---|---|")
    for topology in TOPOLOGIES:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
        mesh = Mesh(np.array(devices), ("fsdp",))
        cells = [
            made_of(lambda x: jnp.tanh(lax.all_gather(x[0, :64], "fsdp", tiled=True))[None], mesh),
            made_of(lambda x, mesh=mesh: jnp.tanh(all_gather(x[0, :64], mesh, "fsdp"))[None], mesh),
            made_of(lambda x: lax.psum_scatter(x[0], "fsdp", tiled=True), mesh),
        ]
        if not topology.startswith(("v4", "v5e")):  # which have none that do this
            cells.append(made_of(lambda x: lax.psum_scatter(x[0], "fsdp", tiled=True), mesh, SPARSE_CORE))
        print(f"| {topology} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
