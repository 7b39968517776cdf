"""The frozen data that flows through the operator: Status (kept in the cluster), Snapshot (observed), Decision."""
