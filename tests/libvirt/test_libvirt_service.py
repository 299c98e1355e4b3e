"""The unit of a provider with the drop-in for libvirt: a program stands for ssh, and no daemon runs."""

import os
import re
import stat
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from tests.deploy.notified import NotifiedProcess, unit_words
from tests.deploy.systemd_units import drop_ins_of
from tests.guides import executable
from tests.libvirt.daemon import require_libvirt
from tests.libvirt.providers import HOSTS
from tests.patience import wait_until
from tests.processes import bigfleet, free_port, run_bigfleet

SERVICE = "bigfleet-provider@kvm.service"
#: Writes its user, its host and its key, and connects to nothing.
SSH = """#!/bin/sh
while [ "$1" != -- ]; do
    case $1 in
    -l) user=$2 ;;
    -i) key=$2 ;;
    esac
    shift
done
echo "$user@$2 $(cat "$key")" >> {log}
exit 255
"""


@pytest.mark.slow
def test_a_provider_dials_other_hosts_with_the_key_of_its_unit(tmp_path: Path) -> None:
    """It becomes ready although no host answers; the URI is that of the drop-in's comment."""
    require_libvirt()
    made = run_bigfleet("certs", "dev", "tls", "--provider=kvm", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    log = tmp_path / "ssh.log"
    executable(tmp_path / "bin" / "ssh", SSH.format(log=log))
    (tmp_path / "kvm" / "kubeconfigs").mkdir(parents=True)
    (tmp_path / "kvm" / "ssh-key").write_text("the key\n")
    (tmp_path / "kvm" / "ssh-key").chmod(stat.S_IRUSR)
    backend = f"libvirt --hosts={tmp_path}/kvm/hosts.yaml --kubeconfig-dir={tmp_path}/kvm/kubeconfigs"
    variables = {"BACKEND": backend, "ARGS": f"--addr=127.0.0.1:{free_port()} --metrics-addr=off"}
    words = [*bigfleet(), *unit_words(SERVICE, tmp_path, variables)]
    (drop_in,) = drop_ins_of(SERVICE)
    (uri,) = re.findall(r"(qemu\+ssh://\S+)", drop_in.read_text())
    uri = uri.replace(f"/run/credentials/{SERVICE}", str(tmp_path / f"credentials-{SERVICE}"))
    hosts = {**HOSTS, "hosts": [{**HOSTS["hosts"][0], "uri": uri}]}
    (tmp_path / "kvm" / "hosts.yaml").write_text(yaml.safe_dump(hosts))
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}

    with closing(NotifiedProcess(words, "kvm", tmp_path, environment)) as kvm:
        kvm.wait_for("READY=1")
        wait_until(log.exists, kvm.log.read_text)

    assert set(log.read_text().splitlines()) == {"bigfleet@kvm-2 the key"}
    assert (tmp_path / "lib" / "bigfleet-provider-kvm" / "provider.db").is_file()
