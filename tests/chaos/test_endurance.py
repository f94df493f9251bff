"""Law 5: many recoveries in one process leave no threads, descriptors or memory behind."""

from pathlib import Path

import pytest
import torch.nn.functional as F

from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from tests.laws import assert_exactly_once
from tests.trainables import make, note, notes

WORKERS = 3


def train_and_measure(ctx):
    model, optimizer, dataset = make({"model": "convnet", "samples": 300})
    model, optimizer = ctx.prepare(model, optimizer)
    loader = ctx.loader(dataset, batch_size=30)
    log = Path(ctx.config["log"]) / f"{ctx.worker}.jsonl"
    for epoch in loader.epochs(ctx.config["epochs"]):
        for x, y in epoch:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            # A smaller group has fewer connections and threads: only steps of whole groups compare.
            if ctx.worker == 0 and ctx.world_size == WORKERS:
                note(log, ctx.step, resources())


def resources():
    """Open descriptors, threads, and resident pages of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    counts = [len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("fd", "task")]
    return [*counts, pages]


@pytest.mark.parametrize(
    ("recoveries", "epochs"),
    [(16, 5), pytest.param(100, 25, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_recoveries_leave_nothing_behind(tmp_path, recoveries, epochs):
    logs = tmp_path / "logs"
    logs.mkdir()
    # Every worker but 0 dies in its fourth backward, and so does its replacement.
    kills = [Kill(worker=w, phase="bucket", detail=2, after=3) for w in range(1, 10 * recoveries)]
    result = run_local(
        with_kills(train_and_measure, kills),
        WORKERS,
        config={"log": str(logs), "epochs": epochs},
        directory=tmp_path / "run",
        replace=True,
        min_workers=WORKERS,
        timeout_s=800,
    )
    assert len(result.lost) >= recoveries
    assert_exactly_once(result.events, epochs)
    used = [figures for _, figures in sorted(notes(logs)[0].items())]
    # The least of some steps in a row: threads that bury a group live for a moment.
    early = [min(column) for column in zip(*used[10:20], strict=True)]
    late = [min(column) for column in zip(*used[-10:], strict=True)]
    assert late[0] <= early[0] + 4, f"descriptors {early[0]} -> {late[0]}"
    assert late[1] <= early[1] + 2, f"threads {early[1]} -> {late[1]}"
    assert late[2] <= early[2] * 1.1 + 2000, f"resident pages {early[2]} -> {late[2]}"
