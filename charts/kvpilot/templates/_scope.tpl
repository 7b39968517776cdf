{{/*
The name of the operator's rights on services: a ClusterRole and its binding, or a Role and its binding in each watched
namespace. It is the same in every release, so that only one operator has these rights in a cluster or namespace. Helm
refuses a second release. If another tool applies the manifests, the binding moves to the newer operator.
*/}}
{{- define "kvpilot.scope" -}}
kvpilot.io:operator
{{- end }}

{{/*
Refuse to install next to an operator that watches the same services. `helm template` cannot look up objects, so it never
refuses.
*/}}
{{- define "kvpilot.refuseSecond" -}}
{{- $name := include "kvpilot.scope" . }}
{{- $rbac := "rbac.authorization.k8s.io/v1" }}
{{- $bindings := list (lookup $rbac "ClusterRoleBinding" "" $name) }}
{{- range .Values.watchNamespaces }}
{{- $bindings = append $bindings (lookup $rbac "RoleBinding" . $name) }}
{{- else }}
{{- range (lookup $rbac "RoleBinding" "" "").items }}
{{- if eq .metadata.name $name }}
{{- $bindings = append $bindings . }}
{{- end }}
{{- end }}
{{- end }}
{{- range compact $bindings }}
{{- $annotations := default (dict) .metadata.annotations }}
{{- $release := printf "%s/%s" (index $annotations "meta.helm.sh/release-namespace") (index $annotations "meta.helm.sh/release-name") }}
{{- if ne $release (printf "%s/%s" $.Release.Namespace $.Release.Name) }}
{{- $who := ternary (printf "release %s" $release) "an operator that Helm did not install" (hasKey $annotations "meta.helm.sh/release-name") }}
{{- $what := ternary (printf "namespace %s" .metadata.namespace) "every namespace" (hasKey .metadata "namespace") }}
{{- fail (printf "%s manages %s already (%s %s): two operators would undo each other's writes. Uninstall that one, or set watchNamespaces of both so that no namespace is in two of them." $who $what .kind .metadata.name) }}
{{- end }}
{{- end }}
{{- end }}
