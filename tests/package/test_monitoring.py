"""What deploy/ and docs/operations.md have for those who watch servers: the dashboard, the alerts, the table of
metrics and the scrape ask for what there is."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry, Gauge

from jaxshare import __version__
from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.http.metrics import HttpMetrics
from tests.package.pages import blocks
from tests.paths import ROOT

DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana.json").read_text())


def expressions() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def metric_labels() -> dict[str, set[str]]:
    """The labels of each metric of an engine and a server, by its name in Prometheus' text."""
    found = {}
    for registry in (Metrics().registry, HttpMetrics("tiny").registry):
        for metric, names in registry._collector_to_names.items():
            labels = {*metric._labelnames}
            found |= {name: labels | ({"le"} if "_bucket" in name else set()) for name in names}
    return found


def test_the_dashboard_asks_for_metrics_that_there_are():
    known = metric_labels()
    for expression in expressions():
        asked = set(re.findall(r"\bjaxshare_\w+", expression))
        assert asked and asked <= known.keys(), expression
        for name in asked:
            used = set(",".join(re.findall(r"by \(([^)]*)\)", expression)).split(","))
            assert {each.strip() for each in used} - {""} <= known[name], expression
        assert expression.count("(") == expression.count(")")
        assert expression.count('{instance=~"$instance"}') == len(
            re.findall(r"\bjaxshare_\w+", expression)
        )
        counters = [name for name in asked if name.endswith(("_total", "_bucket"))]
        assert (len(counters) > 0) == ("rate(" in expression), "a counter is seen by its rate alone"


def test_the_dashboard_s_legends_are_labels_and_its_panels_do_not_overlap():
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            grouped = re.search(r"by \((\w+)\)", target["expr"])
            known = {grouped[1]} if grouped else {"agent"}
            assert {*re.findall(r"{{(\w+)}}", target["legendFormat"])} <= known
        assert [target["refId"] for target in panel["targets"]] == [
            *"ABCDEF"[: len(panel["targets"])]
        ]
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in dashboard()["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len({*cells}) == len(cells) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])


def test_every_metric_that_is_worth_a_look_is_on_the_dashboard():
    """Those that are left out say in other words what is there."""
    shown = {name for each in expressions() for name in re.findall(r"\bjaxshare_\w+", each)}
    names = {name for name in metric_labels() if name.endswith(("_total", "_bucket"))}
    left_out = {"jaxshare_guessed_tokens_total", "jaxshare_http_seconds_bucket"}
    assert names - shown == left_out


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    return group["rules"]


def test_the_alerts_ask_for_metrics_that_there_are():
    known = metric_labels()
    assert len(rules()) == len({rule["alert"] for rule in rules()}) == 5
    for rule in rules():
        expression = rule["expr"]
        asked = set(re.findall(r"\bjaxshare_\w+", expression))
        assert asked <= known.keys() and (asked or rule["alert"] == "JaxshareDown"), expression
        for name, matched in re.findall(r"(jaxshare_\w+)\{(\w+)=~?\"", expression):
            assert matched in known[name], expression
        left_out = ",".join(re.findall(r"(?:without|ignoring) \(([^)]*)\)", expression)).split(",")
        assert {each.strip() for each in left_out} - {""} <= set().union(
            *(known[name] for name in asked)
        )
        for opened, closed in ("()", "{}", "[]"):
            assert expression.count(opened) == expression.count(closed)
        counters = re.findall(r"(rate\()?jaxshare_\w+(?:_total|_bucket)\b", expression)
        assert all(counters), "a counter is seen by its rate alone"
        assert re.fullmatch(r"\d+m", rule["for"]) and rule["labels"]["severity"]
        assert {*rule["annotations"]} == {"summary", "description"}


def test_the_scrape_has_the_job_of_the_alerts_and_a_key():
    (text,) = [block.text for block in blocks(PAGE) if block.language == "yaml"]
    given = yaml.safe_load(text)
    (job,) = given["scrape_configs"]
    (down,) = [rule for rule in rules() if rule["alert"] == "JaxshareDown"]
    assert f'job="{job["job_name"]}"' in down["expr"]
    assert [*job["authorization"]] == ["credentials_file"]
    assert [Path(path).name for path in given["rule_files"]] == ["alerts.yaml"]


def test_the_table_of_metrics_has_all_of_them_with_their_labels():
    """Counters with the ending that Prometheus reads them by."""
    registry = CollectorRegistry()
    Gauge("jaxshare_replicas_running", "as in replicas/front.py", registry=registry)
    found = {}
    for each in (Metrics().registry, HttpMetrics("tiny").registry, registry):
        for metric in each._collector_to_names:
            name = metric._name + ("_total" if metric._type == "counter" else "")
            found[name] = {*metric._labelnames}
    table = PAGE.partition("<!-- metrics -->")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(jaxshare_\w+)` \| ([^|]*)\| (.+) \|$", table, re.MULTILINE)
    assert {name: {*re.findall(r"`(\w+)`", labels)} for name, labels, _ in rows} == found
    assert len(rows) == len(found)


def test_a_build_is_told_by_its_version_and_model():
    labels = {"version": __version__, "model": "tiny"}
    assert HttpMetrics("tiny").registry.get_sample_value("jaxshare_build_info", labels) == 1


def test_the_table_of_metrics_has_the_values_of_their_labels():
    """Those that an engine sets by itself, from what it was made of."""
    metrics = Metrics()
    metrics.set_limits(rows=4, accelerator_bytes=3, host_bytes=2, logits_bytes=1)
    metrics.evicted(5, 2)
    metrics.drafted(1, 1)
    metrics.looked_up(0)
    metrics.looked_up(1)
    metrics.left_alone()
    metrics.followed(1)
    metrics.prefilled(1)
    metrics.sampled(1)
    for kind in ("guess", "decode"):
        metrics.ran(kind, 1)
    metrics.set_state(
        decoding=1,
        prefilling=1,
        waiting=1,
        accelerator_bytes=1,
        logits_bytes=1,
        session_bytes=1,
        host_bytes=1,
    )
    for metric in metrics.registry.collect():
        for sample in metric.samples:
            if sample.labels and "le" not in sample.labels and "_created" not in sample.name:
                (row,) = re.findall(rf"^\| `{sample.name}` .*$", PAGE, re.MULTILINE)
                assert all(f"`{value}`" in row for value in sample.labels.values()), sample
