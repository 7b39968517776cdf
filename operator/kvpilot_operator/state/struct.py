"""What each part of `.status` is: a frozen struct whose fields have the CRD's names in snake case."""

import msgspec

from kvpilot_operator.api.part import camel


class Struct(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename=camel):
    """A part of the status, or the whole; what has its default is not written."""
