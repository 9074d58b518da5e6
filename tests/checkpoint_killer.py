"""Saves in child processes that are killed at random moments; after each, what is there must be whole.

Run as `python checkpoint_killer.py DIRECTORY KILLS SEED`. It imports no framework, so that children are cheap to
fork. Prints how many were killed in the middle of a save.
"""

import os
import random
import signal
import sys
import time

import numpy as np

from ragged_jax.checkpoint import Checkpoint, CheckpointDirectory, Part, TensorEntry

SHAPES = {"a/w": (300, 700), "a/b": (5,), "b/w": (1000, 250), "step": ()}


def values(step: int) -> dict[str, np.ndarray]:
    return {name: np.full(shape, step, np.int32) for name, shape in SHAPES.items()}


def save(folder: CheckpointDirectory, step: int) -> None:
    tensors = {name: TensorEntry("int32", shape) for name, shape in SHAPES.items()}
    parts = [Part(name, ((0, x.size),), x, name[0]) for name, x in values(step).items()]
    folder.save(step, tensors, parts, metadata={"step": step}, keep=2)


def check(checkpoint: Checkpoint) -> None:
    """All of one step, nothing of another."""
    assert checkpoint.verify() == []
    assert checkpoint.metadata == {"step": checkpoint.step}
    for name, want in values(checkpoint.step).items():
        assert np.array_equal(checkpoint.read(name), want), name


def main(path: str, kills: int, seed: int) -> None:
    folder, rng, last, in_the_middle = CheckpointDirectory(path), random.Random(seed), -1, 0
    start = time.perf_counter()
    for step in range(3):
        save(folder, step)
    pause = (time.perf_counter() - start) / 3
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            for step in range(folder.steps()[-1] + 1, 1 << 30):
                save(folder, step)
        time.sleep(rng.uniform(0, 4 * pause))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        in_the_middle += any(folder.path.glob(".step*"))
        latest = folder.latest()
        assert latest is not None
        assert latest >= last
        for step in folder.steps():
            with folder.open(step) as checkpoint:
                check(checkpoint)
        last = latest
    save(folder, last + 1)
    assert folder.steps() == [last, last + 1], folder.steps()
    assert not list(folder.path.glob(".step*")), "a save cleans up after the killed"
    print(in_the_middle)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
