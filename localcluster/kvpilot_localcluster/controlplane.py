"""Real etcd, kube-apiserver, kube-controller-manager and kube-scheduler, as child processes on loopback.

Services get addresses from a range 127.N.0.0/16. The API server accepts such a range, and a forwarder can listen on
these addresses (`services.py`). Loopback addresses have two consequences. The Endpoints API refuses them, so the
endpoints controller is off, and only EndpointSlices exist. And other machines cannot reach the cluster.

kvpilot needs Kubernetes 1.29, but this API server (the core) is 1.20. Two servers behind the core's aggregator add the
missing APIs. A newer apiextensions-apiserver keeps all CRDs and enforces their CEL rules, and `policy.py` serves
policy/v1. Without the newer server, the core keeps the CRDs and ignores their CEL rules.
"""

import atexit
import contextlib
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvpilot_localcluster import audit, certs, procs
from kvpilot_localcluster.addresses import free_port, reserve
from kvpilot_localcluster.build import MINIMUM, Binaries
from kvpilot_localcluster.definitions import Aggregation
from kvpilot_localcluster.errors import StartFailed
from kvpilot_localcluster.policy import PolicyServer
from kvpilot_localcluster.rest import Rest, until

_MARK = "localcluster.run"
_HAS_NO_INSECURE_PORT = (1, 24)
_COMPONENTS = ("etcd", "kube-apiserver", "apiextensions-apiserver", "kube-controller-manager", "kube-scheduler")
_CLIENTS = {
    "admin": "/O=system:masters/CN=admin",
    "controller-manager": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
}


def sweep(folder: Path) -> list[str]:
    """End processes of an earlier control plane in this run folder, which may have been killed. Return their names."""
    return [name for name in reversed(_COMPONENTS) if procs.end(folder / f"{name}.pid")]


class ControlPlane:
    """Control plane, as a context manager that starts and stops it.

    Attributes:
        folder: the run folder. Its content is replaced at start.
        kubeconfig: path of the administrator's kubeconfig, which exists after the start.
        audit_log: the API server's log of every write, if `audit` is on.
        rest: blocking client of the API server, with an administrator's rights. It exists after the start.
    """

    rest: Rest

    def __init__(
        self,
        folder: Path,
        binaries: Binaries,
        *,
        audit: bool = False,
    ) -> None:
        """Configure the control plane. With `audit`, the API server logs every write (see `audit.py`)."""
        self.folder = folder.absolute()
        self.kubeconfig = self.folder / "admin.kubeconfig"
        self.audit_log = self.folder / "audit.log"
        self._audit = audit
        self._binaries = binaries
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._network_lock: socket.socket | None = None
        self._policy: PolicyServer | None = None
        self._aggregation: Aggregation | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def user(self, name: str) -> Path:
        """Create an administrator whose name in the audit log is `name`. Return the path of its kubeconfig."""
        certs.certificate(self.folder, name, f"/O=system:masters/CN={name}")
        return certs.kubeconfig(self.folder, name, self.rest.server)

    def start(self) -> None:
        """Start everything, and return when the API server is ready (after 5 to 10 s).

        Raises:
            MissingTool: openssl is missing.
            StartFailed: a process ended or did not become ready, or the folder holds foreign files.
        """
        self._clear()
        atexit.register(self.stop)
        try:
            self._certificates()
            self._etcd()
            self._apiserver()
            if self._binaries.version < MINIMUM:
                self._newer_apis()
            self._controllers()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all processes, newest first. Certificates and logs remain for inspection."""
        atexit.unregister(self.stop)
        if self._aggregation is not None:
            self._aggregation.stop()
        if self._policy is not None:
            self._policy.stop()
            self._policy = None
        for name in reversed(list(self._children)):
            procs.end(self.folder / f"{name}.pid", grace=5)
        self._children.clear()
        if self._network_lock is not None:
            self._network_lock.close()

    def dead(self) -> dict[str, str]:
        """Describe each process that ended by itself, with the end of its log."""
        ended = [name for name, child in self._children.items() if child.poll() is not None]
        return {name: procs.tail(self.folder / f"{name}.log") for name in ended}

    def check(self) -> None:
        """Check that all processes run.

        Raises:
            StartFailed: a process has ended.
        """
        for name, log in self.dead().items():
            raise StartFailed(f"{name} has died; the end of {self.folder / f'{name}.log'}:\n{log}")

    def _clear(self) -> None:
        sweep(self.folder)
        if self.folder.exists():
            if any(self.folder.iterdir()) and not (self.folder / _MARK).exists():
                raise StartFailed(f"run folder {self.folder} holds other files: name an empty or a new folder")
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True, mode=0o700)
        (self.folder / _MARK).touch()

    def _spawn(self, name: str, *command: str) -> None:
        self._children[name] = procs.spawn(
            self.folder / f"{name}.pid", command, log=self.folder / f"{name}.log", cwd=self.folder
        )

    def _wait(self, name: str, question: Any) -> None:
        def alive_and_ready() -> bool:
            self.check()
            return bool(question())

        try:
            until(alive_and_ready, f"{name} is ready", seconds=300)
        except TimeoutError as error:
            log = procs.tail(self.folder / f"{name}.log")
            raise StartFailed(f"{error}; the end of its log:\n{log}") from None

    def _certificates(self) -> None:
        # Two clusters on one machine must not use the same Service addresses, so reserve this range.
        number, self._network_lock = reserve("kvpilot-localcluster-network", range(64, 127))
        self._network = f"127.{number}.0"
        certs.authority(self.folder)
        names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"]
        alternatives = ",".join([f"DNS:{name}" for name in names] + ["IP:127.0.0.1", f"IP:{self._network}.1"])
        certs.certificate(self.folder, "server", "/CN=kube-apiserver", alternatives)
        for name, subject in _CLIENTS.items():
            certs.certificate(self.folder, name, subject)

    def _etcd(self) -> None:
        port, peer = free_port(), free_port()
        self._store = f"http://127.0.0.1:{port}"
        own = f"http://127.0.0.1:{peer}"
        self._spawn(
            "etcd",
            str(self._binaries.etcd),
            f"--data-dir={self.folder / 'etcd-data'}",
            f"--listen-client-urls={self._store}",
            f"--advertise-client-urls={self._store}",
            f"--listen-peer-urls={own}",
            f"--initial-advertise-peer-urls={own}",
            f"--initial-cluster=default={own}",
            # The data need not survive the cluster, so etcd need not wait for the disk.
            "--unsafe-no-fsync",
        )

        def answers() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
                return True
            return False

        self._wait("etcd", answers)

    def _apiserver(self) -> None:
        port, folder = free_port(), self.folder
        server = f"https://127.0.0.1:{port}"
        for name in _CLIENTS:
            certs.kubeconfig(folder, name, server)
        self.rest = Rest.of_kubeconfig(self.kubeconfig)
        self._spawn(
            "kube-apiserver",
            str(self._binaries.kube_apiserver),
            f"--etcd-servers={self._store}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={port}",
            f"--cert-dir={folder}",
            f"--tls-cert-file={folder / 'server.crt'}",
            f"--tls-private-key-file={folder / 'server.key'}",
            f"--client-ca-file={folder / 'ca.crt'}",
            f"--service-account-key-file={folder / 'sa.pub'}",
            f"--service-account-signing-key-file={folder / 'sa.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-cluster-ip-range={self._network}.0/16",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",
            "--endpoint-reconciler-type=none",
            f"--requestheader-client-ca-file={folder / 'ca.crt'}",
            "--requestheader-allowed-names=admin",
            f"--kubelet-client-certificate={folder / 'admin.crt'}",
            f"--kubelet-client-key={folder / 'admin.key'}",
            "--kubelet-preferred-address-types=InternalIP",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={folder / 'admin.crt'}",
            f"--proxy-client-key-file={folder / 'admin.key'}",
            *(audit.flags(folder / "audit-policy.json", self.audit_log) if self._audit else []),
        )
        self._wait("kube-apiserver", self.rest.ready)

    def _newer_apis(self) -> None:
        port = free_port()
        self._policy = PolicyServer(self.rest, self.folder)
        self._aggregation = Aggregation(self.rest)
        self._aggregation.start({"definitions": port, "policy": self._policy.port})
        self._aggregation.route("policy", "v1", self._policy.port, priority=17100)
        if self._binaries.apiextensions_apiserver is not None:
            self._aggregation.take_definitions(self._apiextensions(port), port)
        until(lambda: self.rest.get("/apis/policy/v1"), "policy/v1 is served")

    def _apiextensions(self, port: int) -> Rest:
        admin = str(self.kubeconfig)
        self._spawn(
            "apiextensions-apiserver",
            str(self._binaries.apiextensions_apiserver),
            f"--etcd-servers={self._store}",
            # The core must not see these CRDs, so this server uses a prefix of its own in etcd.
            "--etcd-prefix=/modern",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--tls-cert-file={self.folder / 'server.crt'}",
            f"--tls-private-key-file={self.folder / 'server.key'}",
            f"--client-ca-file={self.folder / 'ca.crt'}",
            f"--kubeconfig={admin}",
            f"--authentication-kubeconfig={admin}",
            f"--authorization-kubeconfig={admin}",
            # Turn off features of the newer server that need APIs which the core (Kubernetes 1.20) lacks.
            "--enable-priority-and-fairness=false",
            "--disable-admission-plugins=ValidatingAdmissionPolicy,MutatingAdmissionPolicy",
        )
        newer = replace(self.rest, server=f"https://127.0.0.1:{port}")
        self._wait("apiextensions-apiserver", newer.ready)
        return newer

    def _controllers(self) -> None:
        binaries, folder = self._binaries, self.folder
        if binaries.kube_controller_manager is not None:
            config = folder / "controller-manager.kubeconfig"
            self._spawn(
                "kube-controller-manager",
                str(binaries.kube_controller_manager),
                *self._controller_flags(config),
                f"--service-account-private-key-file={folder / 'sa.key'}",
                f"--root-ca-file={folder / 'ca.crt'}",
                "--use-service-account-credentials",
                "--controllers=*,-endpoint,-endpointslicemirroring,-nodeipam,-cloud-node-lifecycle,-route,-service",
                # The default limit of 20 requests per second would only slow down deployments in so small a cluster.
                "--kube-api-qps=200",
                "--kube-api-burst=400",
                # By default the HPA controller runs every 15 s, which is too slow for tests.
                "--horizontal-pod-autoscaler-sync-period=2s",
            )
        if binaries.kube_scheduler is not None:
            config = folder / "scheduler.kubeconfig"
            self._spawn("kube-scheduler", str(binaries.kube_scheduler), *self._controller_flags(config))

    def _controller_flags(self, config: Path) -> list[str]:
        return [
            f"--kubeconfig={config}",
            f"--authentication-kubeconfig={config}",
            f"--authorization-kubeconfig={config}",
            "--bind-address=127.0.0.1",
            f"--secure-port={free_port()}",
            *(["--port=0"] if self._binaries.version < _HAS_NO_INSECURE_PORT else []),
            "--leader-elect=false",
            f"--cert-dir={self.folder}",
        ]
