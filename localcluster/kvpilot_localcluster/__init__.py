"""A real Kubernetes control plane and a one-node cluster of local processes, for the demo, benchmarks and tests.

    with LocalCluster(Path("run")) as cluster:      # kvpilot_localcluster.cluster
        cluster.rest.get("/api/v1/nodes")           # or any client, with cluster.kubeconfig

docs/localcluster.md describes its scope and its limits.
"""
