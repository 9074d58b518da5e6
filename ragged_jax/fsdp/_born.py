"""Arrays that are made where they belong, each device making its own part."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding


def born_sharded(make: Callable, mesh: Mesh, specs: Any) -> Callable:
    """`make`, compiled so that its results are made as shards and never whole on any device.

    With `Explicit` axes in force the types of what `make` draws would say "the same on all devices", and the
    compiler would obey. So it runs with `Auto` axes, where shardings spread from the results backwards: random bits
    are drawn shard by shard, and are the same bits for any number of devices.

    Args:
      make: a function of arrays that returns a pytree of arrays.
      mesh: the devices.
      specs: the partition spec of each result.
    """
    run = make
    if AxisType.Explicit in mesh.axis_types:
        run = jax.sharding.auto_axes(make, axes=mesh.axis_names, out_sharding=specs)

    def on_mesh(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return run(*args)

    return jax.jit(on_mesh, out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
