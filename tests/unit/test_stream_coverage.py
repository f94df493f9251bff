from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from elastix.stream_coverage import Coverage, Stretches

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=30)


@given(spans)
def test_it_counts_as_sets_do(pairs):
    covered, used = Coverage(), Counter()
    for start, length in pairs:
        positions = set(range(start, start + length))
        again = covered.add(start, start + length)
        assert {p for a, b in again for p in range(a, b)} == positions & set(used)
        assert sum(b - a for a, b in again) == len(positions & set(used))
        used.update(positions)
        assert covered.count == len(used)
        assert covered.begin == min(used)
        assert covered.end == max(used) + 1
    missing = [p for start, stop in covered.gaps() for p in range(start, stop)]
    assert missing == [p for p in range(covered.end) if p not in used]


def test_neighbours_are_one_span():
    covered = Coverage()
    for start in (4, 0, 2):
        covered.add(start, start + 2)
    assert covered.gaps() == ()
    assert covered.count == covered.end == 6


@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.just("step"), st.sampled_from([1, 1, 1, 2, 0]), st.sampled_from([4, 4, 2])
            ),
            st.tuples(st.just("back"), st.integers(0, 10), st.just(0)),
        ),
        max_size=40,
    )
)
def test_stretches_are_the_steps_one_by_one(moves):
    stretches, steps = Stretches(), []
    step = end = 0
    for kind, number, size in moves:
        if kind == "back":
            step = max(0, step - number)
            stretches.go_back(step)
            steps = [kept for kept in steps if kept[0] <= step]
            end = steps[-1][1][1] if steps else 0
        else:
            step += number
            workers = 2 + (step > 20)
            stretches.add(step, (end, end + size), workers)
            steps.append((step, (end, end + size), workers))
            end += size
        assert stretches.end == end
        assert stretches.last_workers == (steps[-1][2] if steps else 0)
        assert stretches.most_workers == max((w for *_, w in steps), default=0)
        wanted = [p for _, span, _ in steps for p in range(*span)]
        assert [p for span in stretches.spans for p in range(*span)] == wanted


def test_steps_at_equal_distances_are_one_stretch():
    stretches = Stretches()
    for number in range(1000):
        stretches.add(1 + 2 * number, (8 * number, 8 * number + 8), 4)
    assert len(stretches.spans) == 1
