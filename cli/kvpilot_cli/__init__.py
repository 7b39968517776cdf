"""The command-line tools that need no cluster: `kvpilot plan`, `kvpilot backtest` and `kvpilot probe`."""
