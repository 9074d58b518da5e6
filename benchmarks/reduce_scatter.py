"""Whether a TPU's compiler makes a reduce-scatter of `psum_scatter` over all devices, or an all-reduce and a slice.

python benchmarks/reduce_scatter.py
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # a compiler without its machine asks nobody for metadata
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # the lock is for chips, and here are none

import jax
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragged_jax.fsdp._compiler_options import _SPARSE_CORE
from ragged_jax.preflight import hlo_report

TOPOLOGIES = ("v5p:2x2x2", "v5p:2x2x4", "v5p:4x4x4", "v6e:2x4", "v6e:4x4", "v6e:4x8", "v6e:8x8")


def main() -> None:
    for topology in TOPOLOGIES:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
        mesh = Mesh(np.array(devices), ("fsdp",))

        def scatter(x):
            return lax.psum_scatter(jax.numpy.sin(x)[0], "fsdp", tiled=True)

        f = jax.jit(
            jax.shard_map(scatter, mesh=mesh, in_specs=PartitionSpec("fsdp"), out_specs=PartitionSpec("fsdp"))
        )
        sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
        x = jax.ShapeDtypeStruct((mesh.size, 192 * mesh.size, 4096), "bfloat16", sharding=sharding)
        sparse_core: dict[str, bool | str] = dict.fromkeys(_SPARSE_CORE, True)
        for name, options in (("default", None), ("SparseCore", sparse_core)):
            found = hlo_report(f.lower(x).compile(compiler_options=options)).collectives
            print(f"{topology:10} {name:10} {', '.join(found)}", flush=True)


if __name__ == "__main__":
    main()
