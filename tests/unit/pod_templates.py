"""Hypothesis' strategies for engine.podTemplate."""

from typing import Any

from hypothesis import strategies as st

Json = Any

# Valid and invalid templates: reserved names, reserved fields, and access to the node.
NAMES = st.sampled_from(["engine", "proxy", "shm", "model", "compile", "adapters-0", "data", "gpu", "http"])
BOOLEANS = st.booleans()
USERS = st.sampled_from([0, 1000, 65532])
CAPABILITIES = st.lists(
    st.sampled_from(["ALL", "CHOWN", "IPC_LOCK", "NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE"]), max_size=2
)
SECCOMP = st.fixed_dictionaries({"type": st.sampled_from(["RuntimeDefault", "Localhost", "Unconfined"])})


def some(**fields: st.SearchStrategy[Json]) -> st.SearchStrategy[dict[str, Json]]:
    """Draw an object with any of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


def one_of_these(**fields: st.SearchStrategy[Json]) -> st.SearchStrategy[dict[str, Json]]:
    """Draw an object with one of these fields."""
    return st.one_of([st.fixed_dictionaries({name: field}) for name, field in fields.items()])


def named(*fields: st.SearchStrategy[dict[str, Json]]) -> st.SearchStrategy[list[Json]]:
    """Draw a list of objects with different names and these fields."""
    item = st.builds(lambda name, *parts: {"name": name} | {k: v for p in parts for k, v in p.items()}, NAMES, *fields)
    return st.lists(item, max_size=3, unique_by=lambda one: one["name"])


CONTEXTS = some(
    allowPrivilegeEscalation=BOOLEANS,
    capabilities=some(add=CAPABILITIES, drop=CAPABILITIES),
    privileged=BOOLEANS,
    runAsUser=USERS,
    runAsNonRoot=BOOLEANS,
    seccompProfile=SECCOMP,
)
CONTAINERS = named(
    some(
        image=st.just("a/b:1"),
        args=st.just(["--port=1"]),
        env=st.just([{"name": "HF_TOKEN", "value": "x"}]),
        ports=st.sampled_from(
            [[{"containerPort": 8000}], [{"containerPort": 9000, "name": "http"}], [{"containerPort": 1}]]
        ),
        resources=some(limits=st.just({"nvidia.com/gpu": 8}), claims=st.just([{"name": "gpu"}])),
        volumeMounts=st.lists(
            st.fixed_dictionaries(
                {
                    "name": NAMES,
                    "mountPath": st.sampled_from(
                        ["/models", "//dev/shm/", "/./models", "/", "/dev", "/data", "/adapters/a"]
                    ),
                }
            ),
            max_size=2,
            unique_by=lambda one: one["mountPath"],
        ),
        securityContext=CONTEXTS,
    )
)
TEMPLATES = some(
    metadata=some(
        labels=st.dictionaries(
            st.sampled_from(["kvpilot.io/service", "kvpilot.io/revision", "app.kubernetes.io/name", "team"]),
            st.just("x"), max_size=1,
        ),
        annotations=st.dictionaries(
            st.sampled_from(
                [
                    "container.apparmor.security.beta.kubernetes.io/engine",
                    "seccomp.security.alpha.kubernetes.io/pod",
                    "kvpilot.io/identity",
                    "a",
                ]
            ),
            st.just("unconfined"), max_size=1,
        ),
    ),
    spec=some(
        containers=CONTAINERS,
        initContainers=CONTAINERS,
        volumes=named(
            one_of_these(
                emptyDir=st.just({}), hostPath=st.just({"path": "/etc"}), configMap=st.just({"name": "c"}),
                persistentVolumeClaim=st.just({"claimName": "c"}),
            )
        ),
        securityContext=some(runAsUser=USERS, fsGroup=USERS, runAsNonRoot=BOOLEANS, seccompProfile=SECCOMP),
        hostIPC=BOOLEANS,
        hostNetwork=BOOLEANS,
        hostPID=BOOLEANS,
    ),
)  # fmt: skip
