"""The rules of the custom resource definitions, evaluated by an implementation of CEL: what they accept and refuse."""

import pytest

from tests.operator.crd_cases import PARAMETERS, DefinitionCase
from tests.operator.crd_rules import holds
from tests.operator.crd_schema import definitions, step_faults

DEFINITIONS = definitions()


@pytest.mark.parametrize("case", PARAMETERS)
def test_schema_and_rules_accept_and_refuse(case: DefinitionCase) -> None:
    """What the case says, with all its texts."""
    found, _ = step_faults(DEFINITIONS[case.kind], case.spec, case.statuses, holds)

    if not case.refused:
        assert found == []
    for text in case.refused:
        assert any(text in fault for fault in found), found
