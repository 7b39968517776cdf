"""GPUs of this machine, as nvidia-smi reports them, and their owners among the node's pods."""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpilot_localcluster.errors import InvalidPod, LocalClusterError
from kvpilot_localcluster.procs import write_atomically

RESOURCE = "nvidia.com/gpu"
_FIELDS = "index,uuid,name,memory.total,memory.used,compute_cap,mig.mode.current,driver_version"
_RECORD = "gpus.json"
Owner = tuple[str, str]
"""A pod's uid and a container's name."""


@dataclass(frozen=True)
class Gpu:
    """One GPU. Memory is in MiB.

    Attributes:
        processes: ids of the processes that compute on it.
    """

    index: int
    uuid: str
    name: str
    memory: int
    used: int
    capability: str
    mig: bool
    driver: str
    processes: tuple[int, ...] = ()


def find() -> list[Gpu]:
    """Return the machine's GPUs. Return none without a driver.

    Raises:
        LocalClusterError: nvidia-smi fails or its answer cannot be read.
    """
    listing = _smi(f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
    if not listing:
        return []
    apps = _smi("--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader")
    return parse(listing, apps)


def cuda_version() -> str:
    """Return the newest CUDA version that the driver supports, such as 13.0; empty if it does not tell."""
    found = re.search(r"CUDA Version: (\d+\.\d+)", _smi())
    return found[1] if found else ""


def _smi(*arguments: str) -> str:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return ""
    except subprocess.TimeoutExpired:
        raise LocalClusterError("nvidia-smi does not answer in 60 s: look at the driver (dmesg)") from None
    if done.returncode:
        raise LocalClusterError(
            f"nvidia-smi ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-300:]}"
        )
    return done.stdout


def parse(listing: str, apps: str = "") -> list[Gpu]:
    """Parse nvidia-smi's lists of GPUs and of processes.

    Raises:
        LocalClusterError: a line does not have the expected form.
    """
    busy = [tuple(part.strip() for part in line.split(",")) for line in apps.splitlines() if "," in line]
    found = []
    for line in filter(str.strip, listing.splitlines()):
        try:
            index, uuid, name, memory, used, capability, mig, driver = (part.strip() for part in line.split(","))
            pids = tuple(int(one[1]) for one in busy if one[0] == uuid)
            found.append(
                Gpu(int(index), uuid, name, int(memory), int(used), capability, mig == "Enabled", driver, pids)
            )
        except ValueError:
            raise LocalClusterError(f"nvidia-smi printed {line!r}: expected {_FIELDS}; update the driver") from None
    return found


def labels(gpus: Sequence[Gpu], cuda: str, devices: int) -> dict[str, str]:
    """Return the labels that GPU feature discovery would set on the Node.

    Args:
        gpus: GPUs of the node, all of one kind.
        cuda: newest CUDA version that the driver supports.
        devices: number of devices that the node offers to pods. More devices than GPUs means that pods share GPUs.
    """
    if not gpus:
        return {}
    first, own, pods_of_each = gpus[0], "nvidia.com", -(-devices // len(gpus))
    found = {
        f"{own}/gpu.present": "true",
        f"{own}/gpu.count": str(len(gpus)),
        f"{own}/gpu.product": re.sub(r"[^A-Za-z0-9._-]+", "-", first.name) + "-SHARED" * (pods_of_each > 1),
        f"{own}/gpu.memory": str(first.memory),
        f"{own}/gpu.replicas": str(pods_of_each),
        f"{own}/cuda.driver-version.full": first.driver,
    }
    for kind, version in (("gpu.compute", first.capability), ("cuda.runtime-version", cuda)):
        for part, number in zip(("major", "minor"), version.split("."), strict=False):
            found[f"{own}/{kind}.{part}"] = number
    return {name: value for name, value in found.items() if value}


def assign(devices: Sequence[str], owners: Mapping[Owner, Sequence[str]], owner: Owner, count: int) -> tuple[str, ...]:
    """Return `count` devices for a container: those that it already has, else the first free ones.

    Args:
        devices: ids of all devices of the node.
        owners: ids of the devices that containers have.
        owner: the container.
        count: number of devices that its limits ask for.

    Raises:
        InvalidPod: too few devices are free.
    """
    if owner in owners:
        return tuple(owners[owner])
    taken = {device for given in owners.values() for device in given}
    free = [device for device in devices if device not in taken]
    if len(free) < count:
        raise InvalidPod(
            f"{RESOURCE}: {count} requested, but {len(free)} of {len(devices)} free: end another pod first"
        )
    return tuple(free[:count])


class Devices:
    """Devices of a node. Each pod's folder records its devices, so the record outlives the agent."""

    def __init__(self, count: int, gpus: int, pods: Path) -> None:
        """Offer `count` devices of `gpus` GPUs. If `count` is larger, devices share GPUs, as with time slicing.

        Args:
            count: number of devices.
            gpus: number of GPUs; 0 if the machine has none and the node only pretends.
            pods: folder of the pods' folders.
        """
        self._all = [str(index) for index in range(count)]
        self._gpus = gpus or count
        self._pods = pods

    def variables(self, pod: str, container: Mapping[str, object]) -> dict[str, str]:
        """Return the variables by which CUDA shows a container only its own GPUs.

        Raises:
            InvalidPod: too few devices are free.
        """
        if not self._all:
            return {}
        count = _asked(container)
        given: tuple[str, ...] = ()
        if count:
            owner = (pod, str(container["name"]))
            given = assign(self._all, self._owners(), owner, count)
            if len({self._gpu(device) for device in given}) < count:
                raise InvalidPod(
                    f"{RESOURCE}: {count} requested, but {self._gpus} GPUs are shared: request 1 in each pod"
                )
            file = self._pods / pod / _RECORD
            own = json.loads(file.read_text()) if file.exists() else {}
            write_atomically(file, json.dumps({**own, owner[1]: given}))
        shown = ",".join(map(self._gpu, given))
        return {"CUDA_VISIBLE_DEVICES": shown, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def _gpu(self, device: str) -> str:
        return str(int(device) % self._gpus)

    def release(self, pod: str) -> None:
        """Take a pod's devices back, after its processes have ended."""
        (self._pods / pod / _RECORD).unlink(missing_ok=True)

    def _owners(self) -> dict[Owner, list[str]]:
        files = self._pods.glob(f"*/{_RECORD}")
        return {
            (file.parent.name, name): given for file in files for name, given in json.loads(file.read_text()).items()
        }


def _asked(container: Mapping[str, object]) -> int:
    resources = container.get("resources")
    limits = resources.get("limits") if isinstance(resources, Mapping) else None
    return int(str((limits or {}).get(RESOURCE, 0)))
