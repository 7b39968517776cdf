"""What helps against each kind of refusal? The words of API servers, with what the user is told of them."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One kind of refusal: `words` as the server says it, and what the user is told; both texts may use its groups."""

    words: str
    """A regular expression."""
    reason: str
    field: str
    """The spec's field; "" where the server's own field says it, or none is at fault."""
    remedy: str


TABLE = (
    Row(
        r"must be less than or equal to (?P<what>\S+) limit", "RequestAboveLimit",
        "spec.engine.resources.requests.{what}",
        "lower it, or raise spec.engine.resources.limits.{what} (a LimitRange of the namespace sets one where none is)",
    ),
    Row(
        r"must be equal to (?P<what>\S+) limit", "RequestNotLimit", "spec.engine.resources.requests.{what}",
        "set requests and limits of {what} to the same number, or the limit alone",
    ),
    Row(
        r"Limit must be set for non overcommit", "LimitMissing", "spec.engine.resources.limits",
        "set a limit for every extended resource that is requested, such as nvidia.com/gpu",
    ),
    Row(r"must be an integer", "NotAWholeNumber", "", "ask for a whole number: GPUs and the like are not shared"),
    Row(
        r"must be a standard resource", "UnknownResource", "",
        "write cpu, memory or ephemeral-storage, or the whole name of an extended resource, such as nvidia.com/gpu",
    ),
    Row(
        r"no PriorityClass with name (?P<name>\S+) was found", "PriorityClassMissing",
        "spec.engine.podTemplate.spec.priorityClassName",
        "create the PriorityClass {name}, or name another one",
    ),
    Row(
        r'serviceaccount "(?P<name>[^"]+)" not found', "ServiceAccountMissing",
        "spec.engine.podTemplate.spec.serviceAccountName",
        "create the ServiceAccount {name} in the namespace, or name another one",
    ),
    Row(
        r'RuntimeClass "(?P<name>[^"]+)" not found', "RuntimeClassMissing",
        "spec.engine.podTemplate.spec.runtimeClassName",
        "create the RuntimeClass {name}, or name another one",
    ),
    Row(
        r"exceeded quota: (?P<name>[^,]+), requested: (?:count/)?pods=\d+, used", "QuotaExceeded", "spec.replicas",
        "raise ResourceQuota {name} of the namespace, or run fewer replicas there",
    ),
    Row(
        r"exceeded quota: (?P<name>[^,]+), requested: (?:count/|services)", "QuotaExceeded", "",
        "raise ResourceQuota {name} of the namespace, or remove what is not needed there",
    ),
    Row(
        r"exceeded quota: (?P<name>[^,]+), requested: \S*(?:requests\.storage|persistentvolumeclaims)", "QuotaExceeded",
        "spec.cache.weights", "raise ResourceQuota {name} of the namespace, or ask for less storage",
    ),
    Row(
        r"exceeded quota: (?P<name>[^,]+)", "QuotaExceeded", "spec.engine.resources",
        "raise ResourceQuota {name} of the namespace, ask for less, or run fewer replicas",
    ),
    Row(
        r"failed quota: (?P<name>[^:]+): must specify (?P<what>[\w./-]+) for: (?P<container>(?!engine\b)[a-z0-9-]+)",
        "QuotaNeedsResources", "spec.engine.podTemplate.spec.containers",
        "set resources.{what} of container {container}: ResourceQuota {name} of the namespace asks for it of every pod",
    ),
    Row(
        r"failed quota: (?P<name>[^:]+): must specify (?P<what>[\w./-]+)", "QuotaNeedsResources",
        "spec.engine.resources.{what}", "set it: ResourceQuota {name} of the namespace asks for it of every pod",
    ),
    Row(
        r"(?:maximum|minimum) (?P<what>\S+) usage per (?:Container|Pod) is \S+, but (?P<which>limit|request)",
        "LimitRangeViolated", "spec.engine.resources.{which}s.{what}",
        "keep to the bounds of the namespace's LimitRange, or change it",
    ),
    Row(
        r"(?:maximum|minimum) (?P<what>\S+) usage per (?:Container|Pod) is|(?:\S+) max limit to request ratio",
        "LimitRangeViolated", "spec.engine.resources", "keep to the bounds of the namespace's LimitRange, or change it",
    ),
    Row(
        r'volumes\[name="model"\]\.image: field not declared', "ImageVolumesUnsupported", "spec.model.source",
        "this Kubernetes has no image volumes, which oci:// needs (1.31 and newer, feature gate ImageVolume): copy the "
        "model to a claim and write pvc://CLAIM/PATH, or take it from hf://",
    ),
    Row(
        r"\.(?:resourceClaims|resources\.claims): field not declared", "ResourceClaimsUnsupported",
        "spec.engine.podTemplate.spec.resourceClaims",
        "this Kubernetes has no dynamic resource allocation (1.34 and newer): remove it, and ask for devices in "
        "spec.engine.resources.limits",
    ),
    Row(
        r"initContainers\[.*\]\.restartPolicy: field not declared", "SidecarsUnsupported",
        "spec.engine.podTemplate.spec.initContainers",
        "this Kubernetes has no init containers that keep running (1.29 and newer): write it under containers",
    ),
    Row(
        r"duplicate entries for key \[name=\"(?P<name>[^\"]+)\"\]", "DuplicateVariable", "spec.engine.env",
        "set {name} once",
    ),
    Row(
        r"violates PodSecurity", "PodSecurityViolated", "spec.engine",
        "change what it names (of containers beside the engine in spec.engine.podTemplate), or loosen the namespace's "
        "label pod-security.kubernetes.io/enforce",
    ),
    Row(
        r"unable to validate against any security context constraint", "SecurityContextRefused",
        "spec.engine.podTemplate.spec.securityContext",
        "leave out runAsUser, runAsGroup and fsGroup, which OpenShift gives each namespace, or let the pods' account "
        "(spec.engine.podTemplate.spec.serviceAccountName) use a constraint that allows what it names",
    ),
    Row(
        r'admission webhook "(?P<name>[^"]+)" denied the request', "DeniedByWebhook", "",
        "change what it names through spec.engine, or make an exception for it in that policy",
    ),
    Row(
        r'failed calling webhook "(?P<name>[^"]+)"', "WebhookUnavailable", "",
        "no change of the spec helps: the cluster's administrator mends that webhook or takes it away",
    ),
    Row(
        r"unable to create new content in namespace", "NamespaceTerminating", "",
        "create the service in another namespace",
    ),
    Row(
        r"the InferencePools of this API server need an endpoint picker", "EndpointPickerMissing", "",
        "name one for this pool, install the Gateway API Inference Extension v1.6.0 or newer for a gateway that picks "
        "itself, or remove spec.inferencePool",
    ),
    Row(
        r'User "[^"]+" cannot \S+ resource "inferencepools"', "OperatorForbidden", "spec.inferencePool",
        "give the operator the rights over InferencePools (rbac.inferencePools of the chart), or remove the field",
    ),
    Row(
        r'User "[^"]+" cannot \S+ resource "httproutes"', "OperatorForbidden", "spec.route",
        "give the operator the rights over HTTPRoutes (rbac.httpRoutes of the chart), or remove the field",
    ),
    Row(
        r'User "[^"]+" cannot (?P<verb>\S+) resource', "OperatorForbidden", "",
        "no change of the spec helps: give the operator the role of its own version (upgrade the chart, or config/)",
    ),
    Row(
        r"PersistentVolumeClaim \S+ (?:which it names, )?exists and is not kvpilot's", "NameTaken",
        "spec.cache.weights",
        "rename the QuantizedLLMService, or delete the claim if nobody needs it; to use its weights, remove "
        "spec.cache.weights and name it in spec.cache.weightsClaimName",
    ),
    Row(
        r"which it names, does not exist", "ObjectMissing", "",
        "kvpilot makes it: what is said here of that object tells why it could not",
    ),
    Row(
        r"exists and is not kvpilot's", "NameTaken", "metadata.name",
        "rename the QuantizedLLMService, or delete the other object if nobody needs it",
    ),
    Row(
        r"field can not be less than", "ClaimCannotShrink", "spec.cache.weights.size",
        "no claim can be made smaller: ask for as much as it has, or more",
    ),
    Row(
        r"only dynamically provisioned pvc can be resized", "ClaimCannotGrow", "spec.cache.weights.size",
        "its StorageClass allows no expansion (allowVolumeExpansion): ask for the size that it was made with",
    ),
    Row(
        r"is immutable after creation", "ClaimCannotChange", "spec.cache.weights",
        "a claim keeps its class and access mode, and its size while it is not bound: ask for what it was made with, "
        "or delete the PersistentVolumeClaim and let the weights be downloaded anew",
    ),
    Row(
        r"(?:name part|prefix part|a valid label|a qualified name) must", "InvalidLabel", "",
        "write a label's key and value: letters, digits, '-', '_' and '.', at most 63, beginning and ending with a "
        "letter or digit",
    ),
)  # fmt: skip

REFUSALS = frozenset(row.reason for row in TABLE)
"""Every reason in there."""
