"""What would it cost, and what would the pilot have done? `kvpilot plan` and `kvpilot backtest`."""
