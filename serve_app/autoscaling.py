"""How many replicas a tier wants. Ray's controller calls these; they do no I/O.

Ray makes one object per deployment, with `policy_kwargs` as keywords, and calls it ten times a
second; it rounds the answer up and applies the deployment's factors, delays and bounds around it.
What it hands over are means over `look_back_period_s`, of running replicas alone.
"""

from collections.abc import Collection
from typing import Any

from pydantic import PositiveFloat
from ray.serve.config import AutoscalingContext

from encoders.config import Settings


class PatchTargets(Settings):
    """What one Encoder should have outstanding.

    `requests` has to lie below its slots: at the slots a replica is full, and Ray sees hardly more.
    A `fused` replica's requests are those of HTTP, of which one batch holds many.
    """

    patches: PositiveFloat
    requests: PositiveFloat = 1.5


class PatchPolicy:
    """Encoders by patches in their slots, or by batches that wait for a slot, whichever asks more.

    Ray's own policy counts requests: a few huge images then never scale.
    """

    def __init__(self, **targets: float) -> None:
        self.targets = PatchTargets.model_validate(targets)

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Wanted replicas, and the state to be handed back next time: none."""
        by_patches = sum(_values(context, "outstanding_patches")) / self.targets.patches
        return max(by_patches, context.total_num_requests / self.targets.requests), {}


class AgeTargets(Settings):
    """How long an image may wait to be decoded, and the calls that one Batcher may hold."""

    age_s: PositiveFloat
    requests: PositiveFloat = 64.0


class QueueAgePolicy:
    """Batchers by how long images wait to be decoded, or by calls, whichever asks more.

    Age asks for one replica more at a time. Decoded images that wait for an Encoder do not count:
    no Batcher more would help them.
    """

    def __init__(self, **targets: float) -> None:
        self.targets = AgeTargets.model_validate(targets)

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Wanted replicas, and the state to be handed back next time: none."""
        late = max(_values(context, "queue_age_s"), default=0.0) > self.targets.age_s
        by_age = context.current_num_replicas + 1 if late else 0
        return max(by_age, context.total_num_requests / self.targets.requests), {}


def _values(context: AutoscalingContext, stat: str) -> Collection[float]:
    """What each replica recorded under a name: see `record_autoscaling_stats` of the tiers."""
    return (context.aggregated_metrics or {}).get(stat, {}).values()
