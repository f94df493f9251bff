"""Settings of a run of one worker in this process, for run_alone."""

from elastix.config import CheckpointConfig
from elastix.train.replica.link import Settings


def solo(directory, **options):
    terms = {"run": "solo", "min_workers": 1, "alone": True, "seed": 3}
    known = {"directory": directory, "checkpoint": CheckpointConfig()}
    return Settings(**{**terms, **known, **options})
