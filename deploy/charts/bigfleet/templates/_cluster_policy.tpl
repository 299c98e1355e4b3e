{{- /*
The file of --cluster-policy. Of several patterns that fit a cluster the first one in the file applies, and Helm sorts keys, with * before
letters: more characters besides * come first here.
*/}}
{{- define "bigfleet.clusterPolicy" -}}
{{- $ranked := list }}
{{- range $cluster, $_settings := . }}
{{- $ranked = append $ranked (printf "%03d %s" (sub 999 (len (replace "*" "" $cluster))) $cluster) }}
{{- end }}
{{- if $ranked -}}
clusters:
{{- range $ranked | sortAlpha }}
{{- $cluster := substr 4 -1 . }}
{{- $settings := deepCopy (get $ $cluster) }}
{{- if kindIs "bool" $settings.exchange }}
{{- /* YAML reads on and off without quotes as booleans. */}}
{{- $_ := set $settings "exchange" (ternary "on" "off" $settings.exchange) }}
{{- end }}
{{- dict $cluster $settings | toYaml | nindent 2 }}
{{- end }}
{{- else -}}
clusters: {}
{{- end }}
{{ end }}
