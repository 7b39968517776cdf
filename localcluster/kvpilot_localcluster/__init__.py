"""A real Kubernetes control plane and one node, as local processes, for the demo, the benchmarks and the tests.

    with LocalCluster(Path("run")) as cluster:      # kvpilot_localcluster.cluster
        cluster.rest.get("/api/v1/nodes")           # or any client, with cluster.kubeconfig

docs/localcluster.md describes what it covers and its limits.
"""
