"""Static factors: fitted by `kvpilot calibrate`, or by an engine itself at start; the file that holds them."""
