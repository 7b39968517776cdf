"""Gathers everything known of one service into a Snapshot: the reading edges."""
