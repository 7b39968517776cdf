"""Errors of the local cluster: each names the requirement, the finding and the remedy."""


class LocalClusterError(Exception):
    """Base class of all errors that this package raises on purpose."""


class MissingTool(LocalClusterError):
    """Error for a system tool that a build or a start needs but that is not on PATH."""


class BuildFailed(LocalClusterError):
    """Error for a failed build step; the message holds the step, the command and the end of its output."""


class StartFailed(LocalClusterError):
    """Error for a process of the cluster that did not become ready; the message holds the end of its log."""


class InvalidPod(LocalClusterError):
    """Error for a pod that needs an unsupported feature of the node agent. The pod's status shows the message."""


class UnknownImage(InvalidPod):
    """Error for an image without an entry in the image table."""
