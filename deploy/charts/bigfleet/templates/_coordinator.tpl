{{- /* The replicas, each by the name of its pod: a shard looks for the leader among them. */}}
{{- define "bigfleet.coordinators" -}}
{{- $hosts := list }}
{{- range $number := until (int .Values.coordinator.replicas) }}
{{- $hosts = append $hosts (printf "bigfleet-coordinator-%d.bigfleet-coordinator.%s.svc:7790" $number $.Release.Namespace) }}
{{- end }}
{{- join "," $hosts }}
{{- end }}
