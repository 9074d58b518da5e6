"""Jobs of several torch processes that tests start: every rank runs the same cases and writes down what failed."""

import datetime
import gc
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

WORKERS = Path(__file__).parent / "torch_workers"


def run_ranks(worker: str, size: int, folder: Path, *arguments: str, timeout: float = 240) -> dict[str, str]:
    """Runs a worker on `size` ranks. Returns what failed, by rank and case.

    The worker is called as `WORKER RANK SIZE STORE OUT ARGUMENTS...` and ends with `run_cases`. A rank that a signal
    ended is shown with its number and trace, and the job run once more (docs/design/torch_bridge.md).
    """
    ended = _run(worker, size, folder, arguments, timeout)
    if signalled := [f"rank {rank}, signal {-code}:\n{text}" for rank, (code, text) in enumerate(ended) if code < 0]:
        print(f"{worker} on {size} ranks: ended by a signal", *signalled, sep="\n")
        (folder := folder / "again").mkdir()
        ended = _run(worker, size, folder, arguments, timeout)
    failed = {}
    for rank, (code, text) in enumerate(ended):
        outcome = Path(f"{folder / worker}.out.{rank}")
        assert outcome.exists(), f"rank {rank} ended with {code} and left nothing behind:\n{text}"
        outcomes = json.loads(outcome.read_text())
        assert len(outcomes) >= 2
        failed |= {f"rank {rank}: {case}": trace for case, trace in outcomes.items() if trace}
    return failed


def _run(worker: str, size: int, folder: Path, arguments: tuple[str, ...], timeout: float) -> list[tuple[int, str]]:
    """Of each rank, what it returned and its errors."""
    path = os.pathsep.join([str(WORKERS.parents[1]), str(WORKERS.parent), str(WORKERS)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-X", "faulthandler", "-W", "error", str(WORKERS / worker)]
    files = [str(folder / f"{worker}.store"), str(folder / f"{worker}.out")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), *files, *arguments], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    try:
        errors = [rank.communicate(timeout=timeout)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, error) for rank, error in zip(ranks, errors, strict=True)]


def run_cases(cases: Mapping[str, Callable[[], None]], rank: int, size: int, store: str, out: str) -> None:
    """In a worker: joins the job, runs the cases in turn, and says what became of each."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=size,
        store=dist.FileStore(store, size),
        timeout=datetime.timedelta(seconds=60),
    )
    results = {}
    for name, case in cases.items():
        try:
            case()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
            if size > 1:
                break  # the other ranks may be elsewhere
    Path(f"{out}.{rank}").write_text(json.dumps(results))
    dist.barrier()
    gc.collect()  # modules in cycles hold the group, whose threads would outlive the interpreter
    dist.destroy_process_group()
