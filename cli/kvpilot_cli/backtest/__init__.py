"""`kvpilot backtest`: replay a load through the pilot, plain autoscaling and fixed dtypes.

`engine` simulates one vLLM request by request; `interval` simulates many services together and is checked against it;
`policies` and `crew` drive them by the operator's own decide code, or by a baseline; `report` puts them side by side.
"""

from kvpilot_cli.backtest.command import main

__all__ = ["main"]
