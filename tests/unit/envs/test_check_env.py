"""`check_env` finds and names each defect of an environment, and finds none in a sound one."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from messages import says
from odd_envs import CutEnv, NaNEnv, RaisingEnv, SlowEnv, StuckEnv, WrongTupleEnv
from toy_envs import BanditEnv, IdentityEnv, LettersEnv

from turnwise.envs.checks.checked_env import CallTimes, Timings
from turnwise.envs.checks.examination import CheckSettings, Report, check_env
from turnwise.envs.checks.findings import times
from turnwise.envs.frozen_lake.env import FrozenLakeEnv
from turnwise.errors import EnvironmentFault
from turnwise.types import Media, Observation

QUICK = CheckSettings(num_episodes=8, timeout_s=20.0)


class SoundEnv(IdentityEnv):
    """Shows a letter each turn and wants it back. It passes every check."""

    def __init__(self, split: str = "train", num_turns: int = 3) -> None:
        super().__init__(["a", "b", "c", "d"] if split == "train" else ["w", "x", "y", "z"], num_turns)

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        observation, info = super().reset(seed=seed)
        return self._marked(observation), info

    def step(self, action: str) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return self._marked(observation), reward, terminated, truncated, info

    def expert_action(self) -> str:
        return self._shown[self._turn]

    def state_key(self) -> Any:
        return self._turn, *self._shown

    def _marked(self, observation: str) -> str:
        return f"{self._turn} of {' '.join(self._shown)}: {observation}"


COUNTER = itertools.count()


def sound(**members: Any) -> type:
    """A subclass of SoundEnv with these members. `_marked` turns a letter into an observation."""
    return type("ChangedEnv", (SoundEnv,), members)


def raising(error: Exception) -> Callable[..., None]:
    def method(*_: Any) -> None:
        raise error

    return method


ForgetfulEnv = sound(_marked=lambda self, text: f"{text} {next(COUNTER)}")


def instructing(rules: Callable[[], Any]) -> type:
    """An environment with rules of each reset, which only prompts show."""
    return sound(
        reset=lambda self, seed=None: (SoundEnv.reset(self, seed=seed)[0], {"env_instruction": rules()})
    )


LongEnv = sound(_marked=lambda self, text: "word " * 50 + SoundEnv._marked(self, text))


class GlobalRandomEnv(SoundEnv):
    """Seeds the generator of the whole process and draws from it: right alone, wrong beside its siblings."""

    def reset(self, *, seed: int | None = None) -> Any:
        random.seed(seed)
        return super().reset(seed=seed)

    def step(self, action: str) -> Any:
        observation, _, *rest = super().step(action)
        return observation, random.random(), *rest


class CrowdedEnv(SoundEnv):
    """Starts differently if more than two of its kind are open."""

    num_open: ClassVar[int] = 0

    def __init__(self, split: str = "train") -> None:
        super().__init__(split)
        CrowdedEnv.num_open += 1

    def reset(self, *, seed: int | None = None) -> Any:
        return super().reset(seed=(seed or 0) + max(CrowdedEnv.num_open - 2, 0))

    def close(self) -> None:
        CrowdedEnv.num_open -= 1


class NoMetricsEnv(BanditEnv):
    metric_reductions: ClassVar[Any] = property(lambda self: self.undefined)


class StrictEnv(SoundEnv):
    def step(self, action: str) -> Any:
        if action not in self.actions:
            raise KeyError(action)
        return super().step(action)


class OnceClosedEnv(SoundEnv):
    _is_open = True

    def close(self) -> None:
        if not self._is_open:
            raise RuntimeError("closed already")
        self._is_open = False


class TextActionsEnv(SoundEnv):
    def __init__(self, split: str = "train") -> None:
        super().__init__(split)
        self.actions = "abcd"  # type: ignore[assignment]


class ConstantEnv(SoundEnv):
    def step(self, action: str) -> Any:
        observation, _, *rest = super().step(action)
        return observation, 0.0, *rest


class CloselessEnv:
    """An environment without `step` and `close`."""

    metric_reductions: ClassVar[Mapping[str, Any]] = {}

    def reset(self, *, seed: int | None = None) -> Any:
        return "start", {}


class ListMetricsEnv(SoundEnv):
    metric_reductions: ClassVar[Any] = ["success"]


class AsyncCloseEnv(SlowEnv):
    """Every call is a coroutine, `close` too."""

    async def close(self) -> None:
        return None


def examine(make: Any, settings: CheckSettings = QUICK, takes_split: bool = True) -> Report:
    return check_env(make if takes_split else lambda split: make(), takes_split, settings)


def found(report: Report, check: str) -> Any:
    [finding] = [finding for finding in report.findings if finding.check == check]
    return finding


def test_an_environment_without_a_defect_passes_every_check() -> None:
    report = examine(SoundEnv)
    # The verdict on step times depends on the machine.
    assert {finding.verdict for finding in report.findings if finding.check != "step time"} == {"ok"}, (
        report.to_json()
    )
    checks = (
        "returns, other seeds, train/val, random play, scripted play, same seed, siblings, no action, "
        "rewards, metrics"
    )
    assert [finding.check for finding in report.findings] == [
        *checks.split(", "),
        *("episodes", "observations", "state_key", "render", "close", "step time"),
    ]
    assert found(report, "scripted play").result.startswith("success 1.00 (8 of 8)")
    told = "3.0 steps, at most 3; 100% terminated, 0% truncated, 0% cut by max_steps 10"
    assert found(report, "episodes").result == told
    assert found(report, "train/val").result.startswith("0 of 8")


@pytest.mark.parametrize(
    ("make", "check", "message"),
    [
        (lambda split: NaNEnv(), "step", says("turn 1", "reward", "nan")),
        (lambda split: WrongTupleEnv(), "step", says("tuple of 4", "step")),
        (lambda split: RaisingEnv(), "step", says("step", "RuntimeError", "broken")),
        (lambda split: NoMetricsEnv(), "metric_reductions", "has no metric_reductions"),
        (
            sound(metric_reductions={"sucess": "last"}),
            "step",
            says("'success'", "'sucess'", "ChangedEnv"),
        ),
        (
            sound(metric_reductions={"success": "median"}),
            "metric_reductions",
            says("'success'", "'median'", "ChangedEnv"),
        ),
        (sound(state_key=lambda _: [1]), "state_key", says("state_key", "1", "ChangedEnv")),
        (ForgetfulEnv, "same seed", says("text", "'b 16'", "'b 80'")),
        (
            instructing(lambda: f"Today's number is {next(COUNTER)}."),
            "same seed",
            says("another episode", "prompt", "number"),
        ),
        (GlobalRandomEnv, "siblings", says("siblings", "reward", "turn")),
        (CrowdedEnv, "siblings", says("siblings", "start", "text")),
        (StrictEnv, "no action", says("step", "KeyError")),
        (OnceClosedEnv, "close", says("close", "RuntimeError")),
        (
            sound(__init__=lambda self, split: SoundEnv.__init__(self, num_turns=1)),
            "train/val",
            "[5-8] of 8 validation starts occur among 8 of training",
        ),
        (
            TextActionsEnv,
            "actions",
            says("TextActionsEnv.actions", "'abcd'", "sequence"),
        ),
        (
            sound(expert_action=raising(IndexError("no plan"))),
            "expert_action",
            says("expert_action", "IndexError"),
        ),
        (sound(expert_action=lambda _: 1), "expert_action", says("expert_action", "1", "str")),
        (lambda split: CloselessEnv(), "metric_reductions", says("CloselessEnv", "step, close")),
        (ListMetricsEnv, "metric_reductions", says("metric_reductions", "list of 1", "dict")),
        (
            sound(_marked=lambda *_: Observation(5)),
            "reset",
            says("reset", "text", "int", "str"),
        ),
        (
            sound(_marked=lambda *_: Observation("", (Media("image", np.zeros((4, 4), np.uint8)),))),
            "reset",
            says("uint8 [4, 4]", "[H, W, 3]"),
        ),
        (
            sound(_marked=lambda self, text: f"caf\ud800 {text}"),
            "reset",
            r"text has '\\ud800' at character 3, half of a character",
        ),
        (instructing(lambda: None), "reset", says("'env_instruction'", "NoneType", "str")),
        (
            sound(_marked=lambda *_: f"{'word ' * 50}{next(COUNTER)}"),
            "same seed",
            r"text …'?[word ]+\d+'? and …'?[word ]+\d+'?$",
        ),
    ],
)
def test_a_defect_is_an_error_that_names_it(make: Any, check: str, message: str) -> None:
    report = examine(make)
    finding = found(report, check)
    assert report.verdict == finding.verdict == "error"
    assert re.search(message, finding.result), finding.result
    assert "returns" not in [other.check for other in report.findings], "nothing claims that all is well"


@pytest.mark.parametrize(
    ("make", "check", "message"),
    [
        (
            sound(metric_reductions={"success": "mean", "distance": "last"}),
            "metrics",
            "never reported: distance",
        ),
        (
            sound(_marked=lambda self, text: text),
            "state_key",
            says("turns", "look the same", "states"),
        ),
        (sound(state_key=lambda self: self._turn), "state_key", says("turns", "share a key")),
        (
            sound(_marked=lambda self, text: "word " * 15 + SoundEnv._marked(self, text)),
            "observations",
            "an episode at most 8. of 60",
        ),
        (sound(_marked=lambda *_: ""), "observations", "are empty"),
        (ConstantEnv, "rewards", says("0.0% of steps", "0% of episodes")),
        (sound(expert_action=lambda _: "no letter"), "scripted play", r"success 0.00 \(0 of 8\)"),
        (sound(render=lambda _: np.zeros((4, 4), np.float32)), "render", r"returns float32 \[4, 4\]"),
        (
            sound(render=raising(RuntimeError("no display"))),
            "render",
            says("render", "RuntimeError"),
        ),
    ],
)
def test_what_is_doubtful_is_a_warning_with_advice(make: Any, check: str, message: str) -> None:
    report = examine(make, replace(QUICK, count_tokens=count_words, token_budget=60))
    finding = found(report, check)
    assert report.verdict == finding.verdict == "warning", report.to_json()
    assert re.search(message, finding.result), finding.result
    assert finding.advice


def test_an_observation_that_fills_the_context_is_an_error() -> None:
    report = examine(LongEnv, replace(QUICK, count_tokens=count_words, token_budget=40))
    assert found(report, "observations").verdict == "error"
    assert re.search(r"5. tokens, at most 5.;", found(report, "observations").result)
    assert found(examine(LongEnv), "observations").verdict == "ok", "nobody counts tokens here"


@pytest.mark.usefixtures("nothing_stays_stuck")
@pytest.mark.parametrize(
    ("where", "how"), [("constructor", "block"), ("reset", "await"), ("step", "block"), ("step", "thread")]
)
def test_a_call_that_never_returns_ends_the_examination(where: str, how: Any) -> None:
    report = examine(lambda: StuckEnv(where, how), replace(QUICK, timeout_s=0.5), takes_split=False)
    last = report.findings[-1]
    assert (report.verdict, last.verdict) == ("error", "error")
    assert re.fullmatch(f"hangs in (the )?{where}: no answer within 0.5 s", last.result)


def test_episodes_before_a_broken_call_are_reported() -> None:
    """The fifth random episode and the first scripted one break."""
    numbers = itertools.count()

    def reset(self: Any, seed: int | None = None) -> Any:
        self.is_worn = next(numbers) >= 2 * QUICK.num_episodes + 4
        return SoundEnv.reset(self, seed=seed)

    def step(self: Any, action: str) -> Any:
        if self.is_worn:
            raise RuntimeError("worn out")
        return SoundEnv.step(self, action)

    report = examine(sound(reset=reset, step=step))
    assert found(report, "step").result == "step raises RuntimeError: worn out"
    assert "of 4)" in found(report, "random play").result
    assert found(report, "episodes").result.startswith("3.0 steps, at most 3")
    assert "scripted play" not in [finding.check for finding in report.findings]


def test_a_key_that_never_comes_again_is_told_from_an_episode_that_does_not() -> None:
    report = examine(sound(state_key=lambda _: next(COUNTER)))
    for check in ("same seed", "siblings"):
        assert "state_key" in found(report, check).result and "GiGPO" in found(report, check).advice
    assert "generator" in found(examine(ForgetfulEnv), "same seed").advice


def test_what_is_broken_keeps_its_name() -> None:
    assert examine(ListMetricsEnv).env == "ListMetricsEnv"
    assert examine(CloselessEnv, takes_split=False).env == "CloselessEnv"


def test_without_a_tokenizer_a_huge_observation_is_doubtful_all_the_same() -> None:
    report = examine(LongEnv, replace(QUICK, token_budget=20))
    assert found(report, "observations").verdict == "warning"
    assert "--tokenizer" in found(report, "observations").advice
    assert found(examine(LongEnv, replace(QUICK, token_budget=200)), "observations").verdict == "ok"


def test_a_split_among_the_arguments_is_no_lack_of_the_class() -> None:
    report = check_env(lambda split: SoundEnv("train"), True, replace(QUICK, is_split_given=True))
    assert found(report, "train/val").verdict == "warning"
    assert (
        "`split` is given" in found(report, "train/val").result
        and "parameter" not in found(report, "train/val").advice
    )


def test_what_the_constructor_refuses_is_the_callers_mistake_and_what_it_raises_a_finding() -> None:
    with pytest.raises(EnvironmentFault, match="format_penalty"):
        examine(lambda split: FrozenLakeEnv(format_penalty=1.0))
    report = examine(sound(__init__=raising(OSError("no display"))))
    assert report.verdict == "error"
    assert any(finding.trace for finding in report.findings)


def test_without_known_actions_it_says_how_to_name_them_and_checks_the_rest() -> None:
    report = examine(LettersEnv, takes_split=False)
    assert found(report, "random play").verdict == "skipped"
    assert "--actions" in found(report, "random play").advice
    assert found(report, "same seed").verdict == "ok"
    named = examine(LettersEnv, replace(QUICK, actions=("ab", "CD")), takes_split=False)
    assert re.search(r"score [01]\.\d+ on average", found(named, "random play").result)


def test_one_start_and_no_split_are_warnings() -> None:
    report = examine(BanditEnv, takes_split=False)
    assert found(report, "other seeds").result.startswith("1 of 8 starts")
    assert found(report, "train/val").result.startswith(
        "8 of 8 validation starts occur among 8 of training, by what they show"
    )
    assert "no `split`" in found(report, "train/val").result
    assert report.verdict == "warning"


def hidden(split: str = "train") -> SoundEnv:
    """Splits its tasks soundly, but shows nothing of them at the start."""
    return sound(_marked=lambda self, text: SoundEnv._marked(self, text) if self._turn else "a closed box")(
        split
    )


class UnkeyedEnv(IdentityEnv):
    """The same game without a state_key."""

    def __init__(self, split: str = "train") -> None:
        super().__init__(["a", "b", "c", "d"] if split == "train" else ["w", "x", "y", "z"])

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "a closed box", {}


def test_starts_of_a_partially_observed_game_are_compared_by_their_state_key() -> None:
    report = examine(hidden)
    finding = found(report, "train/val")
    assert (
        finding.verdict == "ok" and finding.result.startswith("0 of 8") and "by state_key" in finding.result
    )
    assert report.verdict != "error"


@pytest.mark.parametrize(
    "make", [UnkeyedEnv, sound(state_key=lambda self: None, _marked=lambda *_: "a closed box")]
)
def test_without_a_state_key_starts_that_look_alike_are_a_warning_that_names_it(make: Any) -> None:
    report = examine(make)
    finding = found(report, "train/val")
    assert report.verdict == finding.verdict == "warning"
    assert "no state_key" in finding.result and "state_key()" in finding.advice
    assert "state_key()" in found(report, "other seeds").advice


def test_one_key_for_starts_that_look_different_is_a_warning() -> None:
    finding = found(examine(sound(state_key=lambda self: self._turn)), "train/val")
    assert (
        finding.verdict == "warning"
        and finding.result.startswith("8 of 8")
        and "look different" in finding.result
    )


def test_truncation_by_the_environment_and_by_the_limit_are_told_apart() -> None:
    actions = ("a",)
    cut = examine(CutEnv, replace(QUICK, actions=actions), takes_split=False)
    assert "100% truncated" in found(cut, "episodes").result
    short = examine(LettersEnv, replace(QUICK, actions=actions, max_steps=1), takes_split=False)
    assert "100% cut" in found(short, "episodes").result
    assert found(short, "episodes").verdict == "warning"


def test_coroutines_are_played_and_never_called_blocking() -> None:
    report = examine(lambda: AsyncCloseEnv(delay_s=0.0), replace(QUICK, actions=("a",)), takes_split=False)
    assert report.verdict != "error", report.to_json()
    assert "coroutines" in found(report, "step time").result


def test_a_slow_environment_is_examined_with_fewer_episodes() -> None:
    report = examine(SoundEnv, replace(QUICK, play_s=0.0))
    assert "of 2 starts" in found(report, "other seeds").result
    assert "of 2)" in found(report, "random play").result
    assert found(report, "siblings").result.endswith("under 2 seeds")


def test_the_environments_of_the_package_have_no_errors() -> None:
    for arguments in (
        {},
        {"is_slippery": False, "size": 5},
        {"observation": "coordinates"},
        {"render_mode": "rgb_array"},
    ):
        report = examine(lambda split, arguments=arguments: FrozenLakeEnv(split=split, **arguments))
        assert report.verdict != "error", report.to_json()


def clock(step_s: float, start_s: float, cpu_share: float, num_calls: int = 200) -> CallTimes:
    taken = CallTimes(Timings)
    for method, seconds in (("the constructor", 0.0), ("reset", start_s), ("step", step_s)):
        taken[method].wall_s.extend([seconds] * num_calls)
        taken[method].cpu_s.extend([cpu_share * seconds] * num_calls)
    return taken


@pytest.mark.parametrize(
    ("taken", "verdict", "message"),
    [
        (clock(20e-6, 300e-6, 1.0), "ok", ""),
        (clock(20e-6, 8e-3, 1.0), "ok", ""),
        (clock(20e-6, 80e-3, 1.0), "warning", r"it mostly computes: .*max_env_num_per_worker = .* / 4"),
        (clock(30e-3, 1e-3, 1.0), "warning", r"it mostly computes: .*max_env_num_per_worker = .* / 4"),
        (clock(30e-3, 1e-3, 0.01), "warning", "it mostly waits: max_env_num_per_worker: 16"),
        (clock(30e-3, 1e-3, 0.25), "warning", "it mostly waits: max_env_num_per_worker: 4"),
    ],
)
def test_times_tell_cooperative_from_blocking(taken: CallTimes, verdict: str, message: str) -> None:
    finding = times(taken, mean_steps=10.0, num_cores=4)
    assert finding.verdict == verdict
    assert ("cooperative" if verdict == "ok" else "blocking") in finding.result
    assert re.search(message, finding.advice)


def test_a_slow_tail_is_blocking_too() -> None:
    taken = clock(20e-6, 300e-6, 1.0, num_calls=98)
    taken["step"].wall_s.extend([0.05] * 2)
    result = times(taken, mean_steps=10.0, num_cores=4).result
    assert "p99 50 ms, max 50 ms; a start 300 µs" in result
    assert result.endswith(": blocking")


def test_the_report_is_json() -> None:
    row = json.loads(json.dumps(examine(lambda split: RaisingEnv()).to_json()))
    [step] = [finding for finding in row["findings"] if finding["check"] == "step"]
    assert (row["env"], row["verdict"], step["verdict"]) == ("RaisingEnv", "error", "error")
    assert step["trace"][-1].endswith('in step: raise RuntimeError("the toy is broken")')


def count_words(text: str) -> int:
    return len(text.split())


def test_free_text_that_an_environment_draws_is_played_and_watched() -> None:
    drawn = sound(actions=(), random_action=lambda self, rng: rng.choice("abcd"))
    assert re.search(r"score [01]\.\d+ on average", found(examine(drawn), "random play").result)
    broken = examine(sound(random_action=raising(OSError("no words"))))
    assert broken.verdict == "error"
    assert any("random_action raises OSError" in finding.result for finding in broken.findings)
