#!/usr/bin/env python3
"""Writes the Grafana dashboards: make_grafana.py [FOLDER]. A test holds what lies in grafana/ to what this writes.

A panel is a row here: title, unit, width of 24, and its queries with their legends. `$node` is the scraped instance and
`$job` the label that terraced gives.
"""

import json
import sys
from pathlib import Path

NODE = 'instance=~"$node"'
JOB = NODE + ',job=~"$job"'
KIND = {"timeseries": {"custom": {"fillOpacity": 0, "lineWidth": 2, "showPoints": "never"}},
        "stack": {"custom": {"fillOpacity": 40, "lineWidth": 1, "showPoints": "never", "stacking": {"mode": "normal"}}},
        "stat": {}, "table": {}}

# What a stack is held against is drawn over it.
LIMITS = {"matcher": {"id": "byRegexp", "options": "/^(lease|mapped|pinned)$/"}, "properties": [
    {"id": "custom.stacking", "value": {"mode": "none"}}, {"id": "custom.fillOpacity", "value": 0},
    {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 6]}}, {"id": "custom.lineWidth", "value": 2}]}


def panel(title, unit, queries, kind="timeseries", width=12, height=8, text=""):
    return {"title": title, "unit": unit, "queries": queries, "kind": kind, "width": width, "height": height, "text": text}


def selected(label, by):
    """The panels that look the same for one job and for all: `label` selects, `by` is what the legend names."""
    legend = "{{" + by + "}}"
    return [
        panel("HBM by pool", "bytes", [(f"sum by (pool) (terrace_step_tier_bytes{{{label},tier=\"hbm\"}})", "{{pool}}"),
                                       (f"sum(terrace_tier_mapped_bytes{{{label},tier=\"hbm\"}})", "mapped"),
                                       (f"sum(terrace_lease_bytes{{{label},tier=\"hbm\"}})", "lease")], "stack"),
        panel("Pinned DDR by pool", "bytes", [(f"sum by (pool) (terrace_step_tier_bytes{{{label},tier=\"ddr\"}})", "{{pool}}"),
                                              (f"sum(terrace_tier_mapped_bytes{{{label},tier=\"ddr\"}})", "pinned")], "stack"),
        panel("Link traffic against its peak", "Bps", [
            (f"sum by (direction) (rate(terrace_transfer_bytes_total{{{label},direction=~\"d2h|h2d\"}}[$__rate_interval]))", "{{direction}}"),
            (f"sum by (direction) (terrace_link_peak_bytes_per_second{{{label},direction=~\"d2h|h2d\"}})", "{{direction}} peak")]),
        panel("Traffic by reason", "Bps", [
            (f"sum by (reason) (rate(terrace_transfer_bytes_total{{{label}}}[$__rate_interval]))", "{{reason}}")], "stack"),
        panel("Fetches of cached outputs", "ops", [
            (f"sum by (outcome) (rate(terrace_cache_fetches_total{{{label}}}[$__rate_interval]))", "{{outcome}}")], "stack"),
        panel("Stalls, share of the time of a process", "percentunit", [
            (f"sum by (reason) (rate(terrace_stall_seconds_total{{{label}}}[$__rate_interval])) / scalar(sum(terrace_job_processes{{{label}}}) > 0)",
             "{{reason}}")], "stack"),
        panel("Step time", "s", [
            (f"sum by ({by}) (rate(terrace_step_seconds_total{{{label}}}[$__rate_interval])) / "
             f"sum by ({by}) (rate(terrace_steps_total{{{label}}}[$__rate_interval]))", legend)]),
    ]


OVERVIEW = [
    panel("Processes", "none", [("sum(terrace_clients{%s})" % NODE, "")], "stat", 4, 4),
    panel("HBM leased", "percentunit", [("instance:terrace_hbm_leased:ratio{%s}" % NODE, "")], "stat", 5, 4,
          "Of what terraced may lease."),
    panel("DDR leased", "percentunit", [("instance:terrace_ddr_leased:ratio{%s}" % NODE, "")], "stat", 5, 4),
    panel("Found in cache", "percentunit", [("sum(job:terrace_fetches_found:rate5m{%s}) / sum(job:terrace_fetches:rate5m{%s})" % (NODE, NODE), "")],
          "stat", 5, 4, "Of the site outputs that recomputation asked for."),
    panel("Stalled", "percentunit", [("max(job:terrace_stalled:ratio5m{%s})" % NODE, "")], "stat", 5, 4, "The job that waits most."),
    *selected(NODE, "job"),
    panel("Processes by job", "none", [("sum by (job) (terrace_job_processes{%s})" % NODE, "{{job}}")], "stack"),
]
JOBS = [
    *selected(JOB, "job"),
    panel("Step time against the plan", "s", [
        ("sum by (estimate) (rate(terrace_planned_step_seconds_total{%s}[$__rate_interval])) / scalar(sum(rate(terrace_planned_steps_total{%s}[$__rate_interval])))"
         % (JOB, JOB), "{{estimate}}")], text="Of the steps that ran by a plan."),
    panel("Peaks against the plan", "bytes", [("max by (tier, estimate) (terrace_planned_peak_bytes{%s,tier=~\"hbm|ddr\"})" % JOB, "{{tier}} {{estimate}}")]),
    panel("Use of the link's windows", "percentunit", [
        ("sum by (direction) (rate(terrace_link_window_bytes_total{%s}[$__rate_interval])) / "
         "(sum by (direction) (rate(terrace_link_window_capacity_bytes_total{%s}[$__rate_interval])) > 0)" % (JOB, JOB), "{{direction}}")]),
    panel("Time of links leased", "percentunit", [("sum by (device, direction) (terrace_link_lease_ratio{%s})" % JOB, "{{device}} {{direction}}")],
          text="Of each device that the job shares with others; the whole where it is alone."),
    panel("Background copies held back", "percentunit", [
        ("sum by (direction, reason) (rate(terrace_link_held_back_seconds_total{%s,direction=~\"d2h|h2d\"}[$__rate_interval]))" % JOB, "{{direction}} {{reason}}")],
          text="By the job's lease of link time, or for a collective; summed over its processes."),
    panel("Fetches by kind of site", "ops", [("sum by (kind, outcome) (rate(terrace_cache_fetches_total{%s}[$__rate_interval]))" % JOB, "{{kind}} {{outcome}}")], "stack"),
    panel("Fetches by group of sites", "ops", [("sum by (group, outcome) (rate(terrace_site_group_fetches_total{%s}[$__rate_interval]))" % JOB, "{{group}} {{outcome}}")], "stack"),
    panel("Kept outputs and activations", "bytes", [("sum by (tier, content, state) (terrace_residency_bytes{%s,tier=~\"hbm|ddr\"})" % JOB, "{{content}} {{tier}} {{state}}")], "stack"),
    panel("Other ways than planned", "ops", [("sum by (reason) (rate(terrace_fallbacks_total{%s}[$__rate_interval]))" % JOB, "{{reason}}")], "stack"),
    panel("Evictions", "ops", [("sum(rate(terrace_cache_evictions_total{%s}[$__rate_interval]))" % JOB, "evictions")]),
    panel("Experts outside of HBM, by whose word they came", "ops", [("sum by (load) (rate(terrace_expert_uses_total{%s}[$__rate_interval]))" % JOB, "{{load}}")]),
    panel("Experts and optimizer state outside of HBM", "ops", [
        ("sum by (reason, outcome) (rate(terrace_streamed_uses_total{%s,reason=~\"expert|optimizer\"}[$__rate_interval]))" % JOB, "{{reason}} {{outcome}}")]),
    panel("Experts by tier", "bytes", [("sum by (tier) (terrace_tier_bytes{%s,pool=\"expert\"})" % JOB, "{{tier}}")], "stack"),
    panel("Exchange rings", "none", [("sum by (state) (terrace_ring_slots{%s})" % JOB, "slots {{state}}"),
                                     ("sum(rate(terrace_ring_exchanges_total{%s}[$__rate_interval]))" % JOB, "exchanges a second"),
                                     ("sum(rate(terrace_announced_collectives_total{%s}[$__rate_interval]))" % JOB, "announced a second")]),
    panel("Passed through and worked around", "ops", [
        ("sum by (call_group) (rate(terrace_passthrough_calls_total{%s}[$__rate_interval]))" % JOB, "passed through: {{call_group}}"),
        ("sum by (point) (rate(terrace_faults_total{%s}[$__rate_interval]))" % JOB, "fault: {{point}}")]),
    panel("Kernel launches", "ops", [("sum(rate(terrace_launches_total{%s}[$__rate_interval]))" % JOB, "read"),
                                     ("sum(rate(terrace_opaque_launches_total{%s}[$__rate_interval]))" % JOB, "not readable"),
                                     ("sum(rate(terrace_launch_blocks_total{%s}[$__rate_interval]))" % JOB, "blocks named")]),
    panel("Blocks that stay in HBM, seen by others", "bytes", [("sum by (reason) (terrace_fixed_bytes{%s})" % JOB, "{{reason}}")], "stack"),
    panel("Blocks used over the link", "ops", [("sum(rate(terrace_uses_in_ddr_total{%s}[$__rate_interval]))" % JOB, "uses in DDR")],
          text="Of programs under terrace run, where HBM had no room for them."),
    panel("Allocations refused", "Bps", [("sum(rate(terrace_refused_bytes_total{%s}[$__rate_interval]))" % JOB, "bytes"),
                                         ("sum(rate(terrace_refused_allocations_total{%s}[$__rate_interval]))" % JOB, "allocations")]),
    panel("Error of 8-bit spills", "none", [("max(terrace_spill_error_mean_ppm{%s})" % JOB, "mean"),
                                            ("max(terrace_spill_error_largest_ppm{%s})" % JOB, "largest")],
          text="In millionths; 0 where nothing is packed."),
    panel("Blocks allocated", "ops", [("sum by (tier) (rate(terrace_allocations_total{%s}[$__rate_interval]))" % JOB, "{{tier}}")]),
]
NODES = [
    panel("Leases against budgets", "bytes", [("sum by (tier) (terrace_lease_bytes{%s,tier=~\"hbm|ddr\"})" % NODE, "{{tier}} leased"),
                                              ("sum by (tier) (terrace_node_budget_bytes{%s,tier=~\"hbm|ddr\"})" % NODE, "{{tier}} budget")]),
    panel("HBM leases by GPU", "bytes", [("sum by (device) (terrace_device_lease_bytes{%s,tier=\"hbm\"})" % NODE, "{{device}}")], "stack"),
    panel("HBM in live blocks by GPU", "bytes", [("sum by (device) (terrace_device_tier_bytes{%s,tier=\"hbm\"})" % NODE, "{{device}}")], "stack"),
    panel("Processes by GPU", "none", [("sum by (device) (terrace_device_processes{%s})" % NODE, "{{device}}")], "stack"),
    panel("HBM of ended processes, not free yet", "bytes", [("sum by (device) (terrace_withheld_bytes{%s})" % NODE, "{{device}}")], "stack",
          text="Held by processes that they forked, as the driver says; leased again when it is free."),
    panel("Pinning", "Bps", [("sum(rate(terrace_pinned_bytes_total{%s}[$__rate_interval])) / (sum(rate(terrace_pin_seconds_total{%s}[$__rate_interval])) > 0) or sum(rate(terrace_pinned_bytes_total{%s}[$__rate_interval]))" % (NODE, NODE, NODE), "pinned, each second of it")]),
    panel("Copies by direction", "ops", [("sum by (direction) (rate(terrace_transfers_total{%s}[$__rate_interval]))" % NODE, "{{direction}}")]),
    panel("Busy links", "percentunit", [("sum by (direction) (rate(terrace_transfer_seconds_total{%s}[$__rate_interval]))" % NODE, "{{direction}}")],
          text="Seconds of copies in a second, summed over the node's links."),
    panel("Oldest page", "s", [("max by (job) (terrace_job_page_age_seconds{%s})" % NODE, "{{job}}")], text="Since a job was last seen to count anything."),
    panel("Joined and refused", "ops", [("sum(rate(terrace_clients_joined_total{%s}[$__rate_interval]))" % NODE, "joined"),
                                        ("sum(rate(terrace_messages_refused_total{%s}[$__rate_interval]))" % NODE, "refused")]),
    panel("Shares", "none", [("sum(increase(terrace_shrink_requests_total{%s}[$__rate_interval]))" % NODE, "asked to hold less"),
                             ("sum(terrace_deaf_clients{%s})" % NODE, "deaf")]),
    panel("terraced: CPU", "percentunit", [("rate(terrace_daemon_cpu_seconds_total{%s}[$__rate_interval])" % NODE, "{{instance}}")]),
    panel("terraced: memory", "bytes", [("terrace_daemon_resident_bytes{%s}" % NODE, "{{instance}}")]),
    panel("terraced: CPU of a scrape", "s", [("rate(terrace_scrape_cpu_seconds_total{%s}[$__rate_interval]) / rate(terrace_scrapes_total{%s}[$__rate_interval])" % (NODE, NODE), "{{instance}}")]),
    panel("HTTP answers", "ops", [("sum by (code) (rate(terrace_http_requests_total{%s}[$__rate_interval]))" % NODE, "{{code}}")], "stack"),
    panel("Versions", "none", [("sum by (version) (terrace_build_info{%s})" % NODE, "{{version}}")], "stat", 6, 4),
]


def variable(name, label, query):
    return {"name": name, "label": label, "type": "query", "datasource": {"type": "prometheus", "uid": "${source}"}, "query": query,
            "refresh": 2, "includeAll": True, "multi": True, "allValue": ".+", "current": {"text": "All", "value": "$__all"}}


def drawn(spec, number, x, y):
    kind = "timeseries" if spec["kind"] == "stack" else spec["kind"]
    made = {
        "id": number, "type": kind, "title": spec["title"], "description": spec["text"],
        "gridPos": {"x": x, "y": y, "w": spec["width"], "h": spec["height"]},
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "fieldConfig": {"defaults": {"unit": spec["unit"], "min": 0, **KIND[spec["kind"]]}, "overrides": [LIMITS] if spec["kind"] == "stack" else []},
        "targets": [{"refId": chr(65 + i), "expr": expression, "legendFormat": legend} for i, (expression, legend) in enumerate(spec["queries"])],
    }
    if kind == "timeseries":
        made["options"] = {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list", "placement": "bottom"}}
        made["fieldConfig"]["defaults"]["color"] = {"mode": "palette-classic-by-name"}
    return made


def dashboard(uid, title, panels, variables):
    x = y = height = 0
    placed = []
    for number, spec in enumerate(panels, 1):
        if x + spec["width"] > 24:
            x, y, height = 0, y + height, 0
        placed.append(drawn(spec, number, x, y))
        x, height = x + spec["width"], max(height, spec["height"])
    source = {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}
    return {"uid": uid, "title": title, "tags": ["terrace"], "schemaVersion": 37, "version": 1, "editable": True, "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"}, "templating": {"list": [source, *variables]},
            "links": [{"type": "dashboards", "tags": ["terrace"], "title": "Terrace", "includeVars": True, "keepTime": True}], "panels": placed}


def text_of(made):
    """One line a panel: a change reads well."""
    panels = ",\n  ".join(json.dumps(panel) for panel in made.pop("panels"))
    return json.dumps(made)[:-1] + ', "panels": [\n  ' + panels + "\n]}\n"


def all_dashboards():
    node = variable("node", "Node", "label_values(terrace_build_info, instance)")
    job = variable("job", "Job", "label_values(terrace_job_processes{instance=~\"$node\"}, job)")
    return {
        "overview.json": text_of(dashboard("terrace-overview", "Terrace: overview", OVERVIEW, [node])),
        "job.json": text_of(dashboard("terrace-job", "Terrace: job", JOBS, [node, job])),
        "node.json": text_of(dashboard("terrace-node", "Terrace: node", NODES, [node])),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "grafana"
    for name, text in all_dashboards().items():
        (folder / name).write_text(text, encoding="utf-8")
