"""Stand-in for a container runtime that runs the operator's image: it mounts the ServiceAccount at the usual path.

The node agent runs pods as plain processes. So the token lies in a volume folder beside the pod's home, and the pod
listens on its own address. Only the API server's address comes from CLUSTER_KUBECONFIG. The pod has its own identity.
"""

import json
import os
import sys
from pathlib import Path

(token,) = Path(os.environ["HOME"]).parent.glob(".volumes/*/token")
cluster = json.loads(Path(os.environ["CLUSTER_KUBECONFIG"]).read_text())["clusters"][0]
config = Path(os.environ["HOME"]) / "account.kubeconfig"
config.write_text(
    json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "pod",
            "clusters": [cluster],
            "users": [{"name": "pod", "user": {"token": token.read_text()}}],
            "contexts": [{"name": "pod", "context": {"cluster": cluster["name"], "user": "pod"}}],
        }
    )
)
environment = {name: value for name, value in os.environ.items() if name != "KUBERNETES_SERVICE_HOST"}
program = Path(sys.executable).with_name("kvpilot-operator")
arguments = [str(program), *sys.argv[1:], f"--http-host={os.environ['POD_IP']}"]
os.execve(program, arguments, environment | {"KUBECONFIG": str(config)})  # noqa: S606
