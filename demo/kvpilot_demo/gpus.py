"""The demo on GPUs: checks of the machine, the service's manifest, and compilation for later dtypes."""

import asyncio
import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from kvpilot_demo.observation import ready
from kvpilot_demo.service import EXAMPLE, ROOT, DemoError, DemoService
from kvpilot_demo.story import BAD, GOOD, MISTAKE
from kvpilot_localcluster.errors import LocalClusterError
from kvpilot_localcluster.gpus import RESOURCE, Gpu, cuda_version, find
from kvpilot_operator.api.spec import parse
from kvpilot_operator.cluster.objects import Object, Ref
from kvpilot_operator.render.engine import pod_template

DEVICES = 3
"""Number of devices that the demo needs: two for replicas, and one for a canary. They may share GPUs."""
_ENGINE_MIB = 16_000
"""Memory, in MiB, that an engine needs."""
_IDLE_MIB = 1_024
"""Most memory, in MiB, that the driver itself takes on an idle GPU."""
_TORCH = """
import importlib.metadata, importlib.util, json, torch
if importlib.util.find_spec("vllm") is None:
    raise ModuleNotFoundError("No module named 'vllm'")
if not importlib.metadata.entry_points(group="vllm.general_plugins", name="kvpilot"):
    raise ModuleNotFoundError("No plugin 'kvpilot' of vLLM: kvpilot is not installed, only on the path")
seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps([torch.__version__, torch.version.cuda, seen]))
"""
_COMPILE_SECONDS = 400.0
Torch = tuple[str, str | None, int]
"""Version of torch, the CUDA version that it is built for, and the number of GPUs that it sees."""


def faults(gpus: Sequence[Gpu], driver_cuda: str, torch: Torch | str, devices: int = DEVICES) -> list[str]:
    """Return a message for each problem that keeps the demo from running on these GPUs, with its remedy.

    Args:
        gpus: all GPUs of the machine.
        driver_cuda: newest CUDA version that the driver supports.
        torch: versions and number of GPUs that torch reports, or the error of its import.
        devices: number of engines at a time.
    """
    if not gpus:
        return ["GPUs: nvidia-smi lists none: use a host with an NVIDIA GPU, or leave --gpu out for engines on CPUs"]
    found = [fault for gpu in gpus for fault in _faults_of(gpu, -(-devices // len(gpus)))]
    if isinstance(torch, str):
        return [*found, f"vLLM: {torch}: install kvpilot and the CUDA builds of torch and vLLM for {sys.executable}"]
    version, built_for, seen = torch
    if built_for is None:
        found.append(f"torch: {version} is built without CUDA: install the CUDA builds of torch and vLLM")
    elif not seen:
        found.append(
            f"torch: {version} needs a driver for CUDA {built_for}, and torch.cuda.is_available() is False with driver "
            f"{gpus[0].driver} (up to CUDA {driver_cuda or 'unknown'}): update the driver, or install a torch for it; "
            "if both fit, unset CUDA_VISIBLE_DEVICES and check access to /dev/nvidia*"
        )
    elif seen < len(gpus):
        found.append(f"CUDA_VISIBLE_DEVICES: torch sees {seen} of {len(gpus)} GPUs, and pods get any of them: unset it")
    return found


def _faults_of(gpu: Gpu, engines: int) -> list[str]:
    found, name = [], f"GPU {gpu.index} ({gpu.name})"
    if gpu.mig:
        found.append(f"{name}: mig.mode.current is Enabled, and the story needs whole GPUs: use a host without MIG")
    if gpu.memory < engines * _ENGINE_MIB:
        found.append(
            f"{name}: memory.total is {gpu.memory} MiB, but {engines * _ENGINE_MIB} MiB are needed for the "
            f"engines that run on it at a time ({engines}): use more or larger GPUs"
        )
    if gpu.processes or gpu.used > _IDLE_MIB:
        pids = ", ".join(map(str, gpu.processes)) or "unknown to nvidia-smi"
        found.append(
            f"{name}: memory.used is {gpu.used} MiB (processes: {pids}): end these processes, then start again"
        )
    return found


def found_faults(devices: int = DEVICES) -> list[str]:
    """Check this machine for `devices` engines, and return a message for each problem, as `faults` does."""
    try:
        gpus = find()
        return [*faults(gpus, cuda_version() if gpus else "", _torch() if gpus else "", devices), *_programs()]
    except LocalClusterError as error:
        return [f"nvidia-smi: {error}"]


def _torch() -> Torch | str:
    # Run it in a separate process, because CUDA in this process would take memory on a GPU.
    try:
        done = subprocess.run([sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=240, check=False)
    except subprocess.TimeoutExpired:
        return "import torch does not end in 240 s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["import torch failed"])[-1]
    version, built_for, seen = json.loads(done.stdout.splitlines()[-1])
    return version, built_for, seen


def _programs() -> list[str]:
    if relative := [part for part in os.environ.get("PYTHONPATH", "").split(":") if part and part[0] != "/"]:
        return [f"PYTHONPATH: {':'.join(relative)} is relative, and pods have other folders: use absolute paths"]
    folder = Path(sys.executable).parent
    missing = [name for name in ("kvpilot-operator", "kvpilot-serve") if not (folder / name).exists()]
    return [f"{folder} has no {name}: install kvpilot there with pip" for name in missing]


def manifest(*, imagined: bool) -> Object:
    """Return the manifest of the demo's service. With `imagined`, engines run on CPUs and no GPU is real."""
    made: Object = yaml.safe_load((ROOT / "examples" / "smollm2-gpu.yaml").read_text())
    if imagined:
        cpu = yaml.safe_load(EXAMPLE.read_text())["spec"]
        made["spec"] |= {name: cpu[name] for name in ("model", "engine", "drain")}
        made["spec"]["engine"]["resources"]["limits"] = {RESOURCE: 1}
        made["spec"]["canary"] |= {"progressDeadlineSeconds": 3600, "minRequests": 10}
        made["spec"]["accuracy"]["consecutiveErrorLimit"] = 100
    return made


async def compiled(world: DemoService, note: Callable[[str], None]) -> None:
    """Start an engine for each later dtype on a free GPU, so that it compiles its code. Then end these engines.

    All engines share one folder for compiled code, as with spec.cache.compileClaimName in a cluster.

    Raises:
        DemoError: an engine did not start.
    """
    pods = [_pod(world, GOOD, {}), _pod(world, BAD, MISTAKE)]
    for pod in pods:
        await world.cluster.create(pod)
    try:
        async with asyncio.timeout(_COMPILE_SECONDS):
            for pod in pods:
                while not ready(found := await world.cluster.get(Ref.to(pod))):
                    phase = [one.get("restartCount", 0) for one in found["status"].get("containerStatuses", ())]
                    if any(phase):
                        raise DemoError(f"{pod['metadata']['name']}: its engine ended: read {world.logs}")
                    await asyncio.sleep(1)
                note(f"{pod['metadata']['name']}: its code is compiled")
                await world.cluster.delete(Ref.to(pod))
            for pod in pods:
                while await world.cluster.find(Ref.to(pod)) is not None:
                    await asyncio.sleep(0.5)
    except TimeoutError:
        raise DemoError(f"engines did not start in {_COMPILE_SECONDS:.0f} s: read {world.logs}") from None


def _pod(world: DemoService, dtype: str, kv_cache: Object) -> Object:
    """Return a pod like those of the service with this dtype. It belongs to no revision and gets no requests."""
    service = copy.deepcopy(world.manifest())
    service["spec"]["kvCache"] |= kv_cache
    spec = pod_template(world.name, parse(service), dtype)["spec"]
    metadata = {"name": f"compile-{dtype}", "namespace": world.namespace, "labels": {"app": "compile"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {**spec, "terminationGracePeriodSeconds": 20},
    }
