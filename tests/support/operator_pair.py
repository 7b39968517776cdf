"""Two operator processes, each behind its own simulated network cable, one API server, and its audit log of writes."""

import contextlib
import http.client
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from kvpilot_localcluster import procs
from kvpilot_localcluster.addresses import free_port
from kvpilot_localcluster.audit import Term, Write, misplaced, terms, writes
from kvpilot_localcluster.controlplane import ControlPlane
from kvpilot_localcluster.rest import until

SYSTEM = "kvpilot-system"
_COMMAND = str(Path(sys.executable).parent / "kvpilot-operator")
_LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/kvpilot-operator"


def identity(write: Write) -> str | None:
    """Return the replica that wrote, or None for other clients.

    The user name of the request gives the replica's place, and its user agent gives the process.
    """
    if not write.user.startswith("operator-"):
        return None
    found = re.fullmatch(r"kvpilot-operator \((.+)\)", write.agent)
    return found[1] if found else f"{write.user} as {write.agent}"


class Cable:
    """A proxy from one operator to the API server. Unplugged, it still accepts connections but drops all data."""

    def __init__(self, server: str) -> None:
        host, port = server.removeprefix("https://").split(":")
        self._server = (host, int(port))
        self._plugged = True
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.url = f"https://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def unplug(self) -> None:
        """Unplug the cable: from now on, drop all data in both directions."""
        self._plugged = False

    def plug(self) -> None:
        """Plug the cable in again. Close all open connections, because their dropped data stays lost."""
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._open.clear()
        self._plugged = True

    def _accept(self) -> None:
        while True:
            near, _ = self._listening.accept()
            try:
                far = socket.create_connection(self._server)
            except OSError:
                near.close()
                continue
            self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self._plugged:
                    sink.sendall(data)
            if self._plugged:
                sink.shutdown(socket.SHUT_WR)


class Operator:
    """Operator process. `place` (a, b or c) names its Pod and its `Cable`, which outlive the process."""

    def __init__(self, place: str, folder: Path, kubeconfig: Path, *flags: str) -> None:
        self.place = place
        self.log = folder / f"operator-{place}.log"
        self._port = free_port()
        command = [_COMMAND, "--scrape-seconds=2", "--http-host=127.0.0.1", f"--http-port={self._port}", *flags]
        env = {**os.environ, "KUBECONFIG": str(kubeconfig), "POD_NAME": f"operator-{place}", "POD_NAMESPACE": SYSTEM}
        self.process = procs.spawn(folder / f"operator-{place}.pid", command, log=self.log, env=env)

    def ask(self, path: str) -> tuple[int, str]:
        """Return the status and the text of a page of the operator's own HTTP server."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    @property
    def ready(self) -> bool:
        """True if /readyz answers 200, so that a kubelet's readiness probe would pass."""
        return self.ask("/readyz")[0] == 200

    @property
    def leads(self) -> bool:
        """True if the metrics page says that this operator leads."""
        return "\nkvpilot_leader 1.0" in self.ask("/metrics")[1]


class Pair:
    """Operators in the places a and b, a spare place c, and the API server's view of them."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane, self.rest = plane, plane.rest
        self.cables = {place: Cable(plane.rest.server) for place in "abc"}
        self.operators: dict[str, Operator] = {}
        self._flags: tuple[str, ...] = ()
        self._users = {place: self._user(place) for place in "abc"}

    def start(self, place: str, *flags: str) -> Operator:
        """Start an operator process in a place that has none."""
        self.operators[place] = Operator(place, self.plane.folder, self._users[place], *flags)
        return self.operators[place]

    @contextlib.contextmanager
    def flags(self, *flags: str) -> Iterator[None]:
        """Stop all operators before and after the block. Operators that start in the block also get these flags."""
        self._flags = flags
        self._leave()
        try:
            yield
        finally:
            self._flags = ()
            self._leave()
            # A leader does not release the Lease if its last write got no answer, so release it here. Both processes
            # have ended, so no write can arrive any more.
            self.rest.merge(_LEASE, {"spec": {"holderIdentity": ""}})

    def settle(self) -> tuple[Operator, Operator]:
        """Wait until two operators run and one of them leads. Return (leader, standby)."""

        def ready() -> bool:
            for place in "ab":
                if place not in self.operators or self.operators[place].process.poll() is not None:
                    self.start(place, "--leader-elect", *self._flags)
            return all(self.operators[place].ready for place in "ab")

        until(ready, "both operators are ready")
        pair = [self.operators[place] for place in "ab"]
        until(lambda: any(one.leads for one in pair), "one of them leads")
        leader, standby = sorted(pair, key=lambda one: not one.leads)
        until(lambda: self.holder().startswith(f"operator-{leader.place}_"), "the leader holds the Lease")
        return leader, standby

    def holder(self) -> str:
        """Return the holder of the Lease, or an empty string."""
        return str(self.rest.get(_LEASE)["spec"]["holderIdentity"])

    def successor(self, holder: str) -> str:
        """Wait until another replica holds the Lease, and return that replica."""
        until(lambda: self.holder() not in ("", holder), "another replica takes the Lease", seconds=60)
        return self.holder()

    def log(self) -> list[Write]:
        """Return every write in the API server's audit log."""
        return writes(self.plane.audit_log)

    def faults(self) -> list[str]:
        """Return the writes that an operator made while it did not hold the Lease."""
        return misplaced(self.log(), f"{SYSTEM}/kvpilot-operator", identity)

    def term(self, holder: str) -> Term:
        """Return the term in which this replica held the Lease."""
        return next(term for term in terms(self.log(), f"{SYSTEM}/kvpilot-operator") if term.holder == holder)

    def wrote(self, holder: str) -> list[datetime]:
        """Return the times at which this replica wrote any object but the Lease."""
        return [write.received for write in self.log() if identity(write) == holder and write.lease is None]

    def first_write(self, holder: str) -> datetime:
        """Return the time at which this replica first wrote any object but the Lease.

        Wait for it, because the API server answers a request before it adds the request to its audit log.
        """
        until(lambda: bool(self.wrote(holder)), f"the audit log has a write of {holder}")
        return self.wrote(holder)[0]

    def _leave(self) -> None:
        """Stop all processes by SIGTERM, so that the holder releases the Lease."""
        for one in self.operators.values():
            one.process.terminate()
        for one in self.operators.values():
            one.process.wait()

    def stop(self) -> None:
        """Kill all operators that still run."""
        for one in self.operators.values():
            if one.process.poll() is None:
                one.process.send_signal(signal.SIGKILL)
                one.process.wait()

    def _user(self, place: str) -> Path:
        kubeconfig = self.plane.user(f"operator-{place}")
        kubeconfig.write_text(kubeconfig.read_text().replace(self.rest.server, self.cables[place].url))
        return kubeconfig
