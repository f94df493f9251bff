from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from elastix.stream_coverage import Coverage

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
