"""The frozen data of a reconcile: Status (stored in the cluster), Snapshot (observed) and Decision."""
