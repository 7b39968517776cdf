"""Errors of the local cluster. Each message names the requirement, the finding and the remedy."""


class LocalClusterError(Exception):
    """Base class of all errors that this package raises on purpose."""


class MissingTool(LocalClusterError):
    """Error for a system tool that is not on PATH, but that a build or a start needs."""


class BuildFailed(LocalClusterError):
    """Error for a failed build step. The message holds the step, the command and the end of its output."""


class StartFailed(LocalClusterError):
    """Error for a process that ended or did not become ready. The message holds the end of its log."""


class InvalidPod(LocalClusterError):
    """Error for a pod that needs a feature which the node agent lacks. The pod's status shows the message."""


class UnknownImage(InvalidPod):
    """Error for an image without an entry in the image table."""
