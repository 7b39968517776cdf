"""Real Kubernetes control plane and a cluster with one node, all as local processes. Demo, benchmarks and tests use it.

    with LocalCluster(Path("run")) as cluster:      # kvpilot_localcluster.cluster
        cluster.rest.get("/api/v1/nodes")           # or any client, with cluster.kubeconfig

docs/localcluster.md describes what it covers and its limits.
"""
