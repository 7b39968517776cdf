"""Client of the user's cluster. It finds the cluster as kubectl does: --kubeconfig, KUBECONFIG, ~/.kube/config.

For every failure it raises a ToolError, whose message has one line and names the remedy. Only this module talks to a
cluster.
"""

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import urllib3.exceptions
from kubernetes import config
from kubernetes.client import ApiClient, ApiException, AppsV1Api, Configuration, CustomObjectsApi

from kvpilot_kubectl.errors import Missing, ToolError
from kvpilot_kubectl.fields import Json, items, text
from kvpilot_operator.api.names import GROUP, LEADER_WORKER_SET_API, PLURAL, VERSION

_PAGE = 500
_CONNECT_SECONDS, _READ_SECONDS = 10, 60
_MERGE = "application/merge-patch+json"
_MANAGER = "kubectl-kvpilot"
"""Field manager under which managedFields lists changes by this tool."""
_SHOWN = 300


def contexts(kubeconfig: str | None) -> tuple[dict[str, str], str]:
    """Return the default namespace of each context by its name, and the current context.

    Raises:
        ToolError: the client configuration is missing or unreadable.
    """
    found, current = _configured(lambda: config.list_kube_config_contexts(config_file=kubeconfig))
    return {text(one, "name"): text(one, "context", "namespace") or "default" for one in found}, text(current, "name")


class Cluster:
    """A client with the user's rights. Commands use its `namespace`, unless they list all namespaces."""

    def __init__(self, kubeconfig: str | None = None, context: str | None = None, namespace: str | None = None) -> None:
        known, current = contexts(kubeconfig)
        if context is not None and context not in known:
            names = ", ".join(sorted(known)) or "none"
            raise ToolError(f"--context {context!r} is not in the client configuration; it has {names}")
        self.namespace = namespace or known.get(context or current, "default")
        settings = Configuration()
        _configured(
            lambda: config.load_kube_config(config_file=kubeconfig, context=context, client_configuration=settings)
        )
        settings.retries = False
        self.server = str(settings.host)
        # The client reads certificates and a proxy address from the configuration. Wrong ones must raise a ToolError.
        api = _configured(lambda: ApiClient(settings))
        api.user_agent = _MANAGER
        self._custom, self._apps = CustomObjectsApi(api), AppsV1Api(api)
        # Keep urllib3 from reporting a failure that `_ask` reports.
        logging.getLogger("urllib3").addHandler(logging.NullHandler())

    def services(self, *, everywhere: bool = False) -> Iterator[Json]:
        """Yield the services of the namespace, or of all namespaces."""
        where = {} if everywhere else {"namespace": self.namespace}
        ask = self._custom.list_cluster_custom_object if everywhere else self._custom.list_namespaced_custom_object
        token: dict[str, str] = {}
        while True:
            about = {"group": GROUP, "version": VERSION, "plural": PLURAL, "limit": _PAGE, **where, **token}
            page = self._ask("list", PLURAL, ask, **about)
            yield from items(page, "items")
            if not (next_page := text(page, "metadata", "continue")):
                return
            token = {"_continue": next_page}

    def service(self, name: str) -> Json:
        """Return one service. Raise Missing if no object has this name."""
        about = {"group": GROUP, "version": VERSION, "plural": PLURAL, "namespace": self.namespace, "name": name}
        return self._ask("get", PLURAL, self._custom.get_namespaced_custom_object, **about)

    def patch(self, name: str, change: dict[str, Any]) -> Json:
        """Merge a change into a service, and return the changed object."""
        about = {"group": GROUP, "version": VERSION, "plural": PLURAL, "namespace": self.namespace, "name": name}
        how = {"body": change, "field_manager": _MANAGER, "_content_type": _MERGE}
        return self._ask("patch", PLURAL, self._custom.patch_namespaced_custom_object, **about, **how)

    def workload(self, name: str) -> Json:
        """Return the Deployment or LeaderWorkerSet of this name. Raise Missing if there is none."""
        try:
            about = {"namespace": self.namespace, "name": name}
            return self._ask("get", "deployments", self._apps.read_namespaced_deployment, **about)
        except Missing:
            group, version = LEADER_WORKER_SET_API.split("/")
            kind = {"group": group, "version": version, "plural": "leaderworkersets"}
            return self._ask("get", "leaderworkersets", self._custom.get_namespaced_custom_object, **kind, **about)

    def _ask(self, verb: str, what: str, call: Callable[..., Any], **about: Any) -> Json:
        try:
            answer = call(**about, _preload_content=False, _request_timeout=(_CONNECT_SECONDS, _READ_SECONDS))
            return json.loads(answer.data)
        except ApiException as error:
            raise self._refusal(error, verb, what, about.get("namespace", ""), about.get("name", "")) from error
        except urllib3.exceptions.HTTPError as error:
            raise ToolError(
                f"no answer from the API server at {self.server} ({_brief(error)}): check that the cluster runs and "
                "that you can reach it, or name another one with --context or --kubeconfig"
            ) from error
        except ValueError as error:
            raise ToolError(
                f"{self.server} does not answer like an API server: name another one with --context"
            ) from error

    def _refusal(self, error: ApiException, verb: str, what: str, namespace: str, name: str) -> ToolError:
        try:
            answer = json.loads(error.body)
        except (TypeError, ValueError):
            answer = None
        said = text(answer, "message")[:_SHOWN] or text(str(error.reason))[:_SHOWN]
        where = f" -n {namespace}" if namespace else " -A" if what == PLURAL else ""
        if error.status == 401:
            return ToolError(f"{self.server} does not know who you are: sign in again, or name a user with --context")
        if error.status == 403:
            resource = f"{PLURAL}.{GROUP}" if what == PLURAL else what
            return ToolError(
                f"you may not {verb} {what}{_in(namespace)}: ask for the permission; "
                f"`kubectl auth can-i {verb} {resource}{where}` checks it ({said})"
            )
        if error.status == 404 and text(answer, "details", "name"):
            hint = f"`kubectl kvpilot status{where}` lists all" if what == PLURAL else "it was deleted"
            return Missing(f"{what} {text(answer, 'details', 'name')!r} not found{_in(namespace)}: {hint}")
        if error.status == 404:
            return ToolError(
                f"{self.server} does not serve {PLURAL}.{GROUP} {VERSION}: kvpilot is not installed there. Install it "
                "(docs/install.md), or name another cluster with --context"
            )
        if error.status in (400, 409, 422):
            return ToolError(f"the API server refuses the change of {name}: {said}")
        if error.status == 0:
            return ToolError(
                f"{self.server} cannot be trusted ({said}): check the certificates in the client configuration"
            )
        return ToolError(f"the API server at {self.server} answers {error.status} ({said}): try again")


def _in(namespace: str) -> str:
    return f" in namespace {namespace}" if namespace else ""


def _configured(read: Callable[[], Any]) -> Any:
    """Return the result of `read`. Turn every error into a ToolError, as the user's configuration may hold anything."""
    try:
        return read()
    except Exception as error:
        raise ToolError(
            f"no cluster is configured ({_brief(error)}): set KUBECONFIG, or name a file with --kubeconfig and one of "
            "its contexts with --context"
        ) from error


def _brief(error: Exception) -> str:
    return text(str(error) or type(error).__name__)[:_SHOWN].strip()
