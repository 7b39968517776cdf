"""Define the input of the policy: all facts about a service that it needs. `kvpilot backtest` uses it, too."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.api.words import Outcome, Reason
from kvpilot_operator.decide.load.workload import Workload
from kvpilot_operator.state.snapshot import ModelFacts, NodeFacts
from kvpilot_operator.state.status import Denied, Experience, Saturation, ScaleInBackoff
from kvpilot_operator.times import utc

# After a rollback, the next change of the dtype waits this long, or minDwellSeconds if that is shorter. Without this
# wait, a service could try its whole ladder within an hour.
COOL_DOWN_SECONDS = 3600
# A step to a larger dtype waits this many times minDwellSeconds. Otherwise, each quiet night would change the dtype
# twice.
CLIMB_DWELLS = 4


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """All facts about one service at one moment that the policy needs."""

    now: datetime
    spec: Spec
    workload: Workload
    dtype: str
    """The serving dtype."""
    replicas: int
    """Requested replicas."""
    ready: int
    """Replicas that answer."""
    node: NodeFacts
    model: ModelFacts | None = None
    recent_tokens: int = 0
    """The recent window in tokens, as the serving engines report it."""
    denied: tuple[Denied, ...] = ()
    history: tuple[Experience, ...] = ()
    saturations: tuple[Saturation, ...] = ()
    """Request rates at which requests queued, from the last decision that recorded any."""
    dtype_changed: datetime | None = None
    replicas_changed: datetime | None = None
    scale_in_backoff: ScaleInBackoff | None = None
    """The number of replicas that was recently too few, or None."""
    rolled_back: datetime | None = None
    """Time of the last rollback, unless a change of the spec caused it."""
    busy: str | None = None
    """The reason why no step may begin now, such as a canary in flight; None if a step may begin."""
    yields: bool = False
    """True if a surge may end the trial in flight, so that replicas are added at once."""
    no_canary: str | None = None
    """The reason why no dtype change may begin now, such as a pause; None if a change may begin."""

    @property
    def loading(self) -> bool:
        """Return True if missing replicas may still start. Until the progress deadline they count as capacity."""
        if self.ready >= self.replicas or self.replicas_changed is None:
            return False
        return self.now < self.replicas_changed + timedelta(seconds=self.spec.canary.progress_deadline_seconds)

    @property
    def counted(self) -> int:
        """Return the number of replicas that count as capacity: ready ones, and those that may still become ready."""
        return max(1, self.replicas if self.loading else min(self.ready, self.replicas) or self.replicas)

    def experience(self, dtype: str) -> Iterator[Experience]:
        """Yield earlier canaries that changed the serving dtype to `dtype`, newest first.

        Skip those with another model, image, GPU or recent window than the present one.
        """
        engine, window = self.spec.engine, self.spec.kv_cache.recent_tokens
        about = (dtype, self.dtype, self.spec.model.source, engine.image, self.node.gpu, window)
        known = (e for e in self.history if e.reason != Reason.SUPERSEDED)
        return (e for e in known if (e.dtype, e.from_dtype, e.model, e.image, e.gpu, e.recent_tokens) == about)

    def canary_closed(self, *, climb: bool = False) -> tuple[Outcome, str] | None:
        """Return None if a dtype change may begin now, else the outcome that each candidate dtype gets, and the reason.

        The reason stays the same until the wait ends. climb: True for a change to a larger dtype, which waits longer.
        """
        if self.no_canary is not None:
            return Outcome.NO_CANARY, self.no_canary
        back, changed, dwell = self.rolled_back, self.dtype_changed, self.spec.kv_cache.min_dwell_seconds
        if back is not None and self.now < (until := back + timedelta(seconds=min(COOL_DOWN_SECONDS, dwell))):
            return Outcome.COOLING_DOWN, f"a canary was rolled back; the dtype may not change before {utc(until)}"
        wait = timedelta(seconds=dwell * (CLIMB_DWELLS if climb else 1))
        if changed is not None and self.now < (until := changed + wait):
            words = f"the dtype changed at {utc(changed)}; it may not change before {utc(until)}"
            return Outcome.COOLING_DOWN, words
        return None
