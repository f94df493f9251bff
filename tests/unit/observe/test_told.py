"""What befell a run is said in all four places: journal, console, metrics and report."""

import pytest

from elastix.events import (
    GenerationFormed,
    LoaderOpened,
    ProcessorsDiffer,
    ReplicasDiverged,
    ReplicasLevelled,
    ResumedFromShadow,
    SamplesLeftOut,
    ShadowDiffers,
    SlicesHandedOver,
    StepVoided,
    WorkerJoined,
    WorkerLost,
    WorkerRaised,
)
from elastix.observe import journal
from elastix.observe.event_text import last_error, line
from elastix.observe.metric_series import Readings
from elastix.report.compose import training_page
from elastix.report.training import tell

BEGAN = 1_000_000.0
GROUP = GenerationFormed(t=BEGAN, generation=1, members=(0, 1, 2), cause="start")
OPENED = LoaderOpened(t=BEGAN, loader=0, length=60, batch_size=30, shuffle=True, seed=0, slices=6)
LOST = WorkerLost(t=BEGAN + 1, worker=2, rank=2, generation=1, cause="died")

DEEDS = {
    "slices handed over within the step": (
        SlicesHandedOver(t=BEGAN + 2, step=4, moved=((2, 0, 2), (2, 1, 1))),
        "step 4 is whole: slices of worker 2 computed by others (2 by 0, 1 by 1)",
        {"slices_handed_over": 3},
        "3 slices computed by others",
    ),
    "a State that differs, and whose": (
        ReplicasDiverged(
            t=BEGAN + 2, step=3, workers=(0, 1, 2), apart=(1,), parts=("model",), cure="evicted"
        ),
        "step 4 void: States of workers 1 differ in model; evicted",
        {"workers_diverged": 1},
        None,
    ),
    "a slice that was miscalculated, and by whom": (
        ReplicasDiverged(
            t=BEGAN + 2,
            step=3,
            workers=(0, 1),
            apart=(0, 1),
            parts=("gradients",),
            cure="went back",
        ),
        "step 4 void: workers 0 1 miscalculated a slice (gradients); all go back",
        {"workers_diverged": 2},
        None,
    ),
    "a step that the guard voided": (
        StepVoided(t=BEGAN + 2, step=4, why="the gradient is not finite"),
        "step 4 void: the gradient is not finite; its batches are left out",
        {"steps_voided": 1},
        None,
    ),
    "what is left out": (
        SamplesLeftOut(t=BEGAN + 2, loader=0, spans=((0, 10), (20, 25))),
        "15 samples of loader 0 are left out on purpose",
        {"samples_left_out": 15},
        None,
    ),
    "resumed from the shadow": (
        ResumedFromShadow(t=BEGAN + 2, worker=3, step=4, steps_lost=0, sequence=0, equal=False),
        "resumed from the shadow (worker 3): 0 steps lost; its State is no longer equal",
        {"shadow_resumptions": 1},
        None,
    ),
    "a shadow that takes a seat": (
        WorkerJoined(
            t=BEGAN + 2, worker=3, generation=2, step=4, copy_s=0, copy_bytes=0, watched_steps=2
        ),
        "worker 3 joined after step 4: it had the State as a shadow, 0 bytes copied",
        {"workers_joined": 1, "join_seconds": 0},
        None,
    ),
    "a shadow that differs": (
        ShadowDiffers(t=BEGAN + 2, worker=3, step=4),
        "the shadow (worker 3) differs from the group after step 4; its State",
        {"shadows_differed": 1},
        None,
    ),
    "how far a shadow is from the group": (
        ShadowDiffers(t=BEGAN + 2, worker=3, step=4, followed=2, parts=("model", "optimizer")),
        "the shadow (worker 3) differs from the group after step 4 in model, optimizer",
        {"shadows_differed": 1},
        None,
    ),
    "processors of several kinds": (
        ProcessorsDiffer(t=BEGAN + 2, kinds={"torch 2, x": (0, 2), "torch 2, y": (1,)}),
        "different processors in the group: they round differently, and go on from one State now",
        {"processor_kinds": 2},
        None,
    ),
    "all go on from one State": (
        ReplicasLevelled(t=BEGAN + 2, step=4, worker=0),
        "different processors: all go on from the State of worker 0 after step 4",
        {"replicas_levelled": 1},
        None,
    ),
}


class Sums:
    """A sink that adds up, whatever the tags."""

    def __init__(self):
        self.values = {}

    def put(self, name, value, *_labels):
        self.values[name] = self.values.get(name, 0) + value

    def forget(self, name, *labels):
        pass


@pytest.mark.parametrize("what", DEEDS)
def test_it_is_told_in_all_four_places(tmp_path, what):
    event, said, counted, reported = DEEDS[what]
    written = journal.Journal(tmp_path / "journal.jsonl")
    for one in (GROUP, OPENED, LOST, event):
        written.append(one)
    written.close()
    told = list(journal.read(tmp_path / "journal.jsonl"))
    assert told[-1] == event

    assert line(told[-1])[0].startswith(said)

    without, sums = Sums(), Sums()
    for sink, events in ((without, told[:-1]), (sums, told)):
        readings = Readings(sink)
        for one in events:
            readings.read(one)
    assert {name: v for name, v in sums.values.items() if name not in without.values} == counted

    page = repr(training_page("r", tmp_path, tell(told), None, BEGAN + 3))
    before = repr(training_page("r", tmp_path, tell(told[:-1]), None, BEGAN + 3))
    assert (reported or said) in page
    assert (reported or said) not in before


def test_the_error_of_a_traceback_is_no_line_of_its_message():
    """Torch ends what CUDA says with advice, and notes come last."""
    frame = 'Traceback (most recent call last):\n  File "x.py", line 3, in f\n    g()\n    ^^^\n'
    told = "torch.AcceleratorError: CUDA error: an illegal memory access\nFor debugging, wait\n"
    assert last_error(f"{frame}{told}\n") == told.strip()
    first = f"{frame}KeyError: 'a'\n\nDuring handling of the above exception:\n\n"
    assert last_error(f"{first}{frame}ValueError") == "ValueError"
    assert last_error("Traceback\nKeyError: 'x'") == "KeyError: 'x'"
    assert last_error(" ") == ""


def test_what_was_raised_is_the_beginning_of_its_message():
    """Its last line may be advice, or a note."""
    text = 'Traceback (most recent call last):\n  File "x.py", line 3, in f\n    g()\n'
    text += "RuntimeError: CUDA error: out of memory\nFor debugging, wait\n"
    event = WorkerRaised(t=BEGAN, worker=1, rank=0, step=7, traceback=text)
    assert line(event)[0].endswith(": RuntimeError: CUDA error: out of memory")
