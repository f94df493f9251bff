"""When the outer step is due: by what all workers do alike."""

from elastix.train.replica.inner_steps import InnerSteps


def draws(steps, loader, times=1):
    """Asks and draws; how often the outer step came first."""
    found = 0
    for _ in range(times):
        if steps.asked(loader):
            found += 1
            steps.over()
        steps.drawn(loader)
    return found


def test_it_is_due_when_so_many_batches_are_used():
    steps = InnerSteps(3)
    assert draws(steps, 0, 3) == 0
    assert draws(steps, 0) == 1
    assert draws(steps, 0, 2) == 0
    assert draws(steps, 0) == 1


def test_to_be_asked_twice_for_one_batch_counts_once():
    steps = InnerSteps(2)
    draws(steps, 0)
    assert not steps.asked(0)
    assert not steps.asked(0)


def test_passes_that_are_added_up_are_one_step():
    steps = InnerSteps(2)
    for number in range(8):
        assert not steps.asked(0) or number == 4
        if number == 4:
            steps.over()
        steps.drawn(0)
        if number % 2 == 0:
            with steps.adding():
                pass


def test_within_a_step_that_is_added_up_nothing_is_due():
    steps = InnerSteps(1)
    with steps.adding():
        assert draws(steps, 0, 4) == 0
        assert not steps.ends(0, for_good=False)
    steps.drawn(0)
    assert steps.asked(0)


def test_whether_no_batch_at_all_made_a_step():
    steps = InnerSteps(2)
    assert not steps.none
    for _ in range(3):
        draws(steps, 0)
        with steps.adding():
            pass
    assert steps.none
    draws(steps, 0)
    assert not steps.none  # the last one of a step that is not counted yet
    draws(steps, 0)
    with steps.adding():
        pass
    assert not steps.none


def test_batches_of_a_second_loader_belong_to_the_step_of_the_first():
    steps = InnerSteps(2)
    for _ in range(2):
        assert draws(steps, 0) == draws(steps, 1) == 0
    assert not steps.ends(1, for_good=False)  # the first one's batch may be in hand
    assert steps.ends(0, for_good=False)
    assert draws(steps, 0) == 1


def test_another_loader_leads_when_the_first_is_not_used_any_more():
    steps = InnerSteps(3)
    draws(steps, 0)
    assert draws(steps, 1, 3) == 0
    assert draws(steps, 1) == 1
    assert steps.ends(1, for_good=False)


def test_the_last_epoch_of_any_loader_ends_with_the_outer_step():
    steps = InnerSteps(3)
    draws(steps, 0)
    draws(steps, 1)
    assert not steps.ends(1, for_good=False)
    assert steps.ends(1, for_good=True)
    with steps.adding():
        assert not steps.ends(1, for_good=True)
