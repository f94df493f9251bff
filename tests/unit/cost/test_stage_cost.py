"""What stages of a pipeline hold and compute, beside the whole model; nothing is run."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from elastix.cli import app
from elastix.cost.stages import trace_stages
from elastix.cost.trace import trace
from elastix.errors import ConfigError

RUNNER = CliRunner()
LAYERS, WIDTH, MICRO = 4, 64, 8


def build():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def stage(model, place, places):
    for number in range(len(model)):
        if number * places // len(model) != place:
            model[number] = nn.Identity()
    return model


def traced(places, microbatches, cut=stage):
    return trace_stages(
        lambda place: cut(build(), place, places),
        places,
        lambda: torch.zeros(MICRO, WIDTH),
        microbatches,
        foreach=False,
    )


@pytest.mark.parametrize("places", [1, 2, 4])
def test_stages_together_are_the_model(places):
    found = traced(places, 4)
    whole = trace(build, lambda: (torch.zeros(4 * MICRO, WIDTH),), foreach=False)
    for name in ("parameters", "model_bytes", "gradients_bytes", "forward_flops", "step_flops"):
        assert sum(getattr(cost, name) for cost in found.costs) == getattr(whole, name), name


def test_stages_may_be_moved_while_they_are_made_or_have_been_made_before():
    whole = build()
    before = [parameter.clone() for parameter in whole.parameters()]
    halves = [whole[: LAYERS // 2], whole[LAYERS // 2 :]]
    found = traced(2, 4)
    assert traced(2, 4, lambda *where: stage(*where).to("cpu")) == found
    assert traced(2, 4, lambda _, place, __: halves[place]) == found
    assert all(map(torch.equal, whole.parameters(), before))


def test_a_stage_holds_as_many_micro_batches_as_there_are_stages_from_it_on():
    few, many = traced(4, 1), traced(4, 16)
    more = [b.peak_bytes - a.peak_bytes for a, b in zip(few.costs, many.costs, strict=True)]
    assert more == sorted(more, reverse=True)
    each = 4 * MICRO * WIDTH
    assert more[0] >= 3 * each
    assert more[-1] == 0  # the last one is through with each before the next comes
    assert traced(4, 100).costs[0].peak_bytes == many.costs[0].peak_bytes


def test_stages_wait_for_the_first_micro_batch_and_for_the_last():
    assert traced(1, 4).bubble == 0
    assert traced(4, 1).bubble == 3 / 4
    assert traced(4, 9).bubble == 3 / 12


def test_activations_go_on_and_gradients_back():
    each = 4 * MICRO * WIDTH
    assert [cost.sent_bytes for cost in traced(3, 5).costs] == [5 * each, 10 * each, 5 * each]


def test_the_worst_is_the_memory_of_one_stage_and_the_work_of_another():
    def cut(model, place, places):
        del places
        for number in range(LAYERS):
            if (number == 0) != (place == 0):
                model[number] = nn.Identity()
        return model

    found = traced(2, 64, cut)
    worst = found.worst(1e9, 1e9)
    assert worst.peak_bytes == max(cost.peak_bytes for cost in found.costs)
    assert worst.step_flops == found.costs[1].step_flops
    assert worst.parameters == LAYERS * (WIDTH * WIDTH + WIDTH)


class Named(nn.Linear):
    def forward(self, x):
        return {"hidden": super().forward(x)}


def test_what_schedules_cannot_pass_on_is_refused():
    def cut(model, place, places):
        del model, place, places
        return Named(WIDTH, WIDTH)

    with pytest.raises(ConfigError, match="a stage gives the next one a dict"):
        traced(2, 4, cut)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (None, "gave a NoneType for stage 1 of 2"),
        (nn.Identity(), "stage 1 of 2 has nothing to tr"),
        (nn.Sequential(nn.Identity(), nn.BatchNorm1d(WIDTH)), "'1' is a BatchNorm1d with running"),
        (build(), "'0.weight' is trained at places 0 and 1"),
    ],
    ids=["no module", "nothing trained", "running statistics", "the same layers"],
)
def test_what_is_no_stage_is_refused(made, says):
    with pytest.raises(ConfigError, match=says):
        traced(2, 4, lambda model, place, _: made if place else model[:1])


def test_the_command_line_estimates_the_largest_stage(tmp_path):
    script = tmp_path / "model.py"
    script.write_text("from tests.unit.cost.test_stage_cost import build, stage\n")

    def said(*words, model=script):
        words = ("estimate", str(model), "--shape", str(WIDTH), "--device", "h100", *words)
        return RUNNER.invoke(app, words)

    mesh = ("--mesh", "pipe=2", "--microbatch", "8", "--batch-size", "64", "--workers", "2")
    found = json.loads(said(*mesh, "--json").stdout)
    assert found["plan"]["devices"] == 4
    assert found["stages"]["microbatches"] == 4
    assert found["stages"]["bubble"] == 1 / 5
    assert found["cost"]["peak_bytes"] == max(found["stages"]["peak_bytes"])
    assert found["cost"]["peak_bytes"] < found["one_process"]["cost"]["peak_bytes"]
    flops = found["one_process"]["plan"]["total_flops"]
    assert found["plan"]["total_flops"] == pytest.approx(flops, rel=1e-9)
    table = dict(line.split("\t")[:2] for line in said(*mesh).stdout.splitlines())
    assert table["bubble"] == "20% of a step, with 4 micro-batches (1F1B)"
    (tmp_path / "bare.py").write_text("from tests.unit.cost.test_stage_cost import build\n")
    for result, says in (
        (said("--mesh", "pipe=2"), "needs --microbatch"),
        (said(*mesh, "--microbatch", "5"), "no whole number of micro-batches of 5"),
        (said(*mesh, "--microbatch", "128"), "Use 128, say"),
        (said(*mesh, model=tmp_path / "bare.py"), "has no function 'stage'"),
        (said("--mesh", "shard=2,pipe=2", "--microbatch", "8"), "has no function 'parallelize'"),
    ):
        assert result.exit_code == 2
        assert says in result.stderr
