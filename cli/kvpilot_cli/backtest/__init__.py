"""`kvpilot backtest`: replay a load under the pilot, and with a fixed number of replicas.

`engine` simulates one vLLM engine request by request. `policies` control it by the operator's own `decide` code.
"""

from kvpilot_cli.backtest.command import main

__all__ = ["main"]
