"""Who may be taken for a worker that hangs: on a busy machine others may be silent as well."""

from elastix.train.control.failure_detector import FailureDetector


def only(monkeypatch, *workers):
    """Of those that the failure detector of this process takes for hung these alone count."""

    def of_them(judge):
        return lambda *args: [worker for worker in judge(*args) if worker in workers]

    for judge in (FailureDetector.silent, FailureDetector.holding_up):
        monkeypatch.setattr(FailureDetector, judge.__name__, of_them(judge))
