{{/* The operator's rights in a namespace that it watches. tests/chart compares them with the operator's requests. */}}
{{- define "kvpilot.rules" -}}
- apiGroups: [kvpilot.io]
  resources: [quantizedllmservices]
  verbs: [get, list, watch]
- apiGroups: [kvpilot.io]
  resources: [quantizedllmservices/status]
  verbs: [patch]
# For owner references that block deletion, if the admission plugin OwnerReferencesPermissionEnforcement is on
# (OpenShift).
- apiGroups: [kvpilot.io]
  resources: [quantizedllmservices/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
# After a promotion, the operator removes the readiness gate from the Deployment's template, and from its ReplicaSet's.
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [list, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
# The operator opens the readiness gate of a canary's pod once its revision has passed its probes.
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
# Claims for weights: the operator creates and resizes them, but never deletes one.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create, patch]
# The operator lists autoscalers every few minutes, to report one that scales the same service as the operator.
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [list]
# Baselines of the accuracy probes, and the probe sets that users write.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, create, patch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- if .Values.rbac.leaderWorkerSets }}
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, watch, create, patch, delete]
# The StatefulSets of a group report only in Events why its pods cannot be created.
- apiGroups: [""]
  resources: [events]
  verbs: [list]
{{- end }}
{{- if .Values.rbac.httpRoutes }}
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, patch]
{{- end }}
{{- if .Values.rbac.inferencePools }}
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, create, patch, delete]
{{- end }}
{{- end }}
