{{- /* What every pod of BigFleet has: no rights in the cluster, no root, a system that it cannot write to. */}}
{{- define "bigfleet.pod" -}}
automountServiceAccountToken: false
# The process ends streams and calls within 30 s.
terminationGracePeriodSeconds: 60
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  {{- with .Values.podSecurityContext }}
  {{- with .runAsUser }}
  runAsUser: {{ int64 . }}
  {{- end }}
  {{- with .runAsGroup }}
  runAsGroup: {{ int64 . }}
  {{- end }}
  {{- with .fsGroup }}
  fsGroup: {{ int64 . }}
  {{- end }}
  {{- end }}
  # A large state is not changed owner by owner at each start.
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end }}
{{- define "bigfleet.container" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
# A process that waits for its provider or its store is started, serves what it can, and is not ready.
startupProbe:
  httpGet:
    path: /healthz
    port: metrics
  periodSeconds: 5
  failureThreshold: 60
readinessProbe:
  httpGet:
    path: /readyz
    port: metrics
  periodSeconds: 5
livenessProbe:
  httpGet:
    path: /healthz
    port: metrics
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}
{{- define "bigfleet.claims" -}}
{{- if .enabled }}
volumeClaimTemplates:
  - metadata:
      name: state
    spec:
      accessModes: [ReadWriteOnce]
      {{- with .storageClass }}
      storageClassName: {{ . }}
      {{- end }}
      resources:
        requests:
          storage: {{ .size }}
{{- end }}
{{- end }}
{{- define "bigfleet.metrics" -}}
{{- if .root.Values.serviceMonitor.enabled }}
---
# Metrics are plain HTTP: never on a Service that leads out of the cluster.
apiVersion: v1
kind: Service
metadata:
  name: {{ .name }}-metrics
  namespace: {{ .root.Release.Namespace }}
  labels: {{- toYaml .labels | nindent 4 }}
    app.kubernetes.io/part-of: bigfleet
spec:
  clusterIP: None
  # Every process is scraped, whether it is ready or not.
  publishNotReadyAddresses: true
  selector: {{- toYaml .labels | nindent 4 }}
  ports:
    - name: metrics
      port: {{ .port }}
      targetPort: metrics
---
apiVersion: monitoring.coreos.com/v1
kind: ServiceMonitor
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  {{- with .root.Values.serviceMonitor.labels }}
  labels: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  # One job for all that run the same program: alerts compare how many there are.
  jobLabel: app.kubernetes.io/name
  selector:
    matchLabels: {{- toYaml .labels | nindent 6 }}
  endpoints:
    - port: metrics
      interval: {{ .root.Values.serviceMonitor.interval }}
{{- end }}
{{- end }}
