{{- /* The ids of the shards of `root` with a provider's `address`, and whether several have it. */}}
{{- define "bigfleet.shardsOf" -}}
{{- $address := .address }}
{{- $ids := list }}
{{- range .root.Values.shards }}
{{- if eq .providerAddr $address }}
{{- $ids = append $ids .id }}
{{- end }}
{{- end }}
{{- join ", " $ids }}
{{- end }}
{{- /*
The flag --ownership of a `shard`, none where the command's default is right: a shard alone with its provider owns everything that it lists.
Several would each claim all of it. The flag says what a new state file owns, so that it changes nothing of a shard that has one.
*/}}
{{- define "bigfleet.ownership" -}}
{{- $shards := include "bigfleet.shardsOf" (dict "root" .root "address" .shard.providerAddr) }}
{{- $more := printf " %s" (concat .root.Values.shard.extraArgs (.shard.extraArgs | default list) | join " ") }}
{{- if contains "," $shards }}
{{- if not (or .root.Values.coordinator.enabled (contains " --coordinator-addr=" $more)) }}
{{- fail (printf "shards: %s have one providerAddr, %s, and each would claim all of its machines; set coordinator.enabled=true, or give each a provider of its own" $shards .shard.providerAddr) }}
{{- end }}
{{- if not (contains " --ownership=" $more) -}}
- --ownership=assigned
{{- end }}
{{- end }}
{{- end }}
