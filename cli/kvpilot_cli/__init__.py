"""Command-line tools that need no cluster: `kvpilot plan`, `backtest`, `probe` and `validate`."""
