"""Datasets by position under workers that come and go: what is read twice, and what never.

    python -m benchmarks.formats --out FILE

The same rows as a tar, as Parquet, as Arrow, as tensors, and as a dataset so long that its order is
computed where it is needed. Over each, 20 random schedules of losses and joins: in each step each
worker may be lost with its share, and others come, who are given the cursor of one that is left.
All that the steps' contributors have read is counted, sample by sample, over two epochs. Then how
long a loader over ten million rows takes that goes on in the middle of an epoch.
"""

import argparse
import random
import statistics
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import torch
from torch.utils.data import Dataset, TensorDataset

import elastix
from benchmarks.record import save
from elastix.data.formats.indexed import Indexed
from elastix.data.loader import Loader
from elastix.data.permutation import FROM
from elastix.data.source import Source

EPOCHS = 2
LARGEST = 6
MANY = 10_000_000
CPU = torch.device("cpu")


class Alone:
    """A group of one, whose steps all count."""

    me = 0

    def boundary(self, loader: int) -> None:
        """Nobody comes or goes."""

    def left(self) -> None:
        """Nothing is taken back."""

    def exhausted(self, loader: int) -> bool:
        """Nothing ends with an epoch."""
        return False

    def members(self) -> tuple[int, ...]:
        """This one."""
        return (0,)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Whatever else a loader tells its group."""
        return lambda *_: None


class Changing(Alone):
    """One worker's view of a group that changes."""

    def __init__(self, me: int, group: list[int]) -> None:
        self.me = me
        self._group = group

    def members(self) -> tuple[int, ...]:
        """Those of now."""
        return tuple(self._group)


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


def number_in(sample: Any) -> int:  # noqa: ANN401 - a sample of any of these
    """Which sample it is."""
    if isinstance(sample, Mapping):
        return int(sample["n"])
    return int(sample[0] if isinstance(sample, tuple | list) else sample)


def made(folder: Path, rows: int) -> dict[str, tuple[Dataset[Any], int]]:
    """Datasets by format, and samples of a batch."""
    with tarfile.open(folder / "rows.tar", "w") as archive:
        for row in range(rows):
            body = str(row).encode()
            info = tarfile.TarInfo(f"{row:06d}.n")
            info.size = len(body)
            archive.addfile(info, BytesIO(body))
    table = pa.table({"n": list(range(rows))})
    pa.parquet.write_table(table, folder / "rows.parquet", row_group_size=50)
    with pa.ipc.new_file(str(folder / "rows.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    return {
        "tar": (elastix.Tar(folder / "rows.tar"), 32),
        "parquet": (elastix.Parquet(folder / "rows.parquet", mixed=3), 32),
        "arrow": (elastix.Arrow(folder / "rows.arrow", mixed=3), 32),
        "tensors": (TensorDataset(torch.arange(rows)), 32),
        "scattered": (Numbers(FROM), FROM // 24),
    }


def schedule(dataset: Dataset[Any], batch_size: int, seed: int) -> dict[str, int]:
    """One schedule: losses, joins, and samples that were used too often or too rarely."""
    chance = random.Random(seed)
    group = list(range(chance.randint(1, 4)))
    loaders: dict[int, Loader] = {}

    def join(worker: int, state: dict[str, Any] | None) -> None:
        source = Source(
            dataset=dataset, batch_size=batch_size, seed=seed, collate=collate, device=CPU
        )
        loaders[worker] = Loader(0, source, Changing(worker, group))
        if state is not None:
            loaders[worker].load_state_dict(state)

    for worker in group:
        join(worker, None)
    used: Counter[int] = Counter()
    lost = joined = 0
    while loaders[group[0]].epoch < EPOCHS:
        batches = {worker: loaders[worker].next_batch() for worker in group}
        if batches[group[0]] is None:
            for worker in group:
                loaders[worker].epoch += 1
            continue
        left = [w for w in group if chance.random() > 0.1] or [chance.choice(group)]
        for worker in left:
            if loaders[worker].drawn[-1].share_of(worker):  # else they are placeholders
                used.update(batches[worker])
        for worker in left:
            loaders[worker].commit(left)
        lost += len(group) - len(left)
        group[:] = left
        if len(group) < LARGEST and chance.random() < 0.3:
            newcomer = max(loaders) + 1
            join(newcomer, loaders[group[0]].state_dict())
            group.append(newcomer)
            joined += 1
    length = len(dataset)  # type: ignore[arg-type]
    return {
        "lost": lost,
        "joined": joined,
        "repeated": sum(max(0, times - EPOCHS) for times in used.values()),
        "dropped": sum(max(0, EPOCHS - used[row]) for row in range(length)),
    }


def collate(samples: list[Any]) -> list[int]:
    """The numbers of the samples."""
    return [number_in(sample) for sample in samples]


def resume(make: Callable[[], Dataset[Any]]) -> dict[str, float]:
    """Seconds until a loader that goes on in the middle has its batch; the order is not known yet.

    Its seed is a new one each time, so that nothing is remembered.
    """
    cpu, wall = [], []
    for seed in range(3):
        source = Source(dataset=make(), batch_size=64, seed=seed, collate=list, device=CPU)
        loader = Loader(0, source, Alone())
        state = {**loader.state_dict(), "position": MANY // 2}
        began, used = time.perf_counter(), time.process_time()
        loader.load_state_dict(state)
        loader.next_batch()
        cpu.append(time.process_time() - used)
        wall.append(time.perf_counter() - began)
    return {"rows": MANY, "cpu_s": statistics.median(cpu), "wall_s": statistics.median(wall)}


class Table(Indexed):
    """Ten million rows in blocks of a thousand, as a table has them; sample i is i."""

    blocks = (1000,) * (MANY // 1000)
    mixed = 8

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, index: int) -> int:
        return index


def under_schedules(rows: int, schedules: int) -> dict[str, Any]:
    """By format, what was lost, joined, repeated and dropped in all schedules."""
    found: dict[str, Any] = {"schedules": schedules, "epochs": EPOCHS}
    with tempfile.TemporaryDirectory() as folder:
        for name, (dataset, batch_size) in made(Path(folder), rows).items():
            each = [schedule(dataset, batch_size, seed) for seed in range(schedules)]
            found[name] = {what: sum(one[what] for one in each) for what in each[0]}
            found[name]["rows"] = len(dataset)  # type: ignore[arg-type]
    return found


def resumed() -> dict[str, dict[str, float]]:
    """In the middle of many rows, each by itself and in blocks."""
    return {"by_row": resume(lambda: Numbers(MANY)), "in_blocks": resume(Table)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--schedules", type=int, default=20)
    options = parser.parse_args()
    found = under_schedules(options.rows, options.schedules)
    save(options.out, {**found, "resume_at_half": resumed()})


if __name__ == "__main__":
    main()
