"""The fleet benchmark's stand-in for Kubernetes' controllers makes every change that the operator waits for."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.operator.fleet_kubelets import status_of_paused
from kvpilot_operator.observe.views import deployment_view


def test_the_simulated_controller_reports_a_paused_deployment_as_up_to_date():
    about = {"labels": {}, "generation": 3}
    paused = {"metadata": about, "spec": {"paused": True, "replicas": 2}, "status": {"observedGeneration": 2}}
    assert not deployment_view(paused).in_step
    told = {**paused, "status": status_of_paused(paused)}
    assert deployment_view(told).in_step
    assert status_of_paused(told) is None
    assert status_of_paused({"metadata": about, "spec": {"replicas": 2}}) is None
