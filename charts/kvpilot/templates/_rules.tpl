{{/* The operator's rights in a namespace that it watches. tests/chart compares them with its requests. */}}
{{- define "kvpilot.rules" -}}
- apiGroups: [kvpilot.io]
  resources: [quantizedllmservices]
  verbs: [get, list, watch]
- apiGroups: [kvpilot.io]
  resources: [quantizedllmservices/status]
  verbs: [patch]
# For owner references that block deletion, where the OwnerReferencesPermissionEnforcement admission is on (OpenShift).
- apiGroups: [kvpilot.io]
  resources: [quantizedllmservices/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
# A promoted revision's template loses its readiness gate: in the Deployment, and in its ReplicaSet.
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [list, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
# A canary's pod gets requests once its readiness gate is open: after its revision has passed its probes.
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
# Claims for weights: made and resized, and never deleted.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, create, patch]
# The Job that fills such a claim; one cannot be changed, so it is deleted and made anew.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create, patch]
# An autoscaler on a service that the operator scales: listed now and then, to be reported.
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
# Why pods of a group cannot be created, its StatefulSets say in Events alone.
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
