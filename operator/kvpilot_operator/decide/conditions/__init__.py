"""The conditions of a service, for people and for tools."""
