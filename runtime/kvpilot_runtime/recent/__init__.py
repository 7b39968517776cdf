"""Recent window of an engine: ring layers, which hold a ring buffer of pages for each layer, and their specs."""
