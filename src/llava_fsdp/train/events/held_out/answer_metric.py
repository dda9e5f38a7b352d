"""Score answers to validation questions: by `val.metric`, or by a function that a program gives to a training."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any

import numpy as np

from llava_fsdp.config import Config, Metric
from llava_fsdp.evaluate.benchmarks.scoring import exact_match, vqa_accuracy
from llava_fsdp.runtime.errors import ConfigError, MetricError
from llava_fsdp.train.events.run_events import describe

ScoreFunction = Callable[[str, str, str], float]
"""Scores an answer: (question without image tags, the model's answer, the record's answer) -> 0 to 1. Called on the
rank that has generated the answer."""

OF_METRIC: Mapping[Metric, ScoreFunction] = MappingProxyType({
    Metric.exact: lambda question, answer, expected: exact_match(answer, [expected]),
    Metric.vqa: lambda question, answer, expected: vqa_accuracy(answer, [expected]),
})  # fmt: skip


@dataclass(frozen=True)
class AnswerMetric:
    """A named way to score the answers of a validation."""

    name: str
    function: ScoreFunction
    is_own: bool = False
    """Whether a program gave the function, in place of `val.metric`."""

    def score(self, question: str, answer: str, expected: str, record: str) -> float:
        """Return the score of an answer to a question (without image tags), from 0 to 1. `expected`: the answer in the
        record, which `record` names in messages. Raise MetricError if the function has raised an error, or has not
        returned a number from 0 to 1."""
        what = f"the metric {self.name} of {record} (question {question[:200]!r}, answer {answer[:200]!r})"
        try:
            value: Any = self.function(question, answer, expected)
        except (Exception, SystemExit) as error:
            raise MetricError(f"{what} has failed: {describe(error)}").about(record=record) from error
        is_number = isinstance(value, Real | np.bool_)
        if not is_number or not 0 <= value <= 1:  # pyright: ignore[reportOperatorIssue]
            shown = repr(value)[:200]
            raise MetricError(f"{what} is {shown}; it must be a number from 0 to 1").about(record=record)
        return float(value)


def choose_metric(cfg: Config, own_function: ScoreFunction | None) -> AnswerMetric:
    """Return the metric of validations: the function that a program gives, or without one that of `val.metric`.

    Raises:
        ConfigError: the given object cannot be called with three texts, has the name of a value of `val.metric`, or is
            given although `val.metric` is not the default.
    """
    if own_function is None:
        return AnswerMetric(cfg.val.metric.value, OF_METRIC[cfg.val.metric])
    name = str(getattr(own_function, "__name__", type(own_function).__name__))
    if cfg.val.metric is not Metric.exact:
        raise ConfigError(
            f"val.metric={cfg.val.metric.value} and the program's metric {name} are both given; leave one out"
        )
    if name in Metric.__members__:
        raise ConfigError(f"the program's metric is called {name}, as val.metric={name} is; give it another name")
    if not callable(own_function):
        raise ConfigError(
            f"the program's metric is {own_function!r}; it must be a function of question, answer and expected"
        )
    try:
        inspect.signature(own_function).bind("", "", "")
    except TypeError as error:
        raise ConfigError(
            f"the program's metric {name} cannot be called as {name}(question, answer, expected): {error}"
        ) from error
    except ValueError:  # a function of a library in C need not tell its arguments
        pass
    return AnswerMetric(name, own_function, is_own=True)
