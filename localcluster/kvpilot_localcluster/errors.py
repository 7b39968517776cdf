"""Errors of the local cluster: each names the requirement, the finding and the remedy."""


class LocalClusterError(Exception):
    """The root of every error that this package raises on purpose."""


class MissingTool(LocalClusterError):
    """A system tool that a build or a start needs is not on PATH."""


class BuildFailed(LocalClusterError):
    """A build step failed; the message holds the step, the command and the end of its output."""


class StartFailed(LocalClusterError):
    """A process of the cluster did not become ready; the message holds the end of its log."""


class InvalidPod(LocalClusterError):
    """A pod asks for something that the node agent cannot give; the message is shown in the pod's status."""


class UnknownImage(InvalidPod):
    """The image table has no entry for an image."""
