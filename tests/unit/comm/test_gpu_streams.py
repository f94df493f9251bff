"""Which stream of a GPU waits for which, on stand-ins for streams."""

import pytest
import torch

from elastix.comm.gradients.gpu_streams import GpuStreams

GPU = torch.device("cuda", 0)
OTHER = torch.device("cuda", 1)


class Stream:
    def __init__(self, device=GPU):
        self.device = device
        self.waits_for = []

    def wait_stream(self, other):
        self.waits_for.append(other)


@pytest.fixture
def main(monkeypatch):
    """The current streams, by device."""
    current = {device: Stream(device) for device in (GPU, OTHER)}
    monkeypatch.setattr(torch.cuda, "current_stream", current.__getitem__)
    return current


def streams(*seen):
    made = GpuStreams()
    made._seen = set(seen)
    return made


def test_the_current_stream_comes_after_those_of_its_device_that_have_worked(main):
    side, elsewhere = Stream(), Stream(OTHER)
    streams(main[GPU], side, elsewhere).join(GPU)
    assert main[GPU].waits_for == [side]
    assert main[OTHER].waits_for == side.waits_for == []


def test_they_come_after_the_current_stream_when_they_part(main):
    side, elsewhere = Stream(), Stream(OTHER)
    streams(main[GPU], side, elsewhere).wait_for_current()
    assert side.waits_for == [main[GPU]]
    assert elsewhere.waits_for == [main[OTHER]]
    assert main[GPU].waits_for == main[OTHER].waits_for == []


def test_a_bucket_that_lies_on_the_processor_waits_for_no_stream(main):
    """As that of the counts does, if all gradients are of 16 bits."""
    streams(main[GPU], Stream()).join(torch.device("cpu"))
    assert main[GPU].waits_for == []


def test_on_a_processor_nobody_is_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", None)
    none = streams()
    none.note(torch.zeros(1))
    none.join(torch.device("cpu"))
    none.wait_for_current()
