"""What the train function asks of the group beside steps."""

from types import SimpleNamespace

import pytest
import torch

from elastix.comm.protocol.calls import OperationKind
from elastix.errors import ConfigError
from elastix.train.replica import group_calls
from elastix.train.replica.group_calls import GroupCalls

ME = 1


class Desk:
    """A worker whose operations are noted, and answered with what they were about."""

    def __init__(
        self, monkeypatch, *, ratio=None, samples=None, mates=None, staged=False, on_the_way=False
    ):
        self.done = []
        self.loader = SimpleNamespace(pending=False)

        def refuse(call):
            self.done.append(("asked", call))

        class Mean:
            def __init__(self, kind, values, samples):
                self.result = (kind, dict(values), samples)

            def means(self, result, empty):
                self.empty = empty
                return {name: (value, result[2]) for name, value in result[1].items()}

        def together(work):
            self.done.append(work.result)
            return work.result

        monkeypatch.setattr(group_calls, "GroupMean", Mean)
        parts = SimpleNamespace(
            me=ME,
            device=torch.device("cpu"),
            settings=SimpleNamespace(exact=False, seed=0),
            driver=SimpleNamespace(check_within=lambda wait: None),
            tracked=SimpleNamespace(staged=staged, loaders=[self.loader]),
            copies=None,
            phase=lambda *place: self.done.append(place),
        )
        steps = SimpleNamespace(
            step=4,
            check=lambda: self.done.append("checked"),
            metrics=SimpleNamespace(refuse=refuse),
            slices=SimpleNamespace(refuse=lambda _call: None, samples=samples, step=None),
            window=SimpleNamespace(ratio=ratio),
        )
        state = SimpleNamespace(on_the_way=on_the_way, together=together)
        processes = SimpleNamespace(mates=mates)
        self.calls = GroupCalls(
            parts, steps, state, processes, lambda: self.done.append("together")
        )


@pytest.mark.parametrize(
    ("ratio", "samples", "counts"),
    [(None, None, None), ({0: 5, ME: 3}, None, 3), ({0: 5}, None, 0), ({0: 5, ME: 3}, 2, 2)],
    ids=["no batch", "a share", "none of it", "slices"],
)
def test_a_mean_counts_what_this_worker_has_of_the_last_batch(monkeypatch, ratio, samples, counts):
    desk = Desk(monkeypatch, ratio=ratio, samples=samples)
    assert desk.calls.mean({"loss": 0.5}) == {"loss": (0.5, counts)}
    assert desk.done == [
        ("asked", "ctx.mean"),
        "checked",
        ("mean", 4),
        (OperationKind.MEAN, {"loss": 0.5}, counts),
    ]


def test_a_batch_that_was_drawn_after_slices_counts_and_not_those(monkeypatch):
    desk = Desk(monkeypatch, ratio={0: 5, ME: 3}, samples=2)
    desk.loader.pending = True
    assert desk.calls.mean({"loss": 0.5}) == {"loss": (0.5, 3)}
    desk.calls._steps.slices.step = "drawn"  # the next ones
    assert desk.calls.mean({"loss": 0.5}) == {"loss": (0.5, 2)}


def test_a_joiner_on_its_way_counts_by_itself(monkeypatch):
    desk = Desk(monkeypatch, ratio={0: 5}, on_the_way=True)
    assert desk.calls.mean({"loss": 0.5}) == {"loss": (0.5, None)}


def test_places_of_a_worker_first_agree_on_what_it_says(monkeypatch):
    seen = []
    mates = SimpleNamespace(
        mean=lambda values: {name: 2 * v for name, v in values.items()}, averaged=seen.append
    )
    desk = Desk(monkeypatch, mates=mates)
    assert desk.calls.mean({"loss": 0.5}) == {"loss": (1.0, None)}
    assert seen == [{"loss": 1.0}]


def test_one_process_clips_by_itself(monkeypatch):
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    desk = Desk(monkeypatch)
    assert desk.calls.clip([parameter], 1.0) == 5.0
    assert parameter.grad.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_stages_clip_together_after_the_step_and_not_before(monkeypatch):
    mates = SimpleNamespace(clip=lambda parameters, max_norm: (parameters, max_norm))
    desk = Desk(monkeypatch, mates=mates, staged=True)
    assert desk.calls.clip([], 2.0) == ([], 2.0)
    desk.loader.pending = True
    with pytest.raises(ConfigError, match="clip_grad_norm_"):
        desk.calls.clip([], 2.0)


@pytest.mark.parametrize(
    ("staged", "batch_size", "microbatch"), [(True, 8, None), (False, 9, 2)], ids=["none", "odd"]
)
def test_an_evaluation_that_stages_could_not_share_is_refused_before_anybody_steps(
    monkeypatch, staged, batch_size, microbatch
):
    desk = Desk(monkeypatch, staged=staged)
    monkeypatch.setattr(group_calls.schedule_runs, "required", lambda metric: metric)
    with pytest.raises(ConfigError):
        desk.calls.evaluate(None, None, batch_size, None, microbatch)
    assert desk.done == [("asked", "ctx.evaluate")]
