"""Defines how an action can end, and the record of one action from decision to end.

docs/spec/shard.md §9.7. An outcome follows from the type of the answer or error, never from message text.
"""

from dataclasses import dataclass
from enum import Enum

from bigfleet.engine.decision import Action, ActionKind
from bigfleet.shard.ports import RefusalKind


class ActionOutcome(Enum):
    """Label of an action's end."""

    SUCCESS = "success"
    NOOP = "noop"
    STALE = "stale"
    NO_SESSION = "no_session"
    OPERATOR_UNRESPONSIVE = "operator_unresponsive"
    BLOB_TIMEOUT = "blob_timeout"
    BLOB_ERROR = "blob_error"
    BLOB_EXPIRED = "blob_expired"
    CONFIGURE_ERROR = "configure_error"
    PROVIDER_ERROR = "provider_error"
    REFUSED = "refused"
    EXHAUSTED = "exhausted"
    NOT_FOUND = "not_found"
    NOT_SUPPORTED = "not_supported"
    INVALID_RECORD = "invalid_record"
    UNKNOWN_OUTCOME = "unknown_outcome"
    TRANSITION_ERROR = "transition_error"
    TRANSITION_RACED_TO_IDLE = "transition_raced_to_idle"
    WOULD_NOT_FIT = "would_not_fit"
    FENCED = "fenced"
    CTX_CANCELED = "ctx_canceled"


#: What driving a transition again is called, beside the kinds of actions.
REDRIVE_LABEL = "Redrive"
#: Name of the call that fences a machine before its release (docs/spec/coordinator.md §9.3, H3).
FENCE_TOUCH_LABEL = "FenceTouch"
#: How the reason of an action begins that an instruction asked for; its id follows.
COORDINATOR_REASON = "coordinator."

#: What a refusal is called, where the call's kind makes no difference; whether it is counted decides between the other
#: two.
REFUSAL_OUTCOMES = {
    RefusalKind.FENCED: ActionOutcome.FENCED,
    RefusalKind.NOT_FOUND: ActionOutcome.NOT_FOUND,
    RefusalKind.NOT_SUPPORTED: ActionOutcome.NOT_SUPPORTED,
    RefusalKind.UNKNOWN_OUTCOME: ActionOutcome.UNKNOWN_OUTCOME,
    RefusalKind.NOT_READY: ActionOutcome.REFUSED,
}


@dataclass(slots=True, eq=False, kw_only=True)
class ActionRecord:
    """One action on its way; touched by the shard's loop alone."""

    action_id: str
    action: Action
    decided_cycle: int
    decided_unix_nanos: int
    executed_cycle: int = 0
    #: 0 while it is running.
    finished_unix_nanos: int = 0
    #: None while it is running; also `suppressed` and `dryrun`, which no worker produces.
    outcome: ActionOutcome | None = None
    disposition: str = ""
    message: str = ""
    operation_id: str = ""
    #: It is counted in metrics and has no audit record and no log line of its own.
    is_counted_only: bool = False
    #: The same call again for a transition that does not end (docs/spec/shard.md §9.5).
    is_redrive: bool = False
    #: A call that cannot apply and moves the provider's mark.
    is_fence_touch: bool = False
    #: The row that the machine is or was for, as the action or the machine's stamps name it.
    need_fingerprint: str = ""
    group: str = ""
    #: On the monotonic clock, when its work began.
    started_seconds: float = 0.0
    #: From there to its end; 0 for what was not carried out.
    seconds: float = 0.0
    #: A drain that began without an operator, so that no budget of a pod was honoured.
    is_without_session: bool = False
    #: Sequence number of the fence token of its mutating call, 0 when there was none.
    token_sequence: int = 0

    @property
    def kind_label(self) -> str:
        """The name of what was done, such as `Bootstrap`, or `Redrive`."""
        if self.is_fence_touch:
            return FENCE_TOUCH_LABEL
        return REDRIVE_LABEL if self.is_redrive else self.action.kind.label

    @property
    def outcome_label(self) -> str:
        """The label that readers see: empty while the action runs."""
        if self.disposition:
            return self.disposition
        return self.outcome.value if self.outcome is not None else ""


def instruction_reason(action: Action) -> str:
    """Return why a cluster loses a machine, in the words of its instruction."""
    if action.reason == "phase3.unjoined":
        return "unjoined"
    if action.kind is not ActionKind.PREEMPT:
        return "reclaim"
    return "cross_shard_preempt" if action.reason.startswith(COORDINATOR_REASON) else "preempt"
