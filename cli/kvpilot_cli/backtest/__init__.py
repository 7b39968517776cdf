"""`kvpilot backtest`: replay a load under the pilot, under plain autoscaling and with fixed dtypes.

`engine` simulates one vLLM engine request by request. `policies` control it by the operator's own `decide` code or by a
baseline. `report` compares the results.
"""

from kvpilot_cli.backtest.command import main

__all__ = ["main"]
