"""Reasons that may be labels of metrics. Other reasons, from engines or webhooks, could add any number of series."""

from kvpilot_formats.untrusted import KvpilotError
from kvpilot_operator.api.words import ConditionType, ObjectiveState, Outcome, Reason, Stage, WorkloadKind
from kvpilot_probes.errors import ProbeError

OTHER = "Other"
# Reasons for which kvpilot-serve refuses to start an engine (kvpilot_runtime.errors).
ENGINE = ("ModelNotFound", "ModelUnsupported", "DtypeUnsupported", "DoesNotFit", "BadArguments")
# A kubelet's reasons for a container that does not run.
_KUBELET = (
    "ContainerCreating", "PodInitializing", "CrashLoopBackOff", "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull",
    "ImageInspectError", "InvalidImageName", "RegistryUnavailable", "SignatureValidationFailed",
    "CreateContainerConfigError", "CreateContainerError", "PreCreateHookError", "PreStartHookError",
    "PostStartHookError", "RunContainerError", "StartError", "ContainerStatusUnknown", "Error", "OOMKilled",
    "Completed", "DeadlineExceeded", "Evicted", "Terminated",
)  # fmt: skip
# Reasons for which an API server refuses an object (metav1.StatusReason), or a controller cannot create a pod.
_API_SERVER = (
    "Invalid", "Forbidden", "BadRequest", "Conflict", "AlreadyExists", "NotFound", "Gone", "Expired", "InternalError",
    "MethodNotAllowed", "NotAcceptable", "UnsupportedMediaType", "RequestEntityTooLarge", "Unauthorized", "Timeout",
    "ServerTimeout", "TooManyRequests", "ServiceUnavailable", "FailedCreate", "NameTaken", "ObjectMissing",
    "Rejected", "InferencePoolsNotServed",
)  # fmt: skip


def _errors(kind: type[Exception]) -> set[str]:
    """Return the names of an error class and its subclasses, because a failed probe reports its class name."""
    return {kind.__name__}.union(*map(_errors, kind.__subclasses__()))


KNOWN = frozenset({
    *Reason, *WorkloadKind, *ObjectiveState, *Outcome, *Stage, *ConditionType, *ENGINE, *_KUBELET,
    *_API_SERVER, *_errors(KvpilotError), *_errors(ProbeError),
    *(f"Canary{stage}" for stage in Stage),
})  # fmt: skip


def known(reason: str) -> str:
    """Return the reason if kvpilot knows it, else `OTHER`, so that metrics have few label values."""
    return reason if reason in KNOWN else OTHER
