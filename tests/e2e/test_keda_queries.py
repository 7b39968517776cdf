"""Queries of the KEDA example. Prometheus' own engine (promtool) evaluates them over pages of a small fleet."""

import subprocess
from pathlib import Path
from typing import Any

import yaml

from kvpilot_localcluster.toolbox.promtool import promtool

EXAMPLE = Path(__file__).parents[2] / "examples" / "keda-scaledobject.yaml"
POD = "qwen3-8b-keda-0f1e2d3c-6b5d9c7f4-"


def series(metric: str, value: int, **labels: str) -> dict[str, str]:
    named = ",".join(f'{name}="{text}"' for name, text in {"namespace": "default", **labels}.items())
    return {"series": f"{metric}{{{named}}}", "values": f"{value}x5"}


def test_the_queries_count_the_requests_of_this_services_engines_and_read_its_recommendation(tmp_path: Path) -> None:
    _, scaler = yaml.safe_load_all(EXAMPLE.read_text())
    in_hand, recommended = (trigger["metadata"]["query"] for trigger in scaler["spec"]["triggers"])
    pages = [
        series("vllm:num_requests_running", 30, pod=f"{POD}a"),
        series("vllm:num_requests_waiting", 20, pod=f"{POD}a"),
        series("vllm:num_requests_running", 10, pod=f"{POD}b"),
        series("vllm:num_requests_waiting", 0, pod=f"{POD}b"),
        series("vllm:num_requests_running", 99, pod="other-0f1e2d3c-6b5d9c7f4-a"),
        series("vllm:num_requests_running", 99, pod=f"{POD}a", namespace="another"),
        series("kvpilot_recommended_replicas", 3, name="qwen3-8b-keda", job="kvpilot-operator"),
        series("kvpilot_recommended_replicas", 7, name="other", job="kvpilot-operator"),
        # An engine's /metrics may contain this series, too. The query must ignore it.
        series("kvpilot_recommended_replicas", 9, name="qwen3-8b-keda", job="kvpilot-engines"),
    ]
    asked: list[dict[str, Any]] = [
        {"expr": query, "eval_time": "4m", "exp_samples": [{"labels": "{}", "value": value}]}
        for query, value in ((in_hand, 60), (recommended, 3))
    ]
    tests = tmp_path / "queries.yaml"
    tests.write_text(yaml.safe_dump({"tests": [{"interval": "1m", "input_series": pages, "promql_expr_test": asked}]}))
    answer = subprocess.run([promtool(), "test", "rules", tests], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
