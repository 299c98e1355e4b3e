"""Faults of operators and pod controllers, whose processes are real and whose API servers are simulated."""

from datetime import timedelta

from tests.alerts.certificates import issue, make_certificates, tls
from tests.alerts.faults import Course, Fault
from tests.alerts.programs import Fleet
from tests.alerts.prometheus_server import Fired

OF_CLUSTERS = ("operator", "limited", "pods")
FEW = {"requests": 2}
MANY = {"requests": 12}
#: Pods of a cluster; each writes a CapacityRequest.
PODS = {"pods": 20}
TEMPLATE, BROKEN_TEMPLATE = "#cloud-config {{ token }}", "{% for %}"


def build(fleet: Fleet) -> None:
    """A shard, two operators and a pod controller, each in a cluster of its own."""
    make_certificates(fleet)
    shard = fleet.shard("shard", "--id", "s1", "--fake-provider", "24", *tls(fleet, "shard"))
    plain = fleet.shard("plain-shard")
    template = fleet.folder / "template"
    template.write_text(TEMPLATE, encoding="utf-8")
    own = ("--bootstrap-template", str(template), "--bootstrap-token", "secret", *tls(fleet, "operator"))
    quick = ("--rollup-interval", "200ms")
    fleet.cluster_program(
        "operator", "operator", FEW, "--cluster-id", "c1", "--shard-addr", shard.address, *quick, *own
    )
    stub = ("--cluster-id", "c2", "--shard-addr", plain.address, "--bootstrap-stub")
    fleet.cluster_program("limited", "operator", FEW, *stub, *quick)
    fleet.cluster_program("pods", "pod-controller", {})


def set_template(fleet: Fleet, text: str) -> None:
    """Change the template of an operator."""
    (fleet.folder / "template").write_text(text, encoding="utf-8")


def kill_all_of_clusters(fleet: Fleet) -> None:
    """Kill the operators and the pod controller."""
    for name in OF_CLUSTERS:
        fleet[name].kill()


def start_all_of_clusters(fleet: Fleet) -> None:
    """Start them again."""
    for name in OF_CLUSTERS:
        fleet[name].start()


BROKEN_OPERATORS = Course(
    build,
    stages=(
        (
            Fault(
                "the right to read CapacityRequests is revoked",
                {"BigFleetOperatorRightsMissing": "limited", "BigFleetOperatorRollUpsSkipped": "limited"},
                lambda fleet: fleet.set_cluster("limited", {**FEW, "revoked": {"capacityrequests": ["list", "watch"]}}),
                lambda fleet: fleet.set_cluster("limited", FEW),
            ),
            Fault(
                "tokens cannot be written",
                {"BigFleetOperatorBootstrapsFail": "operator"},
                lambda fleet: fleet.set_cluster("operator", {**MANY, "failing": {"secrets": ["create"]}}),
                lambda fleet: fleet.set_cluster("operator", MANY),
            ),
            Fault(
                "the template is changed into what cannot be parsed",
                {"BigFleetOperatorTemplateRejected": "operator"},
                lambda fleet: set_template(fleet, BROKEN_TEMPLATE),
                lambda fleet: set_template(fleet, TEMPLATE),
            ),
            Fault(
                "the certificate of the operator ends in an hour",
                {"BigFleetOperatorCertificateExpires": "operator"},
                lambda fleet: issue(fleet, "operator", timedelta(hours=23)),
                lambda fleet: issue(fleet, "operator", timedelta()),
            ),
            Fault(
                "CapacityRequests of pods cannot be written",
                {"BigFleetPodControllerErrors": "pods"},
                lambda fleet: fleet.set_cluster("pods", {**PODS, "failing": {"capacityrequests": ["create", "patch"]}}),
                lambda fleet: fleet.set_cluster("pods", PODS),
            ),
        ),
        (
            Fault(
                "the shard of an operator is killed",
                {"BigFleetOperatorDisconnected": "limited"},
                lambda fleet: fleet["plain-shard"].kill(),
                lambda fleet: fleet["plain-shard"].start(),
            ),
        ),
        (
            Fault(
                "every operator and pod controller is killed",
                {"BigFleetOperatorAbsent": "", "BigFleetPodControllerAbsent": ""},
                kill_all_of_clusters,
                start_all_of_clusters,
            ),
        ),
    ),
    also=frozenset(
        {
            Fired("BigFleetShardDown", "plain-shard"),
            Fired("BigFleetShardActionsFail", "shard"),
            Fired("BigFleetOperatorDisconnected", "operator"),
        }
    ),
    has_cluster=True,
)
