"""The API as the operator sees it: one CRD file, what it says about an object, and that object's spec as plain data.

`schema` fills defaults and finds faults, by the very schema and rules that the API server enforces; `spec` turns a
defaulted, faultless object into frozen dataclasses. Nothing here talks to a cluster.
"""
