"""A slow worker is worth a line if it stays slow, and not over and over."""

from elastix.train.control.slow_workers import SlowNews


def test_once_is_chance_and_twice_in_a_row_is_news():
    news = SlowNews()
    assert news.worth_telling({1: 2.0}, 20, 0.0) == {}
    assert news.worth_telling({1: 2.0}, 30, 1.0) == {}
    assert news.worth_telling({1: 2.0}, 40, 2.0) == {1: 2.0}


def test_who_was_quick_in_between_begins_anew():
    news = SlowNews()
    news.worth_telling({1: 2.0}, 20, 0.0)
    news.worth_telling({}, 30, 1.0)
    assert news.worth_telling({1: 2.0}, 40, 2.0) == {}


def test_another_line_comes_after_a_minute_and_if_it_has_become_worse():
    news = SlowNews()
    news.worth_telling({1: 2.0}, 0, 0.0)
    assert news.worth_telling({1: 2.0}, 20, 1.0) == {1: 2.0}
    assert news.worth_telling({1: 4.0}, 40, 30.0) == {}
    assert news.worth_telling({1: 2.1}, 60, 90.0) == {}
    assert news.worth_telling({1: 4.0}, 80, 91.0) == {1: 4.0}
