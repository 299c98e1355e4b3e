"""What an error of AWS means at a launch and elsewhere, and what is remembered of a stockout."""

import ast
import re
from pathlib import Path

import pytest

from bigfleet.model.ids import MachineId
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.provider.backend import MachineView, Stockout, Transient
from bigfleet.provider.backends.aws import errors
from bigfleet.provider.backends.aws.api import CONNECTION, AwsError
from bigfleet.provider.backends.aws.errors import AwsRefused, raised
from bigfleet.provider.backends.aws.stockouts import StockoutMemory
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.provider.backends.aws.memory_aws import MACHINE, TYPE, ZONE

STOCKOUTS = [
    "InsufficientInstanceCapacity",
    "InsufficientCapacity",
    "InsufficientCapacityOnHost",
    "MaxSpotInstanceCountExceeded",
    "VcpuLimitExceeded",
    "InstanceLimitExceeded",
    "Unsupported",
    "ReservationCapacityExceeded",
    "SpotMaxPriceTooLow",
    "InsufficientFreeAddressesInSubnet",
]
TRANSIENT = [
    "RequestLimitExceeded",
    "Throttling",
    "ThrottlingException",
    "ServiceUnavailable",
    "InternalError",
    "IdempotentParameterMismatch",
    CONNECTION,
    # Who calls is not known now.
    "AuthFailure",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidClientTokenId",
    "RequestExpired",
    "NoCredentialsError",
    "CredentialRetrievalError",
]
FINAL = ["UnauthorizedOperation", "AccessDenied", "InvalidAMIID.NotFound", "InvalidParameterValue"]


def error(code: str, status: int = 400) -> AwsError:
    return AwsError("ec2:RunInstances", code, "the text", request_id="r-1", status=status)


def machine(zone: str = ZONE, capacity_type: CapacityType = CapacityType.ON_DEMAND) -> MachineView:
    return MachineView(
        id=MachineId(MACHINE), state=MachineState.CREATING, instance_type=TYPE, zone=zone, capacity_type=capacity_type
    )


@pytest.mark.parametrize("code", STOCKOUTS)
def test_want_of_capacity_is_a_stockout_at_a_launch_and_final_elsewhere(code: str) -> None:
    at_launch = raised(error(code), may_lack_capacity=True)
    assert isinstance(at_launch, Stockout)
    assert at_launch.retry_after_seconds == (86_400.0 if code == "Unsupported" else 300.0)
    assert isinstance(raised(error(code)), AwsRefused)


@pytest.mark.parametrize("code", TRANSIENT)
def test_what_helps_with_time_is_transient(code: str) -> None:
    assert isinstance(raised(error(code), may_lack_capacity=True), Transient)


def test_any_code_with_a_status_from_500_on_is_transient() -> None:
    assert isinstance(raised(error("Strange", 503)), Transient)


@pytest.mark.parametrize("code", FINAL)
def test_everything_else_is_final_with_code_and_request_id(code: str) -> None:
    found = raised(error(code), may_lack_capacity=True)
    assert isinstance(found, AwsRefused)
    assert str(found) == f"ec2:RunInstances: {code}: the text (request r-1)"


def test_a_quota_is_named_as_one() -> None:
    assert str(raised(error("VcpuLimitExceeded"), may_lack_capacity=True)).startswith("quota reached: ec2:RunInstances")


def test_codes_of_aws_are_classified_in_one_module() -> None:
    codes = {text for text in _texts(Path(errors.__file__)) if re.fullmatch(r"[A-Z][a-z]+([A-Z.][A-Za-z]+)+", text)}
    assert {"InsufficientInstanceCapacity", "NoSuchKey", "InvalidInstanceID.NotFound", "DryRunOperation"} <= codes
    for module in Path(errors.__file__).parent.glob("*.py"):
        if module.name != "errors.py":
            assert not codes & _texts(module), module.name


def _texts(module: Path) -> set[str]:
    """Return the string literals of a module."""
    tree = ast.parse(module.read_text("utf-8"))
    return {each.value for each in ast.walk(tree) if isinstance(each, ast.Constant) and isinstance(each.value, str)}


@pytest.mark.virtual_time
@pytest.mark.parametrize(("code", "seconds"), [("InsufficientInstanceCapacity", 180), ("Unsupported", 86_400)])
async def test_a_stockout_is_remembered_for_its_time_and_its_kind_of_machine(code: str, seconds: int) -> None:
    clock = LoopClock()
    memory = StockoutMemory(clock)
    memory.note(machine(), error(code))

    with pytest.raises(Stockout, match=f"not asked again for {seconds} s: .*{code}"):
        memory.check(machine())
    memory.check(machine(zone="us-east-1b"))
    memory.check(machine(capacity_type=CapacityType.SPOT))
    await clock.sleep(seconds - 1)
    assert len(memory) == 1
    await clock.sleep(2)
    assert len(memory) == 0
    memory.check(machine())
