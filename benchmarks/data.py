"""What samples cost that are dear to decode, and what the loader costs beside torch's.

    python -m benchmarks.data --out FILE

Synthetic JPEGs are read by K trials on this host, each with an order of batches in common and an
augmentation of its own: once each trial decodes for itself, in its own process, and once they read
from one `elastix.Shared`. Then the CPU that a batch costs, and a step of a trial that is alone in
its process, and how long it takes to go on in the middle of ten million rows.

Times are CPU seconds of all processes together and, where it says wall, of the slowest trial. Modes
are interleaved and repeated; medians are given.
"""

import argparse
import hashlib
import io
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.record import save
from elastix.config import CheckpointConfig
from elastix.data.loader import Loader
from elastix.data.sample_order import indices
from elastix.data.shared import Shared
from elastix.data.source import Source
from elastix.train.replica.context import Context
from elastix.train.replica.link import Settings
from elastix.train.replica.solo import run_alone

PIXELS, KEPT, CROP = 256, 160, 140
BATCH = 64
CPU = torch.device("cpu")


class Alone:
    """A group of one, whose steps all count."""

    me = 0

    def boundary(self) -> None:
        """Nobody comes or goes."""

    def members(self) -> tuple[int, ...]:
        """This one."""
        return (0,)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Whatever else a loader tells its group."""
        return lambda *_: None


class Pictures(Dataset[torch.Tensor]):
    """JPEGs in memory, decoded and made smaller."""

    def __init__(self, raw: list[bytes]) -> None:
        self.raw = raw
        self.decodes = 0

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.decodes += 1
        image = Image.open(io.BytesIO(self.raw[index])).convert("RGB")
        return torch.from_numpy(np.array(image.resize((KEPT, KEPT), Image.Resampling.BILINEAR)))

    def __getstate__(self) -> dict[str, Any]:
        return {"raw": self.raw, "decodes": 0}


def jpegs(count: int) -> list[bytes]:
    """Pictures with structure at all scales, as photographs have."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        picture = np.zeros((PIXELS, PIXELS, 3), np.float32)
        for scale, weight in ((4, 0.6), (16, 0.25), (64, 0.15)):
            small = Image.fromarray(rng.integers(0, 255, (scale, scale, 3), dtype=np.uint8))
            large = small.resize((PIXELS, PIXELS), Image.Resampling.BICUBIC)
            picture += np.asarray(large, np.float32) * weight
        picture += rng.normal(0, 6, picture.shape)
        file = io.BytesIO()
        Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
        made.append(file.getvalue())
    return made


def crop(sample: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """A part of the picture, mirrored or not."""
    top, left = (int(n) for n in rng.integers(0, KEPT - CROP, 2))
    part = sample[top : top + CROP, left : left + CROP]
    return part.flip(1) if rng.random() < 0.5 else part


def batches(dataset: Dataset[Any], epochs: int, seed: int, num_workers: int = 0) -> Iterator[Any]:
    """As ctx.loader gives them to a group of one."""
    source = Source(
        dataset=dataset,
        batch_size=BATCH,
        seed=seed,
        augment=crop,
        num_workers=num_workers,
        device=CPU,
    )
    loader = Loader(0, source, Alone())
    for epoch in loader.epochs(epochs):
        for batch in epoch:
            yield batch
            loader.commit((0,))


def cpu_s() -> float:
    """Of this process and its children."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in both)


def trial(mode: str, raw: list[bytes], epochs: int, answers: "SimpleQueue[Any]") -> None:
    """One trial: reads all batches, and says what they cost and what they were."""
    torch.set_num_threads(1)
    began, used = time.perf_counter(), cpu_s()
    pictures = Pictures(raw)
    shared = Shared(pictures, "8GB") if mode == "shared" else None
    digest = hashlib.sha256()
    for batch in batches(shared or pictures, epochs, seed=5):
        digest.update(batch.numpy()[:, ::16, ::16].tobytes())
    wall = time.perf_counter() - began
    decodes = shared.counts.decodes + 2 if shared else pictures.decodes  # two to know it by
    if shared:
        shared.close()
    answers.put((wall, cpu_s() - used, decodes, digest.hexdigest()))


def together(mode: str, trials: int, raw: list[bytes], epochs: int) -> dict[str, Any]:
    """K trials at once."""
    context = multiprocessing.get_context("fork")
    answers: SimpleQueue[Any] = context.SimpleQueue()
    started = [
        context.Process(target=trial, args=(mode, raw, epochs, answers)) for _ in range(trials)
    ]
    for process in started:
        process.start()
    said = [answers.get() for _ in started]
    for process in started:
        process.join()
    return {
        "wall_s": max(wall for wall, *_ in said),
        "cpu_s": sum(cpu for _, cpu, *_ in said),
        "decodes_a_sample": sum(decodes for *_, decodes, _ in said) / len(raw),
        "digests": sorted({digest for *_, digest in said}),
    }


def ingest(count: int, epochs: int, repeats: int) -> dict[str, Any]:
    """Private decoding beside shared, for 1, 2 and 4 trials."""
    raw = jpegs(count)
    found: dict[str, Any] = {"pictures": count, "epochs": epochs}
    for trials in (1, 2, 4):
        runs: dict[str, list[dict[str, Any]]] = {"private": [], "shared": []}
        for _ in range(repeats):
            for mode, mine in runs.items():
                mine.append(together(mode, trials, raw, epochs))
        digests = {d for mine in runs.values() for one in mine for d in one["digests"]}
        medians = {mode: _medians(mine) for mode, mine in runs.items()}
        found[f"trials_{trials}"] = {
            **medians,
            "same_batches": len(digests) == 1,
            "cpu_ratio": medians["shared"]["cpu_s"] / medians["private"]["cpu_s"],
            "wall_ratio": medians["shared"]["wall_s"] / medians["private"]["wall_s"],
        }
    return found


def _medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    names = ("wall_s", "cpu_s", "decodes_a_sample")
    return {name: statistics.median(run[name] for run in runs) for name in names}


def cost_of_batches(repeats: int) -> Mapping[str, float]:
    """Microseconds of CPU in the training thread a batch, ours and torch's, over digits."""
    data = TensorDataset(torch.rand(4096, 1, 8, 8), torch.arange(4096) % 10)

    def ours() -> int:
        loader = Loader(0, Source(dataset=data, batch_size=BATCH, device=CPU), Alone())
        count = 0
        for _ in next(iter(loader.epochs(1))):
            loader.commit((0,))
            count += 1
        return count

    def theirs() -> int:
        return sum(1 for _ in DataLoader(data, BATCH, shuffle=True))

    found: dict[str, list[float]] = {"elastix_us": [], "torch_us": []}
    for _ in range(repeats):
        for name, read in (("elastix_us", ours), ("torch_us", theirs)):
            began = time.thread_time()
            count = read()
            found[name].append((time.thread_time() - began) / count * 1e6)
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {**medians, "ratio": medians["elastix_us"] / medians["torch_us"]}


def small_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def descend(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[list[torch.Tensor]]
) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def lone_steps(rounds: int, epochs: int = 6) -> Mapping[str, float]:
    """Microseconds of CPU that a step of a small model takes, in a plain loop and in a lone trial.

    The least of all rounds, of whole runs less what one epoch takes.
    """
    data = TensorDataset(torch.rand(1792, 64), torch.arange(1792) % 10)
    settings = Settings(
        directory=Path(tempfile.gettempdir()),
        run="trial",
        seed=0,
        min_workers=1,
        checkpoint=CheckpointConfig(),
        alone=True,
    )

    def plain(count: int) -> None:
        made = small_model()
        for _ in range(count):
            descend(*made, DataLoader(data, BATCH, shuffle=True))

    def trial(ctx: Context) -> None:
        made = ctx.prepare(*small_model())
        for epoch in ctx.loader(data, BATCH).epochs(ctx.config["epochs"]):
            descend(*made, epoch)

    def alone(count: int) -> None:
        outcome = run_alone(trial, {"epochs": count}, settings, lambda _: None)
        if outcome.error is not None:
            raise outcome.error

    least: dict[tuple[str, int], float] = {}
    for _ in range(rounds):
        for name, run in (("plain_us", plain), ("elastix_us", alone)):
            for count in (1, epochs):
                began = time.thread_time()
                run(count)
                took = time.thread_time() - began
                least[name, count] = min(took, least.get((name, count), took))
    steps = (epochs - 1) * 1792 // BATCH
    us = {n: (least[n, epochs] - least[n, 1]) / steps * 1e6 for n in ("plain_us", "elastix_us")}
    return {**us, "ratio": us["elastix_us"] / us["plain_us"]}


def resume(rows: int = 10_000_000) -> Mapping[str, float]:
    """Seconds until the indices of the batch in the middle are known."""
    began = time.perf_counter()
    indices(((rows // 2, rows // 2 + BATCH),), 1, rows, True)
    return {"rows": rows, "seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pictures", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20, help="of a lone trial's steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        "ingest": ingest(options.pictures, options.epochs, options.repeats),
        "batch": cost_of_batches(options.repeats),
        "lone_step": lone_steps(options.rounds),
        "resume": resume(),
    }
    save(options.out, results)


if __name__ == "__main__":
    main()
