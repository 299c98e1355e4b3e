"""Stands before moto's server and does what AWS does where moto does not: tokens, refusals, faults, delays.

A WSGI application around moto's own, which it does not change. Each rule names the page of AWS that says so. What it
adds for tests is under /_shim: faults to come, the calls that came, and an agent that answers on instances.
"""

import base64
import csv
import gzip
import io
import json
import re
import socket
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import parse_qsl

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES
from moto.s3.models import s3_backends

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
REGION = "us-east-1"
NAMESPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"
PRICES = Path(__file__).with_name("prices.csv")
#: A call that nothing releases ends anyway.
STALL_SECONDS_MAX = 120.0
#: Parameters that are no part of what a token stands for.
_NOT_COMPARED = ("ClientToken", "Version", "DryRun")


@dataclass
class Fault:
    """An error of calls to come."""

    #: Such as ec2:RunInstances, or s3:PUT.
    action: str
    code: str = ""
    message: str = "an armed fault"
    status: int = 400
    #: before or after the effect: the connection closes without an answer.
    drop: str = ""
    #: The connection stays open until it is released.
    is_stalled: bool = False
    #: Only for calls with this type or zone.
    instance_type: str = ""
    zone: str = ""
    #: For calls with DryRun, which other faults pass over.
    is_dry_run: bool = False
    #: Calls that pass first, and calls that then fail.
    skip: int = 0
    times: int = 1


@dataclass
class State:
    """What the shim knows; `/_shim/reset` forgets all."""

    faults: list[Fault] = field(default_factory=list)
    #: The calls that came, in order.
    calls: list[str] = field(default_factory=list)
    #: Token to the digest of the parameters and the first answer.
    tokens: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    #: Looks for which a new instance does not show, and what is left of them.
    invisible_looks: int = 0
    invisible: dict[str, int] = field(default_factory=dict)
    root_tasks: dict[str, int] = field(default_factory=dict)
    #: Bucket, prefix and exit code of the agents that answer; None: the test plays them.
    agent: dict[str, Any] | None = None


class Refused(Exception):
    """EC2 refuses the call."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(code)
        self.code, self.message, self.status = code, message, status


class Dropped(Exception):
    """The connection closes without an answer."""


@dataclass
class Call:
    """One request."""

    environ: dict[str, Any]
    body: bytes
    service: str
    action: str
    parameters: dict[str, str]

    @property
    def name(self) -> str:
        """Such as ec2:RunInstances."""
        return f"{self.service}:{self.action}"


class StrictShim:
    """The application to serve."""

    def __init__(self, moto: Application) -> None:
        self._moto = moto
        self._lock = threading.RLock()
        #: Set when a call stalls; set when it may go on.
        self._stalled, self._released = threading.Event(), threading.Event()
        self.state = State()
        with PRICES.open(encoding="utf-8", newline="") as file:
            self.prices = {row["instance_type"]: row for row in csv.DictReader(file)}

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if environ["PATH_INFO"].startswith("/_shim/"):
            return _answer(
                start_response, self._control(environ["PATH_INFO"][len("/_shim/") :], json.loads(body or b"{}"))
            )
        call = _call_of(environ, body)
        try:
            return self._serve(call, start_response)
        except Refused as refused:
            return _refusal(start_response, refused, call.service)
        except Dropped:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return []

    # ---- tests ---------------------------------------------------------------------------------------------------

    def _control(self, what: str, asked: dict[str, Any]) -> object:
        with self._lock:
            if what == "reset":
                self.state = State()
                self._stalled.clear()
                self._released.clear()
                for instance in _backend().all_instances():
                    _backend().terminate_instances([instance.id])
            elif what == "fault":
                self.state.faults.append(Fault(**asked))
            elif what == "disarm":
                self.state.faults.clear()
            elif what == "invisible":
                self.state.invisible_looks = asked["looks"]
            elif what == "stalled":
                return self._stalled.is_set()
            elif what == "release":
                self._released.set()
            elif what == "agent":
                self.state.agent = asked
            elif what == "roots":
                return sorted(self.state.root_tasks)
            elif what == "calls":
                return self.state.calls
            elif what == "place":
                subnets = _backend().get_default_subnets()
                return {
                    "ami": next(iter(_backend().amis)),
                    "subnets": {zone: each.id for zone, each in subnets.items()},
                }
            return {}

    def _fault(self, call: Call) -> Fault | None:
        """Return the fault that is meant for this call, and use it up."""
        for fault in self.state.faults:
            zone = call.parameters.get("Placement.AvailabilityZone") or _zone_of(call.parameters.get("SubnetId", ""))
            if (
                fault.action != call.name
                or fault.instance_type not in ("", call.parameters.get("InstanceType"))
                or fault.zone not in ("", zone)
                or fault.is_dry_run != (call.parameters.get("DryRun") == "true")
            ):
                continue
            if fault.skip > 0:
                fault.skip -= 1
                return None
            fault.times -= 1
            if fault.times <= 0:
                self.state.faults.remove(fault)
            return fault
        return None

    # ---- AWS -----------------------------------------------------------------------------------------------------

    def _serve(self, call: Call, start_response: Callable[..., Any]) -> Iterable[bytes]:
        with self._lock:
            self.state.calls.append(call.name)
            fault = self._fault(call)
        if fault is not None and fault.code:
            raise Refused(fault.code, fault.message, fault.status)
        if fault is not None and fault.drop == "before":
            self._drop(fault)
        answer = _Captured()
        chunks = self._handle(call, answer)
        if fault is not None and fault.drop == "after":
            b"".join(chunks)
            self._drop(fault)
        start_response(answer.status, answer.headers)
        return chunks

    def _drop(self, fault: Fault) -> NoReturn:
        if fault.is_stalled:
            self._stalled.set()
            self._released.wait(STALL_SECONDS_MAX)
        raise Dropped

    def _handle(self, call: Call, answer: "_Captured") -> Iterable[bytes]:
        own = {
            "ec2:RunInstances": self._run_instances,
            "ec2:DescribeInstances": self._describe_instances,
            "ec2:CreateTags": self._create_tags,
            "ec2:DescribeSpotPriceHistory": self._spot_prices,
            "ec2:CreateReplaceRootVolumeTask": self._replace_root,
            "ec2:DescribeReplaceRootVolumeTasks": self._root_tasks,
            "pricing:GetProducts": self._products,
        }.get(call.name)
        # One at a time, as a token is looked up and remembered in two steps.
        if own is None:
            return self._forward(call, answer)
        with self._lock:
            content = own(call, answer)
        answer.headers = [(k, v) for k, v in answer.headers if k.lower() != "content-length"]
        answer.headers.append(("Content-Length", str(len(content))))
        return [content]

    def _forward(self, call: Call, answer: "_Captured") -> Iterable[bytes]:
        call.environ["wsgi.input"] = io.BytesIO(call.body)
        return self._moto(call.environ, answer.start)

    def _run_instances(self, call: Call, answer: "_Captured") -> bytes:
        """Ensuring idempotency: docs.aws.amazon.com/ec2/latest/devguide/ec2-api-idempotency.html.

        A token answers its first instance for at least 24 hours after its end, and refuses other parameters.
        """
        token = call.parameters.get("ClientToken", "")
        digest = json.dumps({k: v for k, v in sorted(call.parameters.items()) if k not in _NOT_COMPARED})
        _check_launch(call.parameters)
        if call.parameters.get("DryRun") == "true":
            return b"".join(self._forward(call, answer))
        if token in self.state.tokens:
            known, content = self.state.tokens[token]
            if known != digest:
                raise Refused("IdempotentParameterMismatch", "The parameters differ from those of the first request")
            answer.start("200 OK", [("Content-Type", "text/xml")])
            return _with_present_states(content)
        content = b"".join(self._forward(call, answer))
        if answer.status.startswith("200"):
            if token:
                self.state.tokens[token] = (digest, content)
            for instance_id in re.findall(rb"<instanceId>(i-[0-9a-f]+)</instanceId>", content):
                self.state.invisible[instance_id.decode()] = self.state.invisible_looks
        return content

    def _describe_instances(self, call: Call, answer: "_Captured") -> bytes:
        """Eventual consistency: docs.aws.amazon.com/ec2/latest/devguide/eventual-consistency.html."""
        asked = {value for key, value in call.parameters.items() if key.startswith("InstanceId.")}
        hidden = {each for each, looks in self.state.invisible.items() if looks > 0}
        for each in hidden:
            self.state.invisible[each] -= 1
        if asked & hidden:
            raise Refused("InvalidInstanceID.NotFound", f"The instance IDs '{', '.join(asked & hidden)}' do not exist")
        content = b"".join(self._forward(call, answer))
        return _without(content, hidden) if hidden and answer.status.startswith("200") else content

    def _create_tags(self, call: Call, answer: "_Captured") -> bytes:
        """Tag restrictions: docs.aws.amazon.com/AWSEC2/latest/UserGuide/Using_Tags.html#tag-restrictions."""
        tags = _tags(call.parameters, "Tag.")
        _check_tags(tags)
        content = b"".join(self._forward(call, answer))
        agent = self.state.agent
        if agent is not None and answer.status.startswith("200"):
            for key in ("bigfleet:configure", "bigfleet:drain"):
                if key in tags:
                    name = f"{agent['prefix']}/{call.parameters['ResourceId.1']}/{tags[key].partition(' ')[0]}.result"
                    said = f"{agent.get('exit_code', 0)}\nnode-{call.parameters['ResourceId.1']}\n".encode()
                    s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object(agent["bucket"], name, said)
        return content

    def _spot_prices(self, call: Call, answer: "_Captured") -> bytes:
        types = [value for key, value in call.parameters.items() if key.startswith("InstanceType.")]
        items = "".join(
            f"<item><instanceType>{each}</instanceType><productDescription>Linux/UNIX</productDescription>"
            f"<spotPrice>{self.prices[each]['spot']}</spotPrice><timestamp>2026-01-01T00:00:00Z</timestamp>"
            f"<availabilityZone>{zone}</availabilityZone></item>"
            for each in types
            if each in self.prices
            for zone in self.prices[each]["zones"].split()
        )
        return _xml(answer, "DescribeSpotPriceHistory", f"<spotPriceHistorySet>{items}</spotPriceHistorySet>")

    def _products(self, call: Call, answer: "_Captured") -> bytes:
        """GetProducts: docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-price-list-query-api.html."""
        asked = {each["Field"]: each["Value"] for each in json.loads(call.body)["Filters"]}
        row = self.prices.get(asked.get("instanceType", ""))
        dimension = {"unit": "Hrs", "pricePerUnit": {"USD": row["on_demand"] if row else ""}}
        terms = {"OnDemand": {"A.B": {"priceDimensions": {"A.B.C": dimension}}}}
        answer.start("200 OK", [("Content-Type", "application/x-amz-json-1.1")])
        return json.dumps(
            {"FormatVersion": "aws_v1", "PriceList": [json.dumps({"terms": terms})] if row else []}
        ).encode()

    def _replace_root(self, call: Call, answer: "_Captured") -> bytes:
        task = f"replacevol-{call.parameters['ClientToken'][-17:]}"
        self.state.root_tasks.setdefault(task, 0)
        body = f"<replaceRootVolumeTaskId>{task}</replaceRootVolumeTaskId><taskState>pending</taskState>"
        return _xml(answer, "CreateReplaceRootVolumeTask", f"<replaceRootVolumeTask>{body}</replaceRootVolumeTask>")

    def _root_tasks(self, call: Call, answer: "_Captured") -> bytes:
        items = ""
        for key, task in call.parameters.items():
            if key.startswith("ReplaceRootVolumeTaskId."):
                self.state.root_tasks[task] += 1
                state = "succeeded" if self.state.root_tasks[task] > 1 else "in-progress"
                fields = f"<replaceRootVolumeTaskId>{task}</replaceRootVolumeTaskId><taskState>{state}</taskState>"
                items += f"<item>{fields}</item>"
        tasks = f"<replaceRootVolumeTaskSet>{items}</replaceRootVolumeTaskSet>"
        return _xml(answer, "DescribeReplaceRootVolumeTasks", tasks)


class _Captured:
    """What an application says before its body."""

    def __init__(self) -> None:
        self.status, self.headers = "200 OK", [("Content-Type", "text/xml")]

    def start(self, status: str, headers: list[tuple[str, str]], _error: object = None) -> None:
        self.status, self.headers = status, list(headers)


def _call_of(environ: dict[str, Any], body: bytes) -> Call:
    scope = re.search(r"Credential=[^/]*/[0-9]+/[^/]*/([a-z0-9-]+)/", environ.get("HTTP_AUTHORIZATION", ""))
    service = scope[1] if scope else "s3"
    form = gzip.decompress(body) if environ.get("HTTP_CONTENT_ENCODING") == "gzip" else body
    is_form = "x-www-form-urlencoded" in environ.get("CONTENT_TYPE", "")
    parameters = dict(parse_qsl(form.decode(), keep_blank_values=True)) if is_form else {}
    target = environ.get("HTTP_X_AMZ_TARGET", "").rpartition(".")[2]
    return Call(environ, body, service, parameters.get("Action") or target or environ["REQUEST_METHOD"], parameters)


def _check_launch(parameters: Mapping[str, str]) -> None:
    """RunInstances: docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RunInstances.html and errors-overview.html."""
    instance_type, ami = parameters.get("InstanceType", ""), parameters.get("ImageId", "")
    if instance_type not in INSTANCE_TYPES:
        raise Refused("InvalidParameterValue", f"Invalid value '{instance_type}' for InstanceType.")
    if ami and ami not in _backend().amis:
        raise Refused("InvalidAMIID.NotFound", f"The image id '[{ami}]' does not exist")
    zone = parameters.get("Placement.AvailabilityZone") or _zone_of(parameters.get("SubnetId", ""))
    offered = {
        (each["InstanceType"], each["Location"]) for each in INSTANCE_TYPE_OFFERINGS["availability-zone"][REGION]
    }
    if zone and (instance_type, zone) not in offered:
        text = f"Your requested instance type ({instance_type}) is not supported in your requested Availability Zone"
        raise Refused("Unsupported", f"{text} ({zone}).")
    # Raw, before base64: docs.aws.amazon.com/AWSEC2/latest/UserGuide/user-data.html.
    if len(base64.b64decode(parameters.get("UserData", ""))) > 16_384:
        raise Refused("InvalidParameterValue", "User data is limited to 16384 bytes")
    for number in range(1, 9):
        _check_tags(_tags(parameters, f"TagSpecification.{number}.Tag."))


def _check_tags(tags: Mapping[str, str]) -> None:
    for key, value in tags.items():
        if key.startswith("aws:"):
            raise Refused("InvalidParameterValue", "Tag keys starting with 'aws:' are reserved for internal use")
        if len(value) > 256:
            raise Refused("InvalidParameterValue", f"Tag value exceeds the maximum length of 256: {key}")


def _tags(parameters: Mapping[str, str], prefix: str) -> dict[str, str]:
    numbers = {key[len(prefix) :].partition(".")[0] for key in parameters if key.startswith(prefix)}
    return {parameters[f"{prefix}{n}.Key"]: parameters.get(f"{prefix}{n}.Value", "") for n in numbers}


def _backend() -> Any:
    return ec2_backends[DEFAULT_ACCOUNT_ID][REGION]


def _zone_of(subnet: str) -> str:
    return next(
        (str(each.availability_zone) for each in _backend().get_default_subnets().values() if each.id == subnet), ""
    )


def _with_present_states(content: bytes) -> bytes:
    """Return an answer of RunInstances with the states that its instances have now."""
    for instance_id in re.findall(rb"<instanceId>(i-[0-9a-f]+)</instanceId>", content):
        instance = _backend().get_instance(instance_id.decode())
        now = f"<instanceState><code>{instance._state.code}</code><name>{instance._state.name}</name></instanceState>"
        content = re.sub(rb"<instanceState>.*?</instanceState>", now.encode(), content, flags=re.DOTALL)
    return content


def _without(content: bytes, hidden: set[str]) -> bytes:
    """Return an answer of DescribeInstances without these instances."""
    tree = ET.fromstring(content)
    for instances in tree.iterfind(".//{*}instancesSet"):
        for item in list(instances.iterfind("{*}item")):
            if item.findtext("{*}instanceId", "") in hidden:
                instances.remove(item)
    return ET.tostring(tree)


def _xml(answer: _Captured, action: str, body: str) -> bytes:
    answer.start("200 OK", [("Content-Type", "text/xml")])
    inner = f"<requestId>shim</requestId>{body}"
    return f'<{action}Response xmlns="{NAMESPACE}">{inner}</{action}Response>'.encode()


def _refusal(start_response: Callable[..., Any], refused: Refused, service: str) -> Iterable[bytes]:
    error = f"<Error><Code>{refused.code}</Code><Message>{refused.message}</Message></Error>"
    whole = f"<Response><Errors>{error}</Errors><RequestID>shim</RequestID></Response>"
    content = (error if service == "s3" else whole).encode()
    start_response(f"{refused.status} Refused", [("Content-Type", "text/xml"), ("Content-Length", str(len(content)))])
    return [content]


def _answer(start_response: Callable[..., Any], value: object) -> Iterable[bytes]:
    content = json.dumps(value).encode()
    start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(content)))])
    return [content]
