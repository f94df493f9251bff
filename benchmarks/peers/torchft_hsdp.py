"""torchft's HSDP over gloo: two replica groups of two ranks each, FSDP2 within, torchft between.

As torchft's own test of FSDP2 and torchtitan have it: `fully_shard` on the mesh of a group, and
`set_all_reduce_hook` with an allreduce of the `Manager` between the groups. The model, the batch,
the optimizer and the loop are those of `benchmarks.crews`.

Prints one line of JSON: seconds of each step of the first rank, or the error that ended a rank.
"""

import argparse
import json
import multiprocessing
import os
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks import crews
from benchmarks.peers.torchft_group import lighthouse

GROUPS = PLACES = 2


def rank(
    group: int, place: int, steps: int, stores: list[int], address: str, told: Connection
) -> None:
    """One process; tells the seconds of its steps, or the last line of what ended it."""
    try:
        told.send(_train(group, place, steps, stores, address))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the result says so
        lines = traceback.format_exception_only(error)
        where = traceback.extract_tb(error.__traceback__)[-1]
        told.send(f"{lines[-1].strip()} ({where.name} in {where.filename.rsplit('/', 1)[-1]})")
    os._exit(0)


def _train(group: int, place: int, steps: int, stores: list[int], address: str) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torchft import Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    port = stores[group]
    store = TCPStore("127.0.0.1", port, is_master=place == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=place, world_size=PLACES)
    mesh = init_device_mesh("cpu", (PLACES,), mesh_dim_names=("shard",))
    model = crews.build(crews.WIDTH)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=lambda _: None,
        state_dict=dict,
        min_replica_size=GROUPS,
        replica_id=f"group-{group}",
        rank=place,
        world_size=PLACES,
        store_addr="127.0.0.1",
        store_port=port,
        lighthouse_addr=address,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=20),
        init_sync=False,
    )

    def reduce(output: torch.Tensor) -> None:
        manager.allreduce(output).wait()

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(reduce)
    optimizer = Optimizer(manager, crews.optimizer_of(model))
    data, part, times = crews.samples(crews.WIDTH, steps), crews.BATCH // 4, []
    me = group * PLACES + place
    for step in range(steps):
        started = time.perf_counter()
        x, y = data[step * crews.BATCH + me * part : step * crews.BATCH + (me + 1) * part]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        times.append(time.perf_counter() - started)
        if manager.errored() is not None:
            raise manager.errored().original_exception
    return times


def main() -> None:
    """The command line."""
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--seconds", type=float, default=60.0)
    given.add_argument("--steps", type=int, default=crews.STEPS)
    asked = given.parse_args()
    seconds = asked.seconds
    context = multiprocessing.get_context("spawn")
    stores = [crews.free_port() for _ in range(GROUPS)]
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "USE_LIBUV": "0"}
    with lighthouse(5.0, GROUPS) as address:
        ranks: list[tuple[Any, Connection]] = []
        for group in range(GROUPS):
            for place in range(PLACES):
                here, there = context.Pipe(duplex=False)
                args = (group, place, asked.steps, stores, address, there)
                process = context.Process(target=rank, args=args)
                process.start()
                there.close()
                ranks.append((process, here))
        told: list[list[float] | str] = []
        until = time.monotonic() + seconds
        for _, line in ranks:
            found: list[float] | str = f"not through after {seconds:.0f} s"
            if line.poll(max(0.0, until - time.monotonic())):
                with suppress(EOFError):
                    found = line.recv()
            told.append(found)
            if isinstance(found, str):
                break
        for process, _ in ranks:
            process.kill()
            process.join()
    errors = [one for one in told if isinstance(one, str)]
    print(json.dumps({"error": errors[0]} if errors else {"step_s": told[0]}))


if __name__ == "__main__":
    from benchmarks.peers.torchft_hsdp import main as run  # ranks import functions by this name

    run()
