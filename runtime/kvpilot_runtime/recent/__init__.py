"""Recent window of an engine: ring layers, which hold a ring buffer of pages for each layer of ours, and their specs."""
