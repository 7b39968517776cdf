"""A real Kubernetes control plane and a one-node cluster of local processes, for the demo and the tests.

    with LocalCluster(Path("run")) as cluster:      # localcluster.cluster
        cluster.rest.get("/api/v1/nodes")           # or any client, with cluster.kubeconfig

docs/localcluster.md tells what it is and what it is not.
"""
