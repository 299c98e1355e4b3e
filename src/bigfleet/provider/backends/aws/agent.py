"""Renders the agent that runs on instances, as their user data.

docs/spec/aws-provider.md §4. The agent is `agent.sh`. Nothing that is rendered into it may be secret: every process on
an instance can read its user data.
"""

import re
from pathlib import Path
from typing import Final

METADATA_URL: Final = "http://169.254.169.254"
AGENT: Final = Path(__file__).with_name("agent.sh")
_BUCKET: Final = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([A-Za-z0-9._/-]*))?")
#: What a shell reads as it is between single quotes; brackets are those of an IPv6 address.
_PLAIN: Final = re.compile(r"[A-Za-z0-9._:/@\[\]-]+")


class BucketFault(Exception):
    """A place in S3 that cannot be used; the text says why."""


def read_bucket(text: str) -> tuple[str, str]:
    """Return bucket and prefix of `s3://BUCKET/PREFIX`. Raises BucketFault."""
    found = _BUCKET.fullmatch(text)
    if found is None:
        raise BucketFault(f"{text!r} is not a place in S3; write s3://BUCKET/PREFIX")
    return found[1], (found[2] or "").strip("/")


def bucket_url(bucket: str, prefix: str, *, region: str, endpoint_url: str | None) -> str:
    """Return the URL of a place in S3 as instances reach it."""
    if endpoint_url is not None:
        base = f"{endpoint_url.rstrip('/')}/{bucket}"
    else:
        domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
        # The certificate of S3 does not cover a name with dots in front of it.
        base = f"https://s3.{region}.{domain}/{bucket}" if "." in bucket else f"https://{bucket}.s3.{region}.{domain}"
    return f"{base}/{prefix}" if prefix else base


def render_agent(url: str, *, region: str, interval_seconds: float, metadata_url: str = METADATA_URL) -> str:
    """Return the agent's script. Raises ValueError for a value that a shell would read otherwise."""
    values = {"URL": url, "REGION": region, "IMDS": metadata_url, "INTERVAL": f"{interval_seconds:g}"}
    script = AGENT.read_text(encoding="utf-8")
    for name, value in values.items():
        if not _PLAIN.fullmatch(value):
            raise ValueError(f"{value!r} has characters that have no place in the agent's script")
        script = script.replace(f"@{name}@", value)
    return script
