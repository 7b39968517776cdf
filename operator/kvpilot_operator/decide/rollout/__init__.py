"""A change on trial: its stages, its share of the traffic, how it is judged, how it ends."""
