"""Log-probs and entropies of sampled tokens that are recorded for readers (`record_token_values`). Nothing is
trained on them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from turnwise.pipelines.model_role import ModelRole
from turnwise.protocols import Output
from turnwise.spec import TokenValue
from turnwise.types import FloatArray, Group, Sample, samples_of

Values = dict[TokenValue, list[FloatArray]]
"""By name, an array [N] for each sample."""


@dataclass(frozen=True, slots=True)
class TokenValueRecorder:
    """Notes values of the trained tokens on their turns, for the journal: `old` (the trainer's log-prob
    before the update), `ref` (the reference's) and `entropy` (the policy's, before the update)."""

    names: Collection[TokenValue]
    policy: ModelRole

    def note(self, groups: Sequence[Group]) -> None:
        """Writes the values into `Turn.token_values`, and computes those that the step doesn't need. Call it
        before the update; the reference's log-probs must be there if `ref` is one of the names."""
        samples = samples_of(groups)
        if not self.names or not samples:
            return
        values = self._values(samples)
        position = 0
        for group in groups:
            for trajectory in group.trajectories:
                for sample in trajectory.samples:
                    for span in sample.turn_spans:
                        turn = trajectory.turns[span.turn]
                        turn.token_values = {
                            name: arrays[position][span.start : span.stop] for name, arrays in values.items()
                        }
                    position += 1

    def _values(self, samples: Sequence[Sample]) -> Values:
        missing: list[Output] = []
        has_old = all(sample.old_logprobs is not None for sample in samples)
        if "old" in self.names and not has_old:
            missing.append("logprobs")
        if "entropy" in self.names:
            missing.append("entropy")
        computed: list[dict[Output, FloatArray]] = []
        if missing:
            computed = self.policy.outputs(samples, frozenset(missing))
        values: Values = {}
        if "old" in self.names and has_old:
            values["old"] = [sample.old_logprobs for sample in samples if sample.old_logprobs is not None]
        elif "old" in self.names:
            values["old"] = [arrays["logprobs"] for arrays in computed]
        if "ref" in self.names:
            values["ref"] = [sample.ref_logprobs for sample in samples if sample.ref_logprobs is not None]
        if "entropy" in self.names:
            values["entropy"] = [arrays["entropy"] for arrays in computed]
        return values
