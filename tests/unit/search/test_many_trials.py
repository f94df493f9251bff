"""What is asked of one trial after the other does not walk over all of them each time."""

import pytest

from elastix.search.results import Results
from elastix.search.trial import MIXED, Objectives, Suggestion, Trial


class Counted(tuple):
    """Trials, and how often they were walked over."""

    walks = 0

    def __iter__(self):
        self.walks += 1
        return super().__iter__()


@pytest.mark.parametrize("count", [10, 50])
def test_schedules_and_seeds_of_all_trials_walk_over_them_once(count):
    trials = Counted(
        Trial(
            number,
            Suggestion({"x": 0.5}, parent_number=number - 1 if number else None, in_place=number),
            inherited={"ref": "0" * 64, "lineage_epochs": float(number)} if number else None,
            epochs=1.0,
        )
        for number in range(count)
    )
    facts = {"name": "many", "seed": 7, "seeds": MIXED}
    results = Results(Objectives.of("m"), facts, trials, (), "store")
    for number in range(count):
        assert len(results.schedule(number)) == number + 1
        assert results.seed_of(number) >= 0
    assert trials.walks == 1
