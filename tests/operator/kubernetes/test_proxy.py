"""Which proxy the environment names for a server."""

import pytest

from bigfleet.operator.kubernetes.endpoint import proxy_from_environment

PROXY = {"HTTPS_PROXY": "http://proxy:3128"}


@pytest.mark.parametrize(
    ("server", "environment", "proxy"),
    [
        ("https://api:6443", {}, ""),
        ("https://api:6443", PROXY, "http://proxy:3128"),
        ("https://api:6443", {"https_proxy": "proxy:3128"}, "http://proxy:3128"),
        ("http://api", PROXY, ""),
        ("http://api", {"HTTP_PROXY": "http://other"}, "http://other"),
        ("https://localhost:6443", PROXY, ""),
        ("https://127.0.0.1:6443", PROXY, ""),
        ("https://[::1]:6443", PROXY, ""),
    ],
)
def test_a_proxy_is_named_by_scheme(server: str, environment: dict[str, str], proxy: str) -> None:
    assert proxy_from_environment(server, environment) == proxy


@pytest.mark.parametrize(
    ("server", "no_proxy", "exempt"),
    [
        ("https://api.example.com", "example.com", True),
        ("https://api.example.com", ".example.com", True),
        ("https://api.example.com", "*.example.com", True),
        ("https://example.com", "example.com", True),
        ("https://example.com", ".example.com", False),
        ("https://badexample.com", "example.com", False),
        ("https://api", "other, API ,", True),
        ("https://api", "*", True),
        ("https://api", "", False),
        ("https://10.1.2.3:443", "10.0.0.0/8", True),
        ("https://11.1.2.3:443", "10.0.0.0/8", False),
        ("https://[fd00::1]:443", "fd00::/8", True),
        ("https://[fd00::1]:443", "[fd00::1]", True),
        ("https://10.1.2.3:443", "10.1.2.3:443", True),
        ("https://10.1.2.3:443", "10.1.2.3:80", False),
        ("https://api", "10.0.0.0/8", False),
        ("https://10.1.2.3", "nonsense/8", False),
    ],
)
def test_no_proxy_names_hosts_addresses_and_networks(server: str, no_proxy: str, exempt: bool) -> None:
    assert (proxy_from_environment(server, {**PROXY, "NO_PROXY": no_proxy}) == "") == exempt
