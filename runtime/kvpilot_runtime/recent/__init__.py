"""Recent window of an engine, which a ring buffer of pages holds: ring layers beside ours, and their specs."""
