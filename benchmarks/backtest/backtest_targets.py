"""Compare targets of the HorizontalPodAutoscaler with the pilot: `python -m benchmarks.backtest.backtest_targets`.

The target is the mean KV use. The program simulates a hundred services for a day.
"""

from benchmarks.backtest import fleet
from kvpilot_cli.backtest.costs import load_profile
from kvpilot_cli.backtest.pilot import load_spec
from kvpilot_cli.backtest.service import Objective

TARGETS = (0.3, 0.4, 0.5, 0.65, 0.8)


def main() -> None:
    """Print one line of Markdown for each policy, target and load."""
    loads, spec, profile = fleet.services(100, 1, 1), load_spec(None), load_profile()
    print("| policy | target | load | GPU-hours | good % | GPU-h / 1M good |\n|---|---|---|---|---|---|")
    for policy, targets in (("pilot", (0.0,)), ("bf16-hpa", TARGETS), ("fp8-hpa", TARGETS)):
        for target in targets:
            for row in fleet.run_fleet(loads, policy, spec, profile, Objective(), 1, hpa_target=target):
                f = fleet.figures_of(row)
                print(
                    f"| {policy} | {target or '-'} | {f['load']} | {f['gpu_hours']} | {f['good_percent']} "
                    f"| {f['gpu_hours_per_million_good']} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
