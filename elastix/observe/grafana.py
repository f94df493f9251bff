"""The Grafana dashboard of the series in metric_series, as a file beside Ray's own dashboards.

Ray writes its dashboards to a directory of the session, and a provisioning file that makes Grafana
watch that directory; a file put there appears in the folder "Ray" within seconds.
"""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastix.errors import ConfigError
from elastix.observe.metric_series import SERIES

FILE = "elastix_grafana_dashboard.json"
ALERTS = "elastix_alerts.yml"

_WIDTH, _HEIGHT, _COLUMNS = 12, 8, 2
_SUM = {s.name: s for s in SERIES}

# Title, unit, and (series, how it is asked for, legend) of each curve.
_PANELS: tuple[tuple[str, str, tuple[tuple[str, str, str], ...]], ...] = (
    ("Workers", "short", (("world_size", "now", "{{run}}"),)),
    ("Goodput", "percentunit", (("goodput_ratio", "now", "{{run}}"),)),
    (
        "Processor cores of each worker",
        "short",
        (("worker_cpu_cores", "now", "worker {{worker}} on {{node}}"),),
    ),
    (
        "Memory of each worker",
        "bytes",
        (
            ("worker_memory_bytes", "now", "worker {{worker}} on {{node}}"),
            ("worker_gpu_memory_bytes", "now", "GPU of worker {{worker}}"),
        ),
    ),
    ("GPU of each worker", "percentunit", (("worker_gpu_ratio", "now", "worker {{worker}}"),)),
    (
        "Where the time goes",
        "percentunit",
        (("worker_time_ratio", "now", "worker {{worker}}: {{part}}"),),
    ),
    (
        "Time for a step over the others', of slow workers",
        "short",
        (("worker_slowness_ratio", "now", "worker {{worker}}"),),
    ),
    (
        "Diverged workers, void steps, samples left out",
        "short",
        (
            ("workers_diverged", "count", "diverged: worker {{worker}}"),
            ("steps_voided", "count", "void steps"),
            ("samples_left_out", "count", "samples left out"),
            ("shadows_differed", "count", "shadows that differ"),
            ("replicas_levelled", "count", "levelled: processors differ"),
            ("processor_kinds", "now", "kinds of processors"),
        ),
    ),
    ("Generation", "short", (("generation", "now", "{{run}}"),)),
    ("Steps per second", "ops", (("steps", "rate", "{{run}}"),)),
    ("Seconds of a step", "s", (("step_seconds", "p50", "median"), ("step_seconds", "p95", "p95"))),
    ("Samples per second", "short", (("samples_committed", "rate", "{{run}}"),)),
    (
        "Samples owed and repeated (the latter must stay 0)",
        "short",
        (("samples_owed", "now", "owed"), ("samples_repeated", "now", "repeated")),
    ),
    (
        "Slices of lost workers that others computed",
        "short",
        (("slices_handed_over", "count", "{{run}}"),),
    ),
    (
        "Workers lost, left and joined",
        "short",
        (
            ("workers_lost", "count", "lost: {{cause}}"),
            ("workers_not_started", "count", "not started: {{cause}}"),
            ("workers_left", "count", "left: {{cause}}"),
            ("workers_joined", "count", "joined"),
            ("shadow_resumptions", "count", "gone on from a shadow"),
        ),
    ),
    (
        "Seconds of a recovery, of a join",
        "s",
        (("recovery_seconds", "p95", "recovery, p95"), ("join_seconds", "p95", "join, p95")),
    ),
    (
        "Seconds of a checkpoint",
        "s",
        (
            ("checkpoint_write_seconds", "p95", "to write, p95"),
            ("checkpoint_stall_seconds", "p95", "training held up, p95"),
        ),
    ),
    ("Checkpoints that failed", "short", (("checkpoints_failed", "count", "{{run}}"),)),
    (
        "Bytes stored",
        "bytes",
        (
            ("store_logical_bytes", "count", "logical"),
            ("store_physical_bytes", "count", "physical"),
        ),
    ),
    (
        "Trials",
        "short",
        (
            ("trials", "now", "{{state}}"),
            ("trials_lost", "count", "lost their worker"),
            ("trials_starved", "count", "starved"),
        ),
    ),
    ("Peak memory of the last trial", "bytes", (("trial_peak_bytes", "now", "{{run}}"),)),
    ("Best objective", "short", (("best_objective", "now", "{{metric}}"),)),
    ("Inherited share of the last trial", "percentunit", (("inherited_ratio", "now", "{{run}}"),)),
    ("Reported", "short", (("reported", "now", "{{metric}}"),)),
)


def _more(series: str, window: str) -> str:
    """By how much the series of a run have grown, those that are new since then included.

    Each lost worker has a series of its own, which begins at 1. `increase` sees no growth in it.
    """
    now, before = f"sum by (run) ({series})", f"sum by (run) ({series} offset {window})"
    return f"({now} - ({before} or 0 * {now}))"


_STALLS = "ray_elastix_checkpoint_stall_seconds_bucket"
_LONG_STALLS = (
    _more(f'{_STALLS}{{le="+Inf"}}', "15m") + " - " + _more(f'{_STALLS}{{le=~"1|1.0"}}', "15m")
)
_RULES: tuple[tuple[str, str, str, str, str], ...] = (
    (
        "ElastixWorkersLost",
        _more("ray_elastix_workers_lost_total", "30m") + " >= 2",
        "0m",
        "warning",
        "{{ $labels.run }} has lost workers twice within half an hour.",
    ),
    (
        "ElastixGoodputLow",
        "max by (run) (ray_elastix_goodput_ratio) < 0.9",
        "5m",
        "warning",
        "{{ $labels.run }} has a goodput of {{ $value | humanizePercentage }}.",
    ),
    (
        "ElastixSamplesRepeated",
        "max by (run) (ray_elastix_samples_repeated) > 0",
        "0m",
        "critical",
        "{{ $labels.run }} has used {{ $value }} samples twice in an epoch.",
    ),
    (
        "ElastixCheckpointStalls",
        _LONG_STALLS + " > 0",
        "0m",
        "warning",
        "{{ $value }} States have held up the training of {{ $labels.run }} for over a second.",
    ),
    (
        "ElastixReplicasDiverged",
        _more("ray_elastix_workers_diverged_total", "30m") + " > 0",
        "0m",
        "critical",
        "A worker of {{ $labels.run }} held another State than most.",
    ),
)
"""Name, condition, for how long, severity, what is said: Prometheus' alerting rules."""


def alerts() -> dict[str, Any]:
    """The alerting rules as Prometheus reads them; JSON is YAML, too."""
    rules = [
        {
            "alert": name,
            "expr": condition,
            "for": lasting,
            "labels": {"severity": severity},
            "annotations": {"summary": said},
        }
        for name, condition, lasting, severity, said in _RULES
    ]
    return {"groups": [{"name": "elastix", "rules": rules}]}


def write_alerts(directory: Path) -> Path:
    """Write the alerting rules; Prometheus' `rule_files` has to name the file."""
    return _written(directory / ALERTS, alerts())


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana's JSON model."""
    return {
        "title": "elastix",
        "uid": "elastix",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_DATASOURCE, _RUN]},
        "panels": [_panel(number, *panel) for number, panel in enumerate(_PANELS)],
    }


def write_dashboard(directory: Path) -> Path:
    """Write it as a file; whoever reads sees the old one or the new one.

    Raises:
        ConfigError: there is no such directory, or it may not be written to.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"there is no directory {directory}. No dashboard was written. Start Ray with its "
            "dashboard first (ray start --head), or name the directory that Grafana provisions "
            "from with --out."
        )
    return _written(directory / FILE, dashboard())


def _written(path: Path, content: Mapping[str, Any]) -> Path:
    draft = path.with_suffix(".draft")
    try:
        draft.write_text(json.dumps(content, indent=1))
        draft.replace(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}. Name another directory with --out."
        ) from error
    return path


def provisioned_directory() -> Path:
    """Where the Ray that was started last on this machine keeps its Grafana dashboards.

    Raises:
        ConfigError: that is another user's: it is not ours to change.
    """
    found = _latest_session()
    if found.is_dir() and found.stat().st_uid != os.geteuid():
        raise ConfigError(
            f"the Ray that was started last on this machine is another user's: {found} is not "
            "yours. No dashboard was written. Start a Ray of your own, or name a directory with "
            "--out."
        )
    return found


def _latest_session() -> Path:
    chosen = os.environ.get("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR")
    if chosen:
        return Path(chosen)
    root = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()))
    metrics = os.environ.get("RAY_METRICS_OUTPUT_ROOT")
    session = Path(metrics) if metrics else root / "ray" / "session_latest" / "metrics"
    return session / "grafana" / "dashboards"


_DATASOURCE: dict[str, Any] = {
    "name": "datasource",
    "type": "datasource",
    "query": "prometheus",
    "hide": 2,
    "refresh": 1,
}
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_RUN: dict[str, Any] = {
    "name": "run",
    "label": "Run",
    "type": "query",
    "datasource": _SOURCE,
    "query": {
        "query": 'label_values({__name__=~"ray_elastix_(generation|trials)"}, run)',
        "refId": "run",
    },
    "refresh": 2,
    "multi": True,
    "includeAll": True,
    "allValue": ".*",
    "current": {"text": "All", "value": "$__all"},
}


def _panel(
    number: int, title: str, unit: str, curves: Sequence[tuple[str, str, str]]
) -> dict[str, Any]:
    row, column = divmod(number, _COLUMNS)
    helps = dict.fromkeys(_SUM[name].help for name, _, _ in curves)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "description": " ".join(helps),
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": _SOURCE,
                "expr": _expression(name, how, legend),
                "legendFormat": legend,
            }
            for place, (name, how, legend) in enumerate(curves)
        ],
    }


def _expression(name: str, how: str, legend: str) -> str:
    """A query in Prometheus' language over the series as Ray exports it, by the legend's tags."""
    series = _SUM[name]
    by = ", ".join(("run", *(tag for tag in series.tags if tag in legend)))
    metric, of = f"ray_elastix_{name}", '{run=~"$run"}'
    if how == "now":
        return f"max by ({by}) ({metric}{of})"
    if how == "count":
        return f"sum by ({by}) ({metric}_total{of})"
    if how == "rate":
        return f"sum by ({by}) (rate({metric}_total{of}[1m]))"
    quantile = int(how.removeprefix("p")) / 100
    return f"histogram_quantile({quantile}, sum by (le, {by}) (rate({metric}_bucket{of}[5m])))"
