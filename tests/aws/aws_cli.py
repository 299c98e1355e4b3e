"""Plays the AWS CLI for commands such as `aws SERVICE ACTION --parameter VALUE`, over the models of botocore.

python -m tests.aws.aws_cli SERVICE ACTION [--parameter VALUE|file://PATH]...

Unknown services, actions and parameters fail, as they do with the AWS CLI. Its short forms of structures are not read:
those are JSON here. docs.aws.amazon.com/cli/latest/userguide/cli-usage-parameters.html
"""

import json
import sys
from pathlib import Path
from typing import Any

import boto3
from botocore import xform_name

#: The CLI's names of services that botocore names otherwise.
SERVICES = {"s3api": "s3"}


def main(words: list[str]) -> None:
    service, action, *options = words
    client = boto3.client(SERVICES.get(service, service))
    operations = {xform_name(name, "-"): name for name in client.meta.service_model.operation_names}
    shape = client.meta.service_model.operation_model(operations[action]).input_shape
    members = {f"--{xform_name(name, '-')}": (name, member) for name, member in shape.members.items()}
    parameters = {}
    for option, text in zip(options[::2], options[1::2], strict=True):
        name, member = members[option]
        parameters[name] = _value(text, member.type_name)
    answer = getattr(client, xform_name(operations[action]))(**parameters)
    answer.pop("ResponseMetadata")
    if answer:
        print(json.dumps(answer, indent=4, default=str))


def _value(text: str, kind: str) -> Any:
    if text.startswith("file://"):
        text = Path(text.removeprefix("file://")).read_text("utf-8")
    if kind in ("structure", "list", "map"):
        return json.loads(text)
    return int(text) if kind == "integer" else text


if __name__ == "__main__":
    main(sys.argv[1:])
