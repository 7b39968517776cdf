"""Calibration: fit static factors of keys and values, by `kvpilot calibrate` or by an engine at start."""
