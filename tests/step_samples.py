"""Which samples the steps of a run had, from its journal."""

from elastix.events import Resumed, StepCommitted


def samples_of(step):
    """The positions that a step had, whoever computed them."""
    spans = [span for batch in step.batches for share in batch.shares.values() for span in share]
    return sorted(position for start, stop in spans for position in range(start, stop))


def steps_of(events):
    """By number, the samples of each step that stands."""
    steps = {}
    for event in events:
        if isinstance(event, Resumed):
            steps = {number: had for number, had in steps.items() if number <= event.step}
        elif isinstance(event, StepCommitted):
            steps[event.step] = samples_of(event)
    return steps
