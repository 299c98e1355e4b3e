#!/bin/sh
# Carries out BigFleet's orders on an instance of EC2 (docs/spec/aws-provider.md, section 4). cloud-init starts it as user
# data at the first boot of a root volume. It needs curl 7.88 or newer and sha256sum.
set -u
url='@URL@' region='@REGION@' imds='@IMDS@' interval='@INTERVAL@'
: "${BIGFLEET_STATE:=/var/lib/bigfleet-agent}" "${BIGFLEET_HOOKS:=/opt/bigfleet}"
: "${BIGFLEET_SYSTEMD:=/run/systemd/system}" "${BIGFLEET_UNITS:=/etc/systemd/system}"
if [ "${1:-}" != run ]; then
    mkdir -p "$BIGFLEET_STATE" && chmod 700 "$BIGFLEET_STATE"
    cp "$0" "$BIGFLEET_STATE/agent" && chmod 700 "$BIGFLEET_STATE/agent"
    if [ -d "$BIGFLEET_SYSTEMD" ]; then
        printf '[Unit]\nAfter=network-online.target\n[Service]\nExecStart=%s run\nRestart=always\nKillMode=process\n[Install]\nWantedBy=multi-user.target\n' \
            "$BIGFLEET_STATE/agent" >"$BIGFLEET_UNITS/bigfleet-agent.service"
        systemctl daemon-reload && exec systemctl enable --now --quiet bigfleet-agent
    fi
    setsid "$BIGFLEET_STATE/agent" run >/dev/null 2>&1 </dev/null &
    exit 0
fi
metadata() {
    token=$(curl -sf -m 5 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 300' "$imds/latest/api/token") || return 1
    curl -sf -m 5 -H "X-aws-ec2-metadata-token: $token" "$imds/latest/$1"
}
# Arguments of curl for S3, with the credentials of the instance's role on standard input of curl.
s3() {
    role=$(metadata meta-data/iam/security-credentials/) || return 1
    credentials=$(metadata "meta-data/iam/security-credentials/$role" | tr -d ' \n') || return 1
    field() { printf '%s' "$credentials" | sed 's/.*"'"$1"'":"\([^"]*\)".*/\1/'; }
    printf 'user = "%s:%s"\nheader = "x-amz-security-token: %s"\n' \
        "$(field AccessKeyId)" "$(field SecretAccessKey)" "$(field Token)" |
        curl -sf -m 60 --aws-sigv4 "aws:amz:$region:s3" --config - "$@"
}
# answer OPERATION EXIT_CODE
answer() {
    name=$(cat "$BIGFLEET_STATE/node-name" 2>/dev/null || hostname | tr 'A-Z' 'a-z')
    printf '%s\n%s\n' "$2" "$name" >"$BIGFLEET_STATE/answer"
    sum=$(sha256sum <"$BIGFLEET_STATE/answer" | cut -d' ' -f1)
    s3 -T "$BIGFLEET_STATE/answer" -H "x-amz-content-sha256: $sum" "$url/$instance/$1.result" &&
        echo "$2" >"$BIGFLEET_STATE/done.$1"
}
configure() {
    empty=e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855
    blob="$BIGFLEET_STATE/blob"
    s3 -H "x-amz-content-sha256: $empty" -o "$blob" "$url/$instance/$1" || return 1
    [ "$(sha256sum <"$blob" | cut -d' ' -f1)" = "$2" ] || return 1
    code=0
    chmod 700 "$blob"
    BIGFLEET_STATE=$BIGFLEET_STATE "$blob" </dev/null >>"$BIGFLEET_STATE/log" 2>&1 || code=$?
    if [ "$code" = 0 ] && [ -x "$BIGFLEET_HOOKS/ready" ]; then
        until "$BIGFLEET_HOOKS/ready"; do sleep "$interval"; done
    fi
    rm -f "$blob"
    echo "$code" >"$BIGFLEET_STATE/ran.$1"
}
drain() {
    code=0
    if [ -x "$BIGFLEET_HOOKS/drain" ]; then
        "$BIGFLEET_HOOKS/drain" "$(metadata meta-data/tags/instance/bigfleet:cluster)" "$2" || code=$?
    else
        for unit in kubelet k3s-agent; do systemctl stop "$unit" 2>/dev/null; done
    fi
    echo "$code" >"$BIGFLEET_STATE/ran.$1"
}
while sleep "$interval"; do
    instance=$(metadata meta-data/instance-id) || continue
    for verb in configure drain; do
        order=$(metadata "meta-data/tags/instance/bigfleet:$verb") || continue
        operation=${order%% *} argument=${order#* }
        [ -e "$BIGFLEET_STATE/done.$operation" ] && continue
        [ -e "$BIGFLEET_STATE/ran.$operation" ] || "$verb" "$operation" "$argument" || continue
        answer "$operation" "$(cat "$BIGFLEET_STATE/ran.$operation")"
    done
done
