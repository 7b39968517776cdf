"""Run the operator: watches fill a work queue, its workers reconcile services, and a loop scrapes the fleet."""
