"""What each of two processes runs for `test_processes.py`: case after case, each with its result in a JSON file."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import ragged_jax as rj

OUT, PORT, RANK = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
RESULTS: dict = {}


def failing(run) -> dict:
    """The error that it raises, and after how many seconds."""
    start = time.perf_counter()
    try:
        run()
    except (ValueError, TimeoutError, NotImplementedError) as error:
        return {"error": type(error).__name__, "message": str(error), "seconds": time.perf_counter() - start}
    return {"error": None}


def disagreeing(mesh) -> dict:
    """By what differs on rank 1."""
    params = {"a": np.ones((6, 4), np.float32), "b": np.ones((5,), np.float32)}
    other = RANK == 1

    def shard(tree=params, **options):
        return failing(lambda: rj.shard_tree(tree, mesh, **{"axis": "fsdp", **options}))

    two = jax.make_mesh((2, 2), ("replica", "fsdp"))
    model = lambda width: nnx.Linear(8, width, rngs=nnx.Rngs(0))
    return {
        "leaf set": shard({**params, "extra": np.ones(3, np.float32)} if other else params),
        "shape": shard({**params, "a": np.ones((7, 4), np.float32)} if other else params),
        "dtype": shard({**params, "b": np.ones(5, np.int32)} if other else params),
        "block": shard(block=rj.rows(2) if other else rj.rows(1)),
        "units": shard({"x": params}, units="x" if other else None),
        "precision": shard(precision=rj.MixedPrecision("bfloat16") if other else None),
        "mesh": failing(lambda: rj.shard_tree(params, two if other else mesh, axis="fsdp")),
        "module": failing(lambda: rj.fully_shard(model(9 if other else 8), mesh, axis="fsdp")),
        "deferred": failing(lambda: rj.fully_shard(lambda: model(9 if other else 8), mesh, axis="fsdp")),
        "facts": failing(lambda: rj.check_same_on_all_processes({"step": str(RANK)}, what="the checkpoints")),
        "same": shard(),
    }


def training(mesh) -> None:
    """The odd model, created as shards, trained, looked at: the same arrays as in one process with four devices."""
    from models import Block, OddModel, batches, flat, train_sharded

    model = rj.fully_shard(
        lambda: OddModel(rngs=nnx.Rngs(0), scan=True), mesh, axis="fsdp", units=Block, stacked=Block
    )
    np.savez(OUT / f"init{RANK}.npz", **flat(rj.full_params(model)))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    data = [
        jax.make_array_from_process_local_data(sharding, np.split(batch, 2)[RANK], batch.shape)
        for batch in batches(2, 40)
    ]
    RESULTS["losses"] = train_sharded(model, data=data)
    np.savez(OUT / f"trained{RANK}.npz", **flat(rj.full_params(model)))
    np.savez(OUT / f"got{RANK}.npz", **rj.get(model, "blocks/*/kernel"))
    RESULTS["norms"] = {name: np.asarray(x).tolist() for name, x in rj.norms(model).items()}
    bad = rj.full_params(model)
    bad["blocks"]["up"]["kernel"] = nnx.Param(np.full((2, 48, 100), np.nan, np.float32))
    RESULTS["nonfinite"] = [str(found) for found in rj.find_nonfinite(rj.shard_like(bad, like=model))]


def values(scale: float) -> dict[str, np.ndarray]:
    """What checkpoints hold: nothing of it divides by the number of devices."""
    return {"w": scale * np.arange(35, dtype=np.float32).reshape(5, 7), "b": scale * np.arange(11, dtype=np.float32)}


def state_of(mesh, scale: float) -> dict:
    return {"params": rj.shard_tree(values(scale), mesh, axis="fsdp"), "step": int(scale)}


def checkpointing(mesh) -> None:
    """Saves for another number of processes and from one; what differs between ranks fails both."""
    like = state_of(mesh, 0)
    with rj.Checkpointer(OUT / "of_two") as checkpointer:
        checkpointer.save(1, state_of(mesh, 2))
        checkpointer.wait()
    back = rj.Checkpointer(OUT / "of_two").restore(like)
    other = rj.Checkpointer(OUT / "of_one").restore(like)
    RESULTS["restored"] = [int(state["step"]) for state in (back, other)]
    np.savez(
        OUT / f"restored{RANK}.npz", **rj.full_params(other["params"]), **{"2w": rj.full_params(back["params"])["w"]}
    )
    odd = {**like, "extra": 1} if RANK else like

    def saving(state, metadata=None, **options) -> dict:
        def save() -> None:
            with rj.Checkpointer(OUT / "never", **options) as checkpointer:
                checkpointer.save(1, state, metadata)

        return failing(save)

    for background in (False, True):
        RESULTS["disagreeing"] |= {
            f"saving, background={background}": saving(odd, background=background),
            f"saving a text, background={background}": saving(
                {**like, "text": "?"} if RANK else like, background=background
            ),
            f"saving no JSON, background={background}": saving(
                like, {"of": {1} if RANK else 1}, background=background
            ),
        }
    RESULTS["disagreeing"]["restoring"] = failing(lambda: rj.Checkpointer(OUT / "of_two").restore(odd))
    there = OUT / "of_one" if RANK == 0 else OUT / "nowhere"
    RESULTS["disagreeing"]["not there"] = failing(lambda: rj.Checkpointer(there).restore(like, step=1))
    text = {**like, "text": "?"} if RANK else like
    RESULTS["disagreeing"]["restoring a text"] = failing(lambda: rj.Checkpointer(OUT / "of_two").restore(text))
    damaged = OUT / "of_one" if RANK == 0 else OUT / "damaged"  # what one process reads is not what was written
    RESULTS["disagreeing"]["damaged"] = failing(lambda: rj.Checkpointer(damaged).restore(like, step=1))


def moving(mesh) -> None:
    """To three of the four devices without the host; what would need the host is refused by both."""
    three = jax.make_mesh((3,), ("fsdp",), devices=jax.devices()[:3])
    after = rj.redistribute(state_of(mesh, 2), state_of(three, 0))
    np.savez(OUT / f"moved{RANK}.npz", **rj.full_params(after["params"]), step=after["step"])
    split = jax.make_mesh((2, 2), ("fsdp", "tp"))
    tree = rj.shard_tree({"w": np.ones((4, 4))}, split, axis="fsdp", specs={"w": PartitionSpec(None, "tp")})
    like = rj.shard_tree({"w": np.ones((4, 4))}, mesh, axis="fsdp")
    RESULTS["by host"] = failing(lambda: rj.redistribute(tree, like))


def exchange(mesh) -> dict:
    """A sharded tree to the formats of others and back; and where the first process alone fails."""
    names = rj.NameMap((("w", "weight", "in out -> out in"), ("b", "bias")))
    tree = rj.shard_tree({"w": np.arange(35.0).reshape(7, 5), "b": np.ones(5)}, mesh, axis="fsdp")
    zeros = jax.tree.map(lambda x: x * 0, tree)
    rj.save_huggingface(OUT / "hf", tree, names)
    rj.save_orbax(OUT / "orbax", tree)
    back = [rj.load_huggingface(OUT / "hf", zeros, names), rj.load_orbax(OUT / "orbax", zeros)]
    return {
        "back": [rj.get(tree, "w").tolist() for tree in back],
        "again": failing(lambda: rj.save_huggingface(OUT / "other", tree, rj.NameMap((("w", "w"),)))),
    }


def save() -> None:
    (OUT / f"results{RANK}.json").write_text(json.dumps(RESULTS))


def main() -> None:
    jax.distributed.initialize(f"localhost:{PORT}", 2, RANK, heartbeat_timeout_seconds=10)
    mesh = jax.make_mesh((4,), ("fsdp",))
    RESULTS["disagreeing"] = disagreeing(mesh)
    training(mesh)
    checkpointing(mesh)
    moving(mesh)
    RESULTS["exchange"] = exchange(mesh)
    # Rank 1 takes another path through the program for a while.
    if RANK == 0:
        RESULTS["missing"] = failing(lambda: rj.check_same_on_all_processes({}, what="the configs", timeout_s=1.0))
    else:
        time.sleep(2.0)
    save()
    tree = rj.shard_tree({"w": np.ones((64, 64), np.float32)}, mesh, axis="fsdp", check_processes=False)
    step = jax.jit(lambda tree: jax.tree.map(lambda w: w * w.mean(), tree))
    jax.block_until_ready(step(tree))
    (OUT / f"stepping{RANK}").touch()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        tree = jax.block_until_ready(step(tree))


if __name__ == "__main__":
    main()
