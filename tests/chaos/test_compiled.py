"""torch.compile and slices: nobody compiles anything again because somebody died or joined."""

import pytest

from benchmarks.exact import compiled


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("model", compiled.MODELS)
def test_nothing_is_compiled_again_over_ten_losses_and_joins(model, backend, exact):
    check(compiled.measure(model, 10, backend, exact=exact), 10)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_is_compiled_again_over_a_loss_and_a_join():
    check(compiled.measure("convnet", 1, "aot_eager"), 1)


def check(found, deaths):
    assert (found["losses"], found["joins"], found["workers"]) == (deaths, deaths, 3 + deaths)
    assert found["never_compiled"] == 0
    assert found["recompilations"] == 0
