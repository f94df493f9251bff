"""The report of a real campaign, in process: trial database and journal to page."""

import pytest
import torch
import torch.nn.functional as F
from ConfigSpace import ConfigurationSpace, Float, Integer
from torch.utils.data import TensorDataset

import elastix
from elastix.observe import catalogue, journal
from elastix.report import write_report
from elastix.report.sources import campaign_record
from elastix.search.executors.serial import Local

SPACE = ConfigurationSpace(
    name="tiny", space=[Float("lr", (1e-4, 1.0), log=True), Integer("width", (4, 16))], seed=1
)


def train(ctx: elastix.Context) -> None:
    x = torch.rand(64, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, (x.sum(1) > 2).long())
    width = ctx.config["width"]
    if width == 7:
        raise ValueError("seven <b>is</b> unlucky")
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, width), torch.nn.Linear(width, 2)
    )
    ctx.inherit(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=ctx.config["lr"])
    model, optimizer = ctx.prepare(model, optimizer)
    for epoch in ctx.loader(data, batch_size=32).epochs(2):
        for inputs, targets in epoch:
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ctx.report(loss=loss.detach())


def test_a_campaign_from_its_book_and_journal(tmp_path):
    elastix.Campaign(
        train,
        space=SPACE,
        searcher=elastix.Evolution(population=6, sample=3),
        metric="loss",
        mode="min",
        budget=elastix.Budget(trials=14),
        rerank=2,
        run=elastix.RunConfig(name="small", store=str(tmp_path)),
        executor=Local(),
    ).run()
    events = list(journal.read(tmp_path / "runs" / "small" / "journal.jsonl"))
    found = campaign_record(tmp_path, "small", events)
    listed = catalogue.summary(tmp_path, "small")
    assert (found.began, found.last) == (listed.began_t, listed.last_t)
    assert found.last - found.began == pytest.approx(listed.took_s)
    assert campaign_record(tmp_path, "small", ()).began < found.began, "without a journal"
    assert len(found.trials) == 14
    assert found.objectives == (("loss", "min"),)
    assert found.outcome == "finished"
    assert found.best.values[0] == min(t.values[0] for t in found.controls), "from scratch"
    children = [t for t in found.trials if t.parent is not None]
    assert children
    assert any(t.inherited and 0 < t.inherited <= 1 for t in children)
    assert any(t.lineage_epochs > t.epochs for t in children)
    assert all(len(t.curve) == 2 for t in found.scored)
    assert len(found.controls) == 2
    text = write_report("small", tmp_path).read_text()
    for part in ("elastix campaign", "From scratch", "saved by sharing tensors", "trials-table"):
        assert part in text
    failed = [t for t in found.trials if t.state == "failed"]
    assert ("seven &lt;b&gt;is&lt;/b&gt; unlucky" in text) == bool(failed)
