"""What a campaign's driver holds for each trial: with 100,000 of them it is most of its memory."""

import gc
import tracemalloc

from benchmarks import long_campaign

KIB_A_TRIAL = 1.9


class Watched(long_campaign.Instant):
    """Notes how much memory is in use when so many trials were submitted."""

    def __init__(self):
        super().__init__()
        self.held = {}

    def poll(self, timeout_s):
        gc.collect()
        self.held[self.submitted] = tracemalloc.get_traced_memory()[0]
        return super().poll(timeout_s)


def test_a_trial_that_is_over_takes_no_more_than_it_must(tmp_path):
    executor = Watched()
    made = long_campaign.campaign(tmp_path, 900, executor)
    tracemalloc.start()
    try:
        made.run()
    finally:
        tracemalloc.stop()
    few, many = 300, 900
    assert (executor.held[many] - executor.held[few]) / (many - few) < KIB_A_TRIAL * 1024
