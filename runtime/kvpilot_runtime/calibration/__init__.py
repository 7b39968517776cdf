"""Static factors, fitted by `kvpilot calibrate` or by an engine at start, and the file that holds them."""
