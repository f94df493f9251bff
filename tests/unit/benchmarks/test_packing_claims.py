"""What the benchmark of packing claims, from trials as they end."""

from benchmarks.packing import candidates, claims
from elastix.search.trial import Suggestion, Trial, TrialState, config_key


def test_each_claim_counts_what_it_says():
    configs = candidates(6)
    assert len({config_key(config) for config in configs}) == 6
    assert configs == candidates(6)
    need = {config_key(c): n for c, n in zip(configs, [1, 1, 1, 1, 9, 9], strict=True)}
    done = {"losses": (1.0,), "state": TrialState.FINISHED}
    trials = [
        Trial(0, Suggestion(configs[0]), finished_s=0.0, **done),
        Trial(1, Suggestion(configs[1]), finished_s=900.0, starved=1, **done),
        Trial(2, Suggestion(configs[2]), finished_s=1800.0, state=TrialState.FAILED),
        Trial(3, Suggestion(configs[3]), state=TrialState.REFUSED),
        Trial(
            4,
            Suggestion(configs[4]),
            finished_s=60.0,
            state=TrialState.FAILED,
            traceback="MemoryError",
        ),
        Trial(5, Suggestion(configs[5]), state=TrialState.REFUSED),
    ]
    found = claims(trials, need, 5, (3, [0.0, 3600.0]))
    assert found == {
        "candidates": 6,
        "exceed_share": 1 - 4 / 6,
        "refused": 2,
        "starved_share": 2 / 4,
        "fits_refused_share": 1 / 4,
        "fits_lost": 1,
        "scored": 2,
        "tune_scored": 3,
        "scored_per_hour": 4.0,
        "tune_scored_per_hour": 3.0,
        "over_tune": 4 / 3,
    }
