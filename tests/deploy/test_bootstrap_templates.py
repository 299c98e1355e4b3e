"""What the templates of deploy/bootstrap do on a machine: a real shell runs them; kubeadm, k3s, systemd are faked."""

import base64
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigfleet.model.frames import BootstrapRequest, Taint
from bigfleet.operator.bootstrap.rendering import RenderingFault, render
from bigfleet.operator.bootstrap.variables import sample_variables, template_variables
from tests.engine.proof import in_proportion

FOLDER = Path(__file__).parent.parent.parent / "deploy" / "bootstrap"
KINDS = ("kubeadm", "k3s")
#: `sh` is dash on Debian and bash on others.
SHELLS = [("sh",), *([("bash", "--posix")] if shutil.which("bash") else [])]
TOKEN = "abcdef.0123456789abcdef"
#: What an administrator fills in; quotes and blanks in them do no harm either.
SITE = {
    "api_server": "10.0.0.1:6443",
    "ca_cert_hash": "sha256:" + "a" * 64,
    "server_url": "https://10.0.0.1:6443",
    "ca_hash": "b" * 64,
}
TO_SET = re.compile(r"SET_(\w+?)_IN_THIS_TEMPLATE")
HOSTILE = [
    "a b",
    "$(touch pwned)",
    "`touch pwned`",
    "'; touch pwned; '",
    '"; touch pwned; "',
    "a\nb: c",
    "EOF",
    "ä\u2028\U0001f600",
    "%s%n",
    "\\n",
    "-e",
    "a,b=c",
    "{{ 7 * 7 }}",
    "x" * 300,
    "",
]
TEXTS = st.one_of(
    st.sampled_from(HOSTILE), st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
)

KUBEADM = """#!/bin/sh
echo "kubeadm $*" >> "$FAKES/calls"
case $1 in
  reset) rm -f "$BIGFLEET_JOIN_ROOT/etc/kubernetes/kubelet.conf"; exit 0 ;;
esac
cp "$3" "$FAKES/config.yaml"
failures=$(cat "$FAKES/failures")
[ "$failures" -gt 0 ] || exit 0
echo $((failures - 1)) > "$FAKES/failures"
exit 1
"""
SYSTEMCTL = """#!/bin/sh
echo "systemctl $*" >> "$FAKES/calls"
exit 0
"""
# As long as joins are to fail, the agent has no certificate.
SLEEP = """#!/bin/sh
echo "sleep $*" >> "$FAKES/calls"
failures=$(cat "$FAKES/failures")
agent=$BIGFLEET_JOIN_ROOT/var/lib/rancher/k3s/agent
if [ "$failures" -le 1 ]; then mkdir -p "$agent"; echo certificate > "$agent/client-kubelet.crt"; fi
[ -e "$FAKES/is_kubeadm" ] || echo $((failures - 1)) > "$FAKES/failures"
exit 0
"""
NOTHING = "#!/bin/sh\nexit 0\n"


def filled(path: Path) -> str:
    """Return the template as an administrator leaves it."""
    source = path.read_text(encoding="utf-8")
    assert TO_SET.search(source)
    return TO_SET.sub(lambda found: f"'{SITE[found[1]]}'", source)


def rendered(kind: str, form: str, variables: Mapping[str, Any]) -> str:
    path = FOLDER / f"{kind}.{form}.j2"
    return render(filled(path), str(path), variables)


def variables_of(**fields: Any) -> dict[str, Any]:
    """Return the variables of a machine with a token."""
    request = BootstrapRequest(request_id="r", **{"cluster_id": "blue", "machine_id": "aws/i-1", **fields})
    return template_variables(request.cluster_id, request, token=TOKEN, expires_unix_seconds=1_767_225_600)


@dataclass(frozen=True)
class Machine:
    """A folder that a script takes for a machine."""

    root: Path
    fakes: Path

    def run(self, script: str, shell: Sequence[str] = ("sh",)) -> "subprocess.CompletedProcess[str]":
        path = self.root.parent / "join.sh"
        path.write_text(script, encoding="utf-8")
        checked = subprocess.run([*shell, "-n", str(path)], capture_output=True, text=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")
        return subprocess.run(
            [*shell, str(path)],
            cwd=self.root,
            env={
                "PATH": f"{self.fakes / 'bin'}:{os.environ['PATH']}",
                "BIGFLEET_JOIN_ROOT": str(self.root),
                "FAKES": str(self.fakes),
            },
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self) -> list[str]:
        path = self.fakes / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def log(self) -> str:
        return (self.root / "var/log/bigfleet-join.log").read_text()

    def failures(self, count: int) -> None:
        (self.fakes / "failures").write_text(f"{count}\n")


def machine_in(folder: Path, kind: str, *, failures: int = 0) -> Machine:
    machine = Machine(folder / "root", folder / "fakes")
    (machine.fakes / "bin").mkdir(parents=True)
    (machine.root / "usr/local/bin").mkdir(parents=True)
    programs = {"sleep": SLEEP, "systemctl": SYSTEMCTL}
    if kind == "kubeadm":
        programs |= {"kubeadm": KUBEADM, "kubelet": NOTHING}
        (machine.fakes / "is_kubeadm").touch()
    else:
        (machine.root / "usr/local/bin/k3s").write_text(NOTHING)
        (machine.root / "usr/local/bin/k3s").chmod(0o755)
    for name, text in programs.items():
        (machine.fakes / "bin" / name).write_text(text)
        (machine.fakes / "bin" / name).chmod(0o755)
    machine.failures(failures if kind == "kubeadm" else failures + 1)
    return machine


def node_of(kind: str, machine: Machine) -> dict[str, Any]:
    """Return labels, taints and providerID that the kubelet would register with."""
    if kind == "kubeadm":
        config = yaml.safe_load((machine.fakes / "config.yaml").read_text())
        registration = config["nodeRegistration"]
        arguments = {argument["name"]: argument["value"] for argument in registration["kubeletExtraArgs"]}
        labels = [text for text in arguments["node-labels"].split(",") if text]
        taints = [f"{taint['key']}={taint['value']}:{taint['effect']}" for taint in registration["taints"]]
        provider_id = arguments.get("provider-id", "")
    else:
        config = yaml.safe_load((machine.root / "etc/rancher/k3s/config.yaml").read_text())
        labels = config.get("node-label", [])
        taints = config.get("node-taint", [])
        (argument,) = config.get("kubelet-arg", ["provider-id="])
        provider_id = argument.removeprefix("provider-id=")
    return {
        "labels": dict(label.split("=", 1) for label in labels),
        "taints": taints,
        "provider_id": provider_id,
        "config": config,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_machine_registers_with_its_labels_taints_and_provider_id(kind: str, tmp_path: Path) -> None:
    machine = machine_in(tmp_path, kind)
    variables = variables_of(
        provider_id="aws:///z/i-1",
        labels={
            "node.kubernetes.io/instance-type": "m.large",
            "topology.kubernetes.io/zone": "z",
            "topology.bigfleet/rack": "r-1",
            "bigfleet.lucy.sh/capacity-type": "Spot",
            "plain": "",
        },
        taints=(Taint("dedicated", "gpu", "NoSchedule"), Taint("empty", "", "NoExecute")),
    )

    done = machine.run(rendered(kind, "sh", variables))

    assert done.returncode == 0, done.stderr
    node = node_of(kind, machine)
    assert node["labels"] == variables["labels"]
    assert node["labels"]["bigfleet.lucy.sh/machine-id"] == variables["machine_id_label"]
    assert node["taints"] == ["dedicated=gpu:NoSchedule", "empty=:NoExecute"]
    assert node["provider_id"] == "aws:///z/i-1"
    assert machine.log().rstrip().endswith("bigfleet-join: joined")


def test_kubeadm_joins_with_a_configuration_that_pins_the_authority_and_is_removed(tmp_path: Path) -> None:
    machine = machine_in(tmp_path, "kubeadm")

    machine.run(rendered("kubeadm", "sh", variables_of()))

    config = node_of("kubeadm", machine)["config"]
    assert (config["apiVersion"], config["kind"]) == ("kubeadm.k8s.io/v1beta4", "JoinConfiguration")
    assert config["discovery"]["bootstrapToken"] == {
        "apiServerEndpoint": SITE["api_server"],
        "caCertHashes": [SITE["ca_cert_hash"]],
        "token": TOKEN,
    }
    assert not (machine.root / "run/bigfleet/join.yaml").exists()
    assert [call.split()[:2] for call in machine.calls()] == [["kubeadm", "join"]]


def test_k3s_starts_an_agent_whose_token_pins_the_authority(tmp_path: Path) -> None:
    machine = machine_in(tmp_path, "k3s")

    machine.run(rendered("k3s", "sh", variables_of()))

    config = node_of("k3s", machine)["config"]
    token_file = machine.root / "etc/rancher/k3s/agent-token"
    assert config["server"] == SITE["server_url"]
    assert config["token-file"] == "/etc/rancher/k3s/agent-token"
    assert token_file.read_text() == f"K10{SITE['ca_hash']}::{TOKEN}\n"
    assert token_file.stat().st_mode & 0o777 == 0o600
    unit = (machine.root / "etc/systemd/system/k3s-agent.service").read_text().splitlines()
    assert "ExecStart=/usr/local/bin/k3s agent" in unit
    assert machine.calls()[:3] == [
        "systemctl daemon-reload",
        "systemctl enable k3s-agent.service",
        "systemctl restart k3s-agent.service",
    ]


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell[0])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=in_proportion(100, least=10), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    labels=st.dictionaries(TEXTS, TEXTS, max_size=4),
    taint=st.tuples(TEXTS, TEXTS, TEXTS),
    texts=st.tuples(TEXTS, TEXTS, TEXTS),
)
def test_no_value_is_taken_for_a_command_or_for_yaml(
    kind: str,
    shell: Sequence[str],
    tmp_path_factory: pytest.TempPathFactory,
    labels: dict[str, str],
    taint: Any,
    texts: Any,
) -> None:
    machine = machine_in(tmp_path_factory.mktemp("machine"), kind)
    cluster_id, machine_id, provider_id = texts
    variables = variables_of(
        cluster_id=cluster_id, machine_id=machine_id, provider_id=provider_id, labels=labels, taints=(Taint(*taint),)
    )

    done = machine.run(rendered(kind, "sh", variables), shell)

    assert done.returncode == 0, done.stderr
    assert not list(machine.root.rglob("*pwned*"))
    node = node_of(kind, machine)
    assert node["provider_id"] == provider_id
    assert node["taints"] == [f"{taint[0]}={taint[1]}:{taint[2]}"]
    # What a kubelet would refuse is left out; the rest is as it was.
    assert node["labels"].items() <= variables["labels"].items()
    if machine_id:
        assert node["labels"]["bigfleet.lucy.sh/machine-id"] == variables["machine_id_label"]
    assert set(config_keys(node["config"])) <= CONFIG_KEYS


CONFIG_KEYS = {
    *("apiVersion", "kind", "discovery", "timeouts", "nodeRegistration"),
    *("server", "token-file", "node-label", "node-taint", "kubelet-arg"),
}


def config_keys(config: Mapping[str, Any]) -> list[str]:
    return list(config)


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell[0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_label_that_a_kubelet_may_not_set_is_left_out(kind: str, shell: Sequence[str], tmp_path: Path) -> None:
    machine = machine_in(tmp_path, kind)
    left_out = {
        "node-role.kubernetes.io/worker": "",
        "kubernetes.io/role": "x",
        "node-restriction.kubernetes.io/x": "x",
        "example.k8s.io/x": "x",
        "a/b/c": "x",
        "UPPER.example/x": "x",
        "x" * 64: "x",
        "example.com/": "x",
        "example.com/x": "not valid",
        "example.com/y": "-x",
        "example.com/z": "x" * 64,
    }
    by_itself = {
        "beta.kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "kubernetes.io/os": "linux",
        "kubernetes.io/hostname": "h",
    }
    stays = {
        "failure-domain.beta.kubernetes.io/zone": "z",
        "node.kubernetes.io/x": "1",
        "x.node.kubernetes.io/y": "1",
        "notkubernetes.io/x": "1",
        "x" * 63: "y" * 63,
    }

    done = machine.run(rendered(kind, "sh", variables_of(labels={**left_out, **by_itself, **stays})), shell)

    assert done.returncode == 0, done.stderr
    labels = node_of(kind, machine)["labels"]
    assert labels.keys() - {"bigfleet.lucy.sh/machine-id"} == stays.keys()
    for key in left_out:
        assert f"label {key} is left out" in machine.log()
    for key in by_itself:
        assert key not in machine.log()


@pytest.mark.parametrize("kind", KINDS)
def test_a_machine_of_an_older_shard_registers_with_what_is_known(kind: str, tmp_path: Path) -> None:
    machine = machine_in(tmp_path, kind)

    done = machine.run(rendered(kind, "sh", variables_of(machine_id="")))

    assert done.returncode == 0, done.stderr
    node = node_of(kind, machine)
    assert (node["labels"], node["taints"], node["provider_id"]) == ({}, [], "")
    assert None not in node["config"].values()


@pytest.mark.parametrize("kind", KINDS)
def test_a_join_is_tried_again_and_then_fails_with_a_reason(kind: str, tmp_path: Path) -> None:
    machine = machine_in(tmp_path, kind, failures=2)
    done = machine.run(rendered(kind, "sh", variables_of()))
    assert done.returncode == 0, done.stderr
    assert len([call for call in machine.calls() if call.startswith("sleep")]) >= 2

    other = machine_in(tmp_path / "other", kind, failures=1000)
    done = other.run(rendered(kind, "sh", variables_of()))
    assert done.returncode == 1
    assert "FAILED: " in done.stderr
    assert not (other.root / "var/lib/bigfleet/joined").exists()
    waits = len([call for call in other.calls() if call.startswith("sleep")])
    assert waits == {"kubeadm": 9, "k3s": 59}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_that_runs_again_leaves_the_node_alone(kind: str, tmp_path: Path) -> None:
    machine = machine_in(tmp_path, kind)
    script = rendered(kind, "sh", variables_of())
    assert machine.run(script).returncode == 0
    calls = machine.calls()

    done = machine.run(script)

    assert done.returncode == 0
    assert "has joined already" in done.stderr
    assert machine.calls() == calls


def test_kubeadm_resets_a_machine_that_was_a_node_of_another_cluster(tmp_path: Path) -> None:
    machine = machine_in(tmp_path, "kubeadm")
    (machine.root / "etc/kubernetes").mkdir(parents=True)
    (machine.root / "etc/kubernetes/kubelet.conf").touch()

    assert machine.run(rendered("kubeadm", "sh", variables_of(cluster_id="green"))).returncode == 0

    assert [call.split()[1] for call in machine.calls()] == ["reset", "join"]


def test_k3s_removes_what_an_earlier_cluster_left(tmp_path: Path) -> None:
    machine = machine_in(tmp_path, "k3s")
    assert machine.run(rendered("k3s", "sh", variables_of())).returncode == 0
    stale = machine.root / "var/lib/rancher/k3s/agent/stale"
    stale.touch()
    machine.failures(1)

    assert machine.run(rendered("k3s", "sh", variables_of(cluster_id="green"))).returncode == 0

    assert not stale.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_machine_without_the_programs_says_so(kind: str, tmp_path: Path) -> None:
    machine = machine_in(tmp_path, kind)
    program = machine.fakes / "bin/kubelet" if kind == "kubeadm" else machine.root / "usr/local/bin/k3s"
    program.unlink()

    done = machine.run(rendered(kind, "sh", variables_of()))

    assert done.returncode == 1
    assert "is not installed; the machine's image must have it" in done.stderr


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("token", ["", "eyJhbGciOi.jwt.jwt", "ABCDEF.0123456789ABCDEF"])
def test_a_token_that_is_no_bootstrap_token_is_refused_and_not_shown(kind: str, token: str, tmp_path: Path) -> None:
    machine = machine_in(tmp_path, kind)

    done = machine.run(rendered(kind, "sh", {**variables_of(), "token": token}))

    assert done.returncode == 1
    assert "bootstrap token" in done.stderr
    assert not token or token not in done.stdout + done.stderr + machine.log()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("failures", [0, 1000])
def test_no_log_and_no_command_line_has_the_token(kind: str, failures: int, tmp_path: Path) -> None:
    machine = machine_in(tmp_path, kind, failures=failures)

    done = machine.run(rendered(kind, "sh", variables_of(labels={"x": "not valid"})))

    for said in (done.stdout, done.stderr, machine.log(), "\n".join(machine.calls())):
        assert TOKEN.split(".")[1] not in said
        assert "bigfleet-join" in said or said in (done.stdout, "\n".join(machine.calls()))


@pytest.mark.parametrize("kind", KINDS)
def test_cloud_init_runs_the_same_script(kind: str) -> None:
    variables = variables_of(labels={"a": "b"}, provider_id="p://h", taints=(Taint("k", "v", "NoSchedule"),))
    text = rendered(kind, "cloud-init", variables)

    assert text.startswith("#cloud-config\n")
    config = yaml.safe_load(text)
    assert config.keys() == {"write_files", "runcmd"}
    (file,) = config["write_files"]
    assert (file["permissions"], file["owner"], file["encoding"]) == ("0700", "root:root", "b64")
    assert config["runcmd"] == [f"sh {file['path']} && rm -f {file['path']}"]
    script = base64.b64decode(file["content"]).decode()
    assert script == rendered(kind, "sh", variables)
    assert script.startswith("#!/bin/sh\n")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.j2")), ids=lambda path: path.name)
def test_a_template_whose_values_are_not_set_names_the_first_of_them(path: Path) -> None:
    with pytest.raises(RenderingFault, match=r"'SET_\w+_IN_THIS_TEMPLATE' is undefined") as caught:
        render(path.read_text(encoding="utf-8"), str(path), sample_variables("c", with_token=True))

    assert caught.value.line > 1


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.j2")), ids=lambda path: path.name)
def test_a_template_renders_with_the_values_of_the_check_at_start(path: Path) -> None:
    for with_token in (True, False):
        assert render(filled(path), str(path), sample_variables("c", with_token=with_token))


def test_the_page_lists_the_variables_that_templates_have() -> None:
    page = (FOLDER.parent.parent / "docs" / "joining-a-cluster.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| variable \| value \|\n\|---\|---\|\n((?:\|.*\n)+)", page)
    listed = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}

    assert listed == sample_variables("c", with_token=True).keys()


def test_both_kinds_begin_alike() -> None:
    """Templates cannot include one another: what they have in common is repaired in both."""
    parts = {}
    for kind in KINDS:
        script = (FOLDER / f"{kind}.sh.j2").read_text(encoding="utf-8").partition("#!/bin/sh")[2]
        parts[kind] = script.partition("attempts_max=")[0]

    assert parts["kubeadm"] == parts["k3s"]
    assert len(parts["k3s"].splitlines()) > 50


def test_there_is_a_script_and_a_cloud_config_for_each_kind() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {
        f"{kind}.{form}.j2" for kind in KINDS for form in ("sh", "cloud-init")
    }
