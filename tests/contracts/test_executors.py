"""The contract of an Executor: in this process, and on workers of a real Ray."""

import pytest

from elastix.config import ScalingConfig
from elastix.search.executors.serial import Local
from elastix.testing.executor_contract import ExecutorContract

pytestmark = pytest.mark.timeout(600)


class TestLocal(ExecutorContract):
    can_halt = False

    def make(self):
        return Local()

    def test_a_function_that_cannot_be_sent_is_refused(self):
        """Nothing is sent anywhere."""


@pytest.mark.usefixtures("cluster")
class TestTune(ExecutorContract):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path):
        self.storage = str(tmp_path / "tune")

    def make(self):
        from elastix.search.executors.tune_trials import Tune

        scaling = ScalingConfig(cpus_per_worker=0.5)
        return Tune(parallel=2, scaling=scaling, storage_path=self.storage)


@pytest.mark.usefixtures("cluster")
class TestPool(ExecutorContract):
    def make(self):
        from elastix.search.executors.pool import Pool

        return Pool(parallel=2, scaling=ScalingConfig(cpus_per_worker=0.5))
