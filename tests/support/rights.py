"""Rights on a real API server, which applies a new role binding only a moment after it stored it."""

from typing import Any

from kvpilot_localcluster.rest import Rest, until

REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


def until_may(rest: Rest, user: str, **what: Any) -> None:
    """Wait until the API server grants a user this right.

    Args:
        rest: a client with the administrator's rights.
        what: `nonResourceAttributes` or `resourceAttributes` of a SubjectAccessReview.
    """
    review = {"spec": {"user": user, "groups": ["system:authenticated"], **what}}

    def may() -> bool:
        return bool(rest.create(REVIEWS, review)["status"]["allowed"])

    until(may, f"{user} may {what}")
