"""Lists the states that each kind of action requires, leads to, and is retried from."""

from bigfleet.engine.decision import ActionKind
from bigfleet.model.states import MachineState

#: The state that a machine must still be in when its action is enqueued, and again when it starts.
REQUIRED_STATE = {
    ActionKind.BOOTSTRAP: MachineState.IDLE,
    ActionKind.PROVISION: MachineState.SPECULATIVE,
    ActionKind.RECLAIM: MachineState.CONFIGURED,
    ActionKind.PREEMPT: MachineState.CONFIGURED,
    ActionKind.DELETE: MachineState.IDLE,
}
#: Where an action leads; a machine that is there already needs nothing. A Bootstrap's goal depends on its row (B1).
GOAL_STATE = {
    ActionKind.RECLAIM: MachineState.IDLE,
    ActionKind.PREEMPT: MachineState.IDLE,
    ActionKind.DELETE: MachineState.SPECULATIVE,
}
#: The transition that a re-drive of each kind is about; a Preempt drains like a Reclaim.
REDRIVEN_STATE = {
    ActionKind.PROVISION: MachineState.CREATING,
    ActionKind.BOOTSTRAP: MachineState.CONFIGURING,
    ActionKind.RECLAIM: MachineState.DRAINING,
    ActionKind.PREEMPT: MachineState.DRAINING,
    ActionKind.DELETE: MachineState.DELETING,
}
