"""Reward functions as people write them: over completions and columns (turnwise, TRL), or one call per
completion (verl)."""

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from turnwise.data.prompts import prompt_of
from turnwise.data.reward_calls import call_reward, is_async, parameters_of, warn_once
from turnwise.data.reward_scores import RewardFault, is_number, read_metric, read_scores
from turnwise.data.rewards import DecodeCompletion, messages_of, runs_of
from turnwise.data.tables import ParameterColumns, TableRow, leaves
from turnwise.errors import ConfigError, DataError
from turnwise.protocols import ChecksRows, RewardResult
from turnwise.runtime.threads import DaemonPool
from turnwise.types import Group, Message, Trajectory

CompletionForm = Literal["text", "messages"]

MAX_COMMENT = 4000
"""Maximum characters of a comment that are recorded."""
_PER_RUN = ("completions", "completion_ids", "messages", "prompts")
_COLLECTORS = ("log_metric", "log_extra")
RUN_ARGUMENTS = (*_PER_RUN, *_COLLECTORS)
"""Arguments of a reward function that come from the run, not from columns. Those of `_PER_RUN` have one value
per rollout (`runs_of`); the `_COLLECTORS` are functions, as TRL passes them."""
_NOT_PASSED = ("trainer_state", "environments")
"""Arguments that TRL passes and a run here doesn't."""
_ONE_TEXT = "solution_str"
"""The parameter by which verl's functions are known: they are called once per completion."""
_FORMS = (
    "a reward is called as (completions, **columns), or as verl's functions, (data_source, solution_str, "
    "ground_truth, extra_info)"
)
_FOREIGN_NAMES = {
    "queries": "OpenRLHF's `queries` are prompt and response in one text: use `prompts` and `completions`",
    "labels": "OpenRLHF's `labels` are the true answers: name the parameter as the column, such as "
    "`ground_truth`",
    "solution_strs": "verl's batch form isn't called here: use `completions`, or `solution_str` for one at "
    "a time",
    "self": "it is a method of a class: give an object that has `__call__`, or a function",
}
"""Names of parameters that no column has → what to use here."""
_FOR_WRAPPERS = {
    "got an unexpected keyword argument": (
        "a function with **kwargs gets prompts, completion_ids and all columns; a decorator with "
        "functools.wraps shows the parameters of the function that it decorates, which then gets no others"
    )
}
_FOR_TEXTS = _FOR_WRAPPERS | {
    r"string indices must be integers|'str' object has no attribute '(get|keys|items|role|content)'": (
        "completions are strings; a function that takes each as a list of messages needs `form: messages`, "
        "{{name: {name}, form: messages}} in data.reward"
    )
}
_FOR_MESSAGES = _FOR_WRAPPERS | {
    r"'(list|dict)' object has no attribute|expected string or bytes-like object, got '(list|dict)'|"
    r"list indices must be integers|(can only|must be) \w* ?(concatenate )?str": (
        "completions are lists of messages (`form: messages`); a function that takes strings needs `form: "
        "text`"
    )
}


@dataclass(slots=True)
class FunctionReward:
    """A function `(completions, **columns) -> list[float | None]`, one number per completion; None where it
    doesn't apply. Or verl's `(data_source, solution_str, ground_truth, extra_info) -> float | dict`, called
    once per completion. A coroutine function is awaited; any other function runs in a thread, so that only
    its group waits for it."""

    name: str
    function: Callable[..., Any]
    completion: DecodeCompletion
    prompt_key: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that the config gives as `args` of the reward."""
    form: CompletionForm = "text"
    """What a completion is: the text of the last response, or the list of all messages after the prompt."""
    _pool: DaemonPool = field(default_factory=lambda: DaemonPool("reward"))
    columns: ParameterColumns = field(init=False)
    """The columns of a row that the function gets."""
    _run_arguments: frozenset[str] = field(init=False)
    """The members of `RUN_ARGUMENTS` that the function has parameters for, and "extra_info" if it is
    verl's."""
    _takes_one: bool = field(init=False)
    """Whether it is called once per completion, as verl's."""
    _needs_ids: bool = field(init=False)
    """Whether token ids are asked for by name."""

    def __post_init__(self) -> None:
        all_parameters = parameters_of(self.function, self.name).values()
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = {p.name: p for p in all_parameters if p.kind in by_name}
        positional = [p.name for p in all_parameters if p.kind is p.POSITIONAL_ONLY]
        takes_all = any(p.kind is p.VAR_KEYWORD for p in all_parameters)
        self._check_parameters(parameters, takes_all, positional)
        self._takes_one = _ONE_TEXT in parameters and "completions" not in parameters
        self._needs_ids = "completion_ids" in parameters
        if self._takes_one:
            filled = (_ONE_TEXT, "extra_info")
            # As in verl, **kwargs are for the config's `args`, and the columns aren't passed.
            columns = ParameterColumns.by(self.function, [*filled, *self.arguments])
            self.columns = replace(columns, takes_all=False)
            self._run_arguments = frozenset(filled) & parameters.keys()
            return
        self.columns = ParameterColumns.by(self.function, [*RUN_ARGUMENTS, *_NOT_PASSED, *self.arguments])
        self._run_arguments = frozenset(RUN_ARGUMENTS)
        if not takes_all:
            self._run_arguments &= parameters.keys()

    def reading(self, completion: DecodeCompletion) -> "FunctionReward":
        """The same reward, which reads responses by `completion`."""
        reward = copy(self)
        reward.completion = completion
        return reward

    def _check_parameters(
        self,
        parameters: Mapping[str, inspect.Parameter],
        takes_all: bool,
        positional: Sequence[str],
    ) -> None:
        """Raises ConfigError if the function can't be called with the names that a run has, or `args` don't
        fit."""
        label = f"data.reward {self.name}"
        shown = ", ".join(parameters) or "no parameters that have names"
        if not takes_all and not {*parameters, *positional} & {*_PER_RUN, _ONE_TEXT}:
            raise ConfigError(f"{label}: it has no parameter `completions`; {_FORMS}. It has {shown}")
        if positional:
            raise ConfigError(
                f"{label}: its parameter {positional[0]} can't be passed by name; {_FORMS}, by names"
            )
        if _ONE_TEXT in parameters and self.form == "messages":
            raise ConfigError(
                f"{label}: `form: messages` is for functions of `completions`; {_ONE_TEXT} is a text"
            )
        for name in self.arguments:
            if name not in parameters and not takes_all:
                raise ConfigError(f"{label}: args.{name} isn't a parameter; it has {shown}")
        for name in _NOT_PASSED:
            if name not in parameters or name in self.arguments:
                continue
            if parameters[name].default is inspect.Parameter.empty:
                raise ConfigError(
                    f"{label}: a run here has no {name} for its parameter of that name; give it a default"
                )
            warn_once(
                f"{label}: a run here has no {name} for its parameter of that name, which keeps its default"
            )

    def check(self, rows: Sequence[TableRow]) -> None:
        """Raises DataError if a row lacks a required column, `function.check_row` refuses it, or an argument
        hides a column."""
        label = f"data.reward {self.name}"
        try:
            self.columns.check(rows, label)
        except DataError as fault:
            hints = [hint for name, hint in _FOREIGN_NAMES.items() if name in self.columns.required]
            raise DataError(" ".join([str(fault), *hints[:1]])) from fault
        function: object = self.function
        if isinstance(function, ChecksRows):
            for row in rows:
                columns = {**self.columns.choose(row.columns), **self.arguments}
                row.check(label, function, columns)
        sources = self._sources()
        for row in rows:
            for path, _ in leaves(row.columns):
                name = path[-1]
                if name not in sources:
                    continue
                raise DataError(
                    f"{row.place}: {label} gets `{name}` {sources[name]}, which would hide the column "
                    f"{'.'.join(path)!r}; rename the column, or the function's parameter"
                )

    def _sources(self) -> dict[str, str]:
        """Each argument that doesn't come from a column → where it comes from."""
        from_run = self._run_arguments - {"extra_info", self.prompt_key}
        parameters = parameters_of(self.function, self.name)
        sources = {name: "from the run" for name in parameters if name in from_run}
        return sources | dict.fromkeys(self.arguments, "from its args in the config")

    async def __call__(self, group: Group) -> RewardResult:
        runs = runs_of(group)
        if self._takes_one:
            return await self._score_one_by_one(group, runs)
        collected = Collected(self.name, len(runs))
        from_run = self._per_run(group, runs)
        from_run["log_metric"] = collected.log_metric
        from_run["log_extra"] = collected.log_extra
        arguments = {name: value for name, value in from_run.items() if name in self._run_arguments}
        for name, value in self.columns.choose(group.task.payload).items():
            if name not in _PER_RUN and name not in self.arguments:
                arguments[name] = [value] * len(runs)
        arguments |= self.arguments
        templates = _FOR_TEXTS if self.form == "text" else _FOR_MESSAGES
        remedies = {pattern: template.format(name=self.name) for pattern, template in templates.items()}
        values = await call_reward(
            self.function,
            self.name,
            group.task.id,
            arguments,
            self._pool,
            remedies,
        )
        return RewardResult(
            read_scores(values, len(runs), self.name),
            metrics=collected.per_run,
            comments=collected.comments,
        )

    def _per_run(self, group: Group, runs: Sequence[Sequence[Trajectory]]) -> dict[str, Any]:
        """The arguments with one value per run. Raises RewardFault if token ids are asked for by name and
        there are none."""
        payload = group.task.payload
        prompts = [payload.get(self.prompt_key, run[0].answer_path[0].observation) for run in runs]
        if self.form == "messages":
            prompts = [prompt_of({self.prompt_key: prompt}, self.prompt_key) for prompt in prompts]
        per_run: dict[str, Any] = {"prompts": prompts}
        if "completions" in self._run_arguments:
            as_form = self.completion if self.form == "text" else self._answer_messages
            per_run["completions"] = [as_form(run[-1]) for run in runs]
        if "completion_ids" in self._run_arguments:
            turns = [run[-1].final_turn for run in runs]
            per_run["completion_ids"] = [turn.response_ids.tolist() for turn in turns]
            if self._needs_ids and any(turn.text and not len(turn.response_ids) for turn in turns):
                raise RewardFault(
                    f"data.reward {self.name} asks for completion_ids, and a model behind a URL gives texts "
                    "without token ids; use `completions`"
                )
        if "messages" in self._run_arguments:
            per_run["messages"] = [messages_of(run[-1], self.prompt_key) for run in runs]
        return per_run

    def _answer_messages(self, trajectory: Trajectory) -> list[Message]:
        """All messages after the prompt; the text of the last one is what a function of texts gets."""
        messages = messages_of(trajectory, self.prompt_key)
        first_turn = replace(trajectory, turns=trajectory.answer_path[:1], answer_turn=None)
        num_of_prompt = len(messages_of(first_turn, self.prompt_key)) - 1
        answers = messages[num_of_prompt:]
        answers[-1]["content"] = self.completion(trajectory)
        return answers

    async def _score_one_by_one(self, group: Group, runs: Sequence[Sequence[Trajectory]]) -> RewardResult:
        columns = {**self.columns.choose(group.task.payload), **self.arguments}
        if "extra_info" in self._run_arguments:
            columns["extra_info"] = group.task.payload.get("extra_info") or {}
        texts = [self.completion(run[-1]) for run in runs]
        arguments = {"texts": texts, "columns": columns}
        values = await call_reward(
            _one_by_one(self.function),
            self.name,
            group.task.id,
            arguments,
            self._pool,
        )
        results = [_read_one(value, self.name) for value in values]
        scores = [one.score for one in results]
        return RewardResult(
            read_scores(scores, len(runs), self.name),
            metrics=[one.metrics for one in results],
            comments=[one.comments for one in results],
        )


def _one_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of several texts that calls verl's function for each text."""

    async def gathered(texts: Sequence[str], columns: Mapping[str, Any]) -> list[Any]:
        return await asyncio.gather(*(function(**{_ONE_TEXT: text, **columns}) for text in texts))

    def listed(texts: Sequence[str], columns: Mapping[str, Any]) -> list[Any]:
        return [function(**{_ONE_TEXT: text, **columns}) for text in texts]

    return gathered if is_async(function) else listed


class _OneScore(NamedTuple):
    """What verl's function returned for one completion."""

    score: Any
    metrics: dict[str, float]
    comments: dict[str, str]


def _read_one(value: Any, name: str) -> _OneScore:
    """The score, the metrics and the texts that verl's function returned: a number, or a mapping with `score`
    and more."""
    if not isinstance(value, Mapping):
        return _OneScore(value, {}, {})
    if "score" not in value:
        raise RewardFault(
            f"data.reward {name} returned a dict with {', '.join(map(str, value)) or 'nothing'}; it needs "
            "`score`"
        )
    metrics: dict[str, float] = {}
    comments: dict[str, str] = {}
    for key, number in value.items():
        if key == "score":
            continue
        if isinstance(number, str):
            comments[str(key)] = number[:MAX_COMMENT]
        elif is_number(number):
            metrics[str(key)] = read_metric(number, str(key), name)
        elif number is not None:
            warn_once(
                f"data.reward {name} returns `{key}`, a {type(number).__name__}, which is left out: only "
                "numbers are metrics, and only texts comments"
            )
    return _OneScore(value["score"], metrics, comments)


class Collected:
    """What a function reports through TRL's `log_metric` and `log_extra`: metrics and comments of each run of
    a group."""

    def __init__(self, name: str, num_runs: int) -> None:
        self._name = name
        self.per_run: list[dict[str, float]] = [{} for _ in range(num_runs)]
        self.comments: list[dict[str, str]] = [{} for _ in range(num_runs)]

    def log_metric(self, name: str, value: Any) -> None:
        """Records a number for the whole call."""
        number = read_metric(value, name, self._name)
        for metrics in self.per_run:
            metrics[name] = number

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Records a value for each completion: a number as a metric, a text as a comment for readers."""
        for metrics, comments, value in zip(self.per_run, self.comments, values, strict=False):
            if isinstance(value, str):
                comments[column] = value[:MAX_COMMENT]
            elif is_number(value):
                metrics[column] = read_metric(value, column, self._name)
            else:
                kind = type(value).__name__
                warn_once(
                    f"data.reward {self._name}: log_extra got a {kind} for {column!r}, which is left out; "
                    "numbers and texts are kept"
                )
