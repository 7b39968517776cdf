"""The frozen data that flows through the operator: status (kept in the cluster), Snapshot (observed), Decision (to act on)."""
