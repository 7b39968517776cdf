{{/* The chart's own name. */}}
{{- define "kvpilot.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{/*
The name of the Deployment and of the objects that belong to it. If the release's name contains the chart's name, the
chart's name is not added again.
*/}}
{{- define "kvpilot.operator" -}}
{{- $name := include "kvpilot.name" . }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- printf "%s-operator" (.Release.Name | trunc 50 | trimSuffix "-") }}
{{- else }}
{{- printf "%s-operator" (printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-") }}
{{- end }}
{{- end }}

{{/* Names of cluster-scoped objects contain the namespace, so that releases in two namespaces do not share them. */}}
{{- define "kvpilot.clusterName" -}}
{{- printf "%s:%s" .Release.Namespace (include "kvpilot.operator" .) }}
{{- end }}

{{- define "kvpilot.serviceAccount" -}}
{{- default (ternary (include "kvpilot.operator" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name }}
{{- end }}

{{- define "kvpilot.selector" -}}
app.kubernetes.io/name: {{ include "kvpilot.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{/* The chart's own labels take precedence, because commonLabels must not break the selectors. */}}
{{- define "kvpilot.labels" -}}
{{- $own := dict
  "app.kubernetes.io/version" .Chart.AppVersion
  "app.kubernetes.io/part-of" "kvpilot"
  "app.kubernetes.io/managed-by" .Release.Service
  "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_")
-}}
{{- merge (include "kvpilot.selector" . | fromYaml) $own .Values.commonLabels | toYaml }}
{{- end }}

{{/*
The metadata of an object. The argument is a dict: root, name, and optionally namespace, labels, annotations.
The default namespace is that of the release; `namespace: ""` makes the object cluster-scoped.
*/}}
{{- define "kvpilot.metadata" -}}
{{- $root := .root }}
{{- $namespace := ternary .namespace $root.Release.Namespace (hasKey . "namespace") }}
{{- $labels := merge (dict) (default (dict) .labels) (include "kvpilot.labels" $root | fromYaml) }}
{{- $annotations := merge (dict) (default (dict) .annotations) $root.Values.commonAnnotations -}}
name: {{ .name }}
{{- with $namespace }}
namespace: {{ . }}
{{- end }}
labels:
  {{- toYaml $labels | nindent 2 }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The repository of the operator's image, in the registry that the values ask for. */}}
{{- define "kvpilot.repository" -}}
{{- $registry := default (.Values.global).imageRegistry .Values.image.registry }}
{{- with $registry }}
{{- printf "%s/%s" (trimSuffix "/" .) (regexReplaceAll "^([^/]*[.:][^/]*|localhost)/" $.Values.image.repository "") }}
{{- else }}
{{- .Values.image.repository }}
{{- end }}
{{- end }}

{{- define "kvpilot.image" -}}
{{- $image := printf "%s:%s" (include "kvpilot.repository" .) (default .Chart.AppVersion .Values.image.tag) }}
{{- with .Values.image.digest }}{{ printf "%s@%s" $image . }}{{ else }}{{ $image }}{{ end }}
{{- end }}

{{/* The pods' securityContext. On OpenShift it names no user or group, because each namespace has its own. */}}
{{- define "kvpilot.podSecurityContext" -}}
{{- $context := .Values.podSecurityContext }}
{{- if .Capabilities.APIVersions.Has "security.openshift.io/v1" }}
{{- $context = omit $context "runAsUser" "runAsGroup" "fsGroup" }}
{{- end }}
{{- toYaml $context }}
{{- end }}

{{/* Annotations for a sidecar that intercepts no traffic and writes the pod's certificates to the volume `mesh`. */}}
{{- define "kvpilot.istioAnnotations" -}}
traffic.sidecar.istio.io/includeInboundPorts: ""
traffic.sidecar.istio.io/includeOutboundIPRanges: ""
proxy.istio.io/config: |
  proxyMetadata:
    OUTPUT_CERTS: /etc/istio-output-certs
sidecar.istio.io/userVolumeMount: '[{"name": "mesh", "mountPath": "/etc/istio-output-certs"}]'
{{- end }}
