"""A cache of one kind of objects as small views, which a watch and our own writes keep current."""

import logging
from collections.abc import Callable, Collection, Hashable
from typing import Generic, NamedTuple, TypeVar

from kvpilot_formats.untrusted import whole
from kvpilot_operator.cluster.objects import Object
from kvpilot_operator.errors import places

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

log = logging.getLogger(__name__)

# A resourceVersion is a number of 64 bits. Treat a larger one as unknown.
_MAX_VERSION = 2**64 - 1

Name = tuple[str, str]
"""(namespace, name) of an object."""


class _Entry(NamedTuple, Generic[K, V]):
    version: int
    service: K
    view: V


class Store(Generic[K, V]):
    """Views of objects by name and by the service that they belong to.

    The store keeps only objects that have a view and a service. An older version never replaces a newer one, so a watch
    event and the answer to our own write may come in any order. The store calls `changed` with the service whenever one
    of its views changes. If an object is malformed, the store keeps its last view.
    """

    def __init__(
        self, view: Callable[[Object], V | None], service: Callable[[Object], K | None], changed: Callable[[K], None]
    ) -> None:
        self._view = view
        self._service = service
        self._changed = changed
        self._entries: dict[Name, _Entry[K, V]] = {}
        self._names: dict[K, dict[Name, None]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, namespace: str, name: str) -> V | None:
        """Return the view of the object with this name, or None."""
        entry = self._entries.get((namespace, name))
        return entry.view if entry is not None else None

    def of(self, service: K) -> list[V]:
        """Return the views of a service's objects, in the order of their names."""
        return [self._entries[name].view for name in sorted(self._names.get(service, ()))]

    def put(self, obj: Object) -> None:
        """Store an object, unless the store has this version or a newer one."""
        name, version = _name(obj), _version(obj)
        known = self._entries.get(name)
        if known is not None and version and version <= known.version:
            return
        try:
            service = self._service(obj)
            view = self._view(obj) if service is not None else None
        except Exception as error:
            # A malformed object must not stop the watch of its kind.
            where = " > ".join(places(error))
            log.error("malformed %s %s/%s ignored: %s in %s", obj.get("kind", ""), *name, type(error).__name__, where)
            return
        if service is None or view is None:
            self._remove(name)
            return
        if known is not None and known.service != service:
            self._remove(name)
            known = None
        self._entries[name] = _Entry(version, service, view)
        self._names.setdefault(service, {})[name] = None
        if known is None or known.view != view:
            self._changed(service)

    def take(self, event: str | None, obj: Object) -> None:
        """Process one watch event. Ignore bookmarks, and kopf's events without a type, which only repeat a list."""
        if event in ("ADDED", "MODIFIED"):
            self.put(obj)
        elif event == "DELETED":
            known, version = self._entries.get(_name(obj)), _version(obj)
            if known is not None and (not version or version >= known.version):
                self._remove(_name(obj))

    def forget(self, namespace: str, name: str) -> None:
        """Drop an object that the operator deleted, or that the API server does not have."""
        self._remove((namespace, name))

    def keep_only(self, namespace: str, names: Collection[Name], version: str) -> None:
        """Drop objects that are missing from a list of the namespace ("" for all), unless they are newer than the list.

        `names` has the objects of the list, and `version` is its resourceVersion.
        """
        limit = whole(version, _MAX_VERSION)
        gone = [
            name
            for name, entry in self._entries.items()
            if name not in names and namespace in ("", name[0]) and (limit is None or entry.version <= limit)
        ]
        for name in gone:
            self._remove(name)

    def _remove(self, name: Name) -> None:
        known = self._entries.pop(name, None)
        if known is None:
            return
        names = self._names[known.service]
        del names[name]
        if not names:
            del self._names[known.service]
        self._changed(known.service)


def _name(obj: Object) -> Name:
    metadata = obj["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def _version(obj: Object) -> int:
    """Return the resourceVersion as a number; 0 if it cannot be compared."""
    return whole(obj["metadata"].get("resourceVersion"), _MAX_VERSION) or 0
