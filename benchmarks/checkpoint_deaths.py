"""A rank is killed while a checkpoint is being saved: is what was accepted there afterwards?

Three processes hold the same State and save it in the background. The victim sends itself SIGKILL
at an offset after its own call to save had returned; offsets are spread evenly over the time that
an undisturbed save takes.
"""

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from elastix import Context
from elastix.config import CheckpointConfig
from elastix.errors import StoreError
from elastix.events import StateStored
from elastix.store import Store
from elastix.testing.local import run_local

_RANKS = 3
_VICTIM = 1
_STATE_MB = 96
_STEP = 2
_GIVE_UP_S = 20.0
_Trial = Callable[[float | None, Path], tuple[bool, bool, float]]
"""offset in seconds (None: nobody dies), folder -> accepted, loadable, seconds of the save"""


def survived_dcp(offsets: int, repeats: int, folder: Path) -> float:
    """Share for DCP in the background."""
    return _share(_try_dcp, offsets, repeats, folder, "dcp_async")


def survived_elastix(offsets: int, repeats: int, folder: Path) -> float:
    """Share for elastix."""
    return _share(_try_elastix, offsets, repeats, folder, "elastix")


def _share(trial: _Trial, offsets: int, repeats: int, folder: Path, name: str) -> float:
    usual_s = 0.0
    for _ in range(2):  # the second, when everything is warm
        with tempfile.TemporaryDirectory(dir=folder) as place:
            accepted, loadable, usual_s = trial(None, Path(place))
        if not (accepted and loadable):
            raise RuntimeError(f"{name}: an undisturbed checkpoint cannot be loaded")
    accepted_count = loadable_count = 0
    for number in range(offsets):
        offset_s = usual_s * number / offsets
        found = 0
        for _ in range(repeats):
            with tempfile.TemporaryDirectory(dir=folder) as place:
                accepted, loadable, _ = trial(offset_s, Path(place))
            accepted_count += accepted
            found += accepted and loadable
        loadable_count += found
        print(f"{name}: killed {offset_s:.3f} s into the save: {found} of {repeats}", flush=True)
    return loadable_count / accepted_count if accepted_count else float("nan")


def _model() -> torch.nn.Module:
    """About 96 MB with its optimizer, equal in all processes; large tensors and small ones."""
    torch.manual_seed(0)
    width = int((_STATE_MB * 250_000 / 3 / 8) ** 0.5)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))


def _die_in(offset_s: float) -> None:
    def strike() -> None:
        time.sleep(offset_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=strike, daemon=True).start()


# ------------------------------------------------------------------------------------- elastix


def _train(ctx: Context) -> None:
    """A few steps; the victim dies some time after the snapshot of step 2 was taken."""
    offset_s = ctx.config["offset_s"]

    def look(phase: str, detail: int) -> None:
        if phase == "snapshot" and detail == _STEP:
            (Path(ctx.config["folder"]) / f"accepted-{ctx.worker}").touch()
            if ctx.worker == _VICTIM and offset_s is not None:
                _die_in(offset_s)

    ctx.on_phase(look)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = ctx.prepare(model, optimizer)
    width = next(model.parameters()).shape[0]
    while ctx.step < _STEP + 4:
        ctx.boundary()
        model(torch.randn(8, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _try_elastix(offset_s: float | None, folder: Path) -> tuple[bool, bool, float]:
    result = run_local(
        _train,
        _RANKS,
        config={"offset_s": offset_s, "folder": str(folder)},
        directory=folder / "run",
        checkpoint=CheckpointConfig(every_steps=_STEP, keep_last=None),
        timeout_s=120.0,
    )
    accepted = all((folder / f"accepted-{rank}").exists() for rank in range(_RANKS))
    took_s = [e.store_s for e in result.events if isinstance(e, StateStored) and e.step == _STEP]
    try:
        with Store(folder / "run" / "store", read_only=True) as store:
            state = store.get(f"local/step-{_STEP:010d}")
            loadable = not store.verify() and state.meta["step"] == _STEP
    except StoreError:
        loadable = False
    return accepted, loadable, took_s[0] if took_s else 0.0


# ----------------------------------------------------------------------------------------- DCP


def _try_dcp(offset_s: float | None, folder: Path) -> tuple[bool, bool, float]:
    spawner = multiprocessing.get_context("forkserver")
    spawner.set_forkserver_preload(["benchmarks.checkpoint_deaths", "benchmarks.peers.dcp"])
    lines: list[Connection] = []
    processes = []
    for rank in range(_RANKS):
        here, there = spawner.Pipe()
        args = (rank, offset_s if rank == _VICTIM else None, str(folder), there)
        process = spawner.Process(target=_save_dcp, args=args, daemon=True)
        process.start()
        there.close()
        lines.append(here)
        processes.append(process)
    accepted: set[int] = set()
    took_s = 0.0
    waiting: dict[Any, int] = {line: rank for rank, line in enumerate(lines)}
    deadline = time.monotonic() + 60.0
    while waiting and time.monotonic() < deadline:
        for line in wait(list(waiting), timeout=1.0):
            rank = waiting[line]
            try:
                word, value = line.recv()  # type: ignore[union-attr,call-arg]
            except (EOFError, ConnectionError):
                del waiting[line]
                continue
            if word == "accepted":
                accepted.add(rank)
                if len(accepted) == _RANKS:
                    deadline = time.monotonic() + _GIVE_UP_S
            else:
                took_s = max(took_s, value)
    for process in processes:
        process.kill()
        process.join()
    return len(accepted) == _RANKS, _loads_dcp(folder), took_s


def _save_dcp(rank: int, offset_s: float | None, folder: str, line: Connection) -> None:
    import torch.distributed as dist
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import async_save

    from benchmarks.peers.dcp import stager

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/rendezvous", _RANKS)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_RANKS)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(8, next(model.parameters()).shape[0])).square().mean().backward()
    optimizer.step()
    tensors = {**model.state_dict(), **_slots(optimizer)}
    dist.barrier()
    started = time.monotonic()
    saving: Any = async_save(tensors, checkpoint_id=f"{folder}/dcp", async_stager=stager())
    line.send(("accepted", 0.0))
    if offset_s is not None:
        _die_in(offset_s)
    try:
        saving.staging_completion.result()
        saving.upload_completion.result()
        line.send(("saved", time.monotonic() - started))
    except (CheckpointException, RuntimeError):
        pass  # a peer died; whether the checkpoint is whole is looked at afterwards
    line.close()
    os._exit(0)


def _slots(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"optimizer.{i}.{key}": value
        for i, slot in enumerate(optimizer.state.values())
        for key, value in slot.items()
    }


def _loads_dcp(folder: Path) -> bool:
    """Whether another process could load it: with the metadata there and all files whole."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(8, next(model.parameters()).shape[0])).square().mean().backward()
    optimizer.step()
    tensors = {**model.state_dict(), **_slots(optimizer)}
    try:
        load(tensors, checkpoint_id=folder / "dcp", no_dist=True)
    except (CheckpointException, OSError, RuntimeError):
        return False
    return True
