"""Generator of the Grafana dashboard: a chart for each line of the table of exported metrics.

``python cluster/dashboard.py`` writes cluster/grafana/dashboards/ringray.json.
"""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.builders import common, prometheus, timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableOption, VariableRefresh

from ringray.lab.trial.exported import EXPORTED, SWEEP_LABELS, TRIALS, ExportedMetric

PLACE = Path(__file__).parent / "grafana" / "dashboards" / "ringray.json"
PROMETHEUS = DataSourceRef(type_val="prometheus", uid="${datasource}")
CHOSEN = ",".join(f'{label}=~"${label}"' for label in SWEEP_LABELS)
UNITS = {
    "seconds": units.Seconds,
    "bytes": units.BytesIEC,
    "FLOP/s": units.FlopsPerSecond,
    "ratio": units.PercentUnit,
}


def expression(metric: ExportedMetric) -> str:
    """Returns what the chart of a metric shows, in PromQL. Labels of Ray, such as the driver's
    process, are left out: drivers of one sweep follow each other."""
    labels = ", ".join(metric.labels)
    shown = f"max by ({labels}) ({metric.series}{{{CHOSEN}}})"
    if metric.over:
        (over,) = (one for one in EXPORTED if one.name == metric.over)
        shown += f" / {expression(over)}"
    return shown


def panel(metric: ExportedMetric) -> timeseries.Panel:
    """Returns the chart of a metric."""
    title = metric.help.partition(",")[0].rstrip(".")
    title, unit = (f"{title}, share of it", "ratio") if metric.over else (title, metric.unit)
    query = prometheus.Dataquery().expr(expression(metric)).ref_id("A").datasource(PROMETHEUS)
    query.legend_format(" ".join(f"{{{{{label}}}}}" for label in metric.labels))
    made = timeseries.Panel().title(title).description(metric.help)
    made.datasource(PROMETHEUS).with_target(query).unit(UNITS.get(unit, units.Short)).min(0)
    made.fill_opacity(10).span(8).height(8)
    if metric is TRIALS:
        made.fill_opacity(30).stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    return made


def dashboard() -> Dashboard:
    """Returns the dashboard of all sweeps of a cluster."""
    made = Dashboard("ringray").uid("ringray-sweeps").tags(["ringray", "ray"])
    made.description("Sweeps of ringray, by the metrics that their drivers push into Ray.")
    made.time("now-1h", "now").refresh("10s").timezone("browser")
    made.with_variable(DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    for label in SWEEP_LABELS:
        choice = QueryVariable(label).query(f"label_values({TRIALS.series}, {label})")
        choice.datasource(PROMETHEUS).refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        choice.multi(True).include_all(True).all_value(".*")
        made.with_variable(choice.current(VariableOption(True, ["All"], ["$__all"])))
    for number, metric in enumerate(EXPORTED, 1):
        made.with_panel(panel(metric).id(number))
    return made


def text() -> str:
    """Returns the file's contents."""
    return json.dumps(dashboard().build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    PLACE.write_text(text(), encoding="utf-8")
