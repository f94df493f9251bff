"""The page of a scaling benchmark."""

from elastix.bench.measures import Death, Rate, ScalingMeasured, SizeMeasured, Timing
from elastix.report.page import render
from elastix.report.scaling import COLUMNS, cells, scaling_page


def rate(samples_per_s):
    return Rate(samples_per_s, samples_per_s * 0.9, samples_per_s * 1.1, 10, 1.0, 8.0)


DEATHS = (Death(1, 5.0, 0.123), Death(2, 9.0, None))


def measured(ddp=True, deaths=DEATHS):
    sizes = [
        SizeMeasured(workers=1, elastix=rate(100.0), ddp=rate(120.0) if ddp else None),
        SizeMeasured(
            workers=4,
            elastix=rate(300.0),
            ddp=rate(310.0) if ddp else None,
            deaths=deaths,
            goodput=0.87 if deaths else None,
        ),
    ]
    return ScalingMeasured(
        script="<b>evil.py",
        function="train",
        cores=2,
        cpus=1.0,
        timing=Timing(1.0, 1.0, len(deaths), 15.0),
        sizes=sizes,
        versions={"torch": "2"},
    )


def test_the_table_has_what_was_measured_under_its_columns():
    found = measured()
    row = dict(zip(COLUMNS, cells(found, found.sizes[1]), strict=True))
    assert {name: cell.text for name, cell in row.items()} == {
        "workers": "4*",
        "samples/s": "300",
        "efficiency": "75%",
        "DDP samples/s": "310",
        "DDP efficiency": "65%",
        "of DDP": "97%",
        "stall": "0.12 s",
        "goodput": "87%",
    }


def test_what_was_not_measured_is_a_dash():
    found = measured(ddp=False, deaths=())
    row = [cell.text for cell in cells(found, found.sizes[0])]
    assert row == ["1", "100", "100%", "-", "-", "-", "-", "-"]


def test_the_page_says_all_of_it_and_runs_nothing_of_a_user():
    text = render(scaling_page(measured(), "elastix bench evil.py", "now"))
    assert "<b>evil" not in text
    for part in (
        "&lt;b&gt;evil.py",
        "none came",
        "0.123 s",
        "says nothing about scaling",
        "87%",
        "median of 1",
    ):
        assert part in text
    render(scaling_page(measured(ddp=False, deaths=()), "elastix bench evil.py", "now"))
