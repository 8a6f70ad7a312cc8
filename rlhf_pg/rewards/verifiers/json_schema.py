"""A reward for JSON that a schema allows."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from rlhf_pg.boundary.quoted import quoted, shown
from rlhf_pg.config.fields import config, option
from rlhf_pg.rewards.verifiers.patterns import compiled
from rlhf_pg.rewards.verifiers.verifier import (
    Scores,
    TruthVerifier,
    Unreadable,
    require,
    warn_once,
)

FENCED = re.compile(r"```(?:json|JSON)?[ \t]*\n(.*?)```", re.DOTALL)
# What JSON or a schema may bring a reader to raise: nests without end, numbers beyond all bounds.
BEYOND = (ValueError, RecursionError, ArithmeticError, TimeoutError)


@config
class JsonSchema(TruthVerifier):
    """A reward of 1 for an answer that is JSON and that a schema allows, else 0.

    The answer is the JSON alone, or stands in a fenced block, the last of which counts.

    Args:
        schema: JSON schema for all rows, as an object or as text.
        column: column with a schema for each row, if `schema` is not given. Text is best:
            `datasets` adds to each object the keys of the others, with None, which is ignored.
        timeout: seconds that a pattern in a schema may take on one string.
    """

    kind: ClassVar[str] = "json_schema"
    schema: dict | str | None = None  # type: ignore[type-arg]
    column: str = ""
    timeout: float = option(1.0, gt=0)

    def __post_init__(self) -> None:
        if (self.schema is None) == (not self.column):
            raise ValueError("give either a schema or the column that has one for each row")
        require("jsonschema", "json")
        if self.schema is not None:
            self.schema = self.read(self.schema)

    def scores(
        self,
        texts: Sequence[str],
        ids: Sequence[Sequence[int]] | None,
        columns: Mapping[str, Sequence[Any]],
    ) -> Scores:
        if self.schema is None:
            return super().scores(texts, ids, columns)
        return self.judge(self.answers(texts), [str(self.schema)] * len(texts))

    def read(self, truth: Any) -> str:
        """Return a schema as text, always the same for the same schema."""
        import jsonschema

        try:
            schema = json.loads(truth) if isinstance(truth, str) else _without_none(truth)
            if not isinstance(schema, dict | bool):
                raise Unreadable(f"a JSON schema is an object, got {shown(schema)}")
            jsonschema.validators.validator_for(schema, _newest()).check_schema(schema)
            return json.dumps(schema, sort_keys=True)
        except jsonschema.SchemaError as error:
            raise Unreadable(f"it is no JSON schema: {quoted(error.message)}") from error
        except BEYOND as error:
            raise Unreadable(f"it cannot be read as a JSON schema: {quoted(str(error))}") from error

    def judge(self, answers: Sequence[str], truths: Sequence[str]) -> Scores:
        return [float(self._fits(*pair)) for pair in zip(answers, truths, strict=True)]

    def _fits(self, answer: str, schema: str) -> bool:
        blocks = FENCED.findall(answer)
        try:
            value = json.loads(blocks[-1] if blocks else answer, parse_constant=_refuse)
        except BEYOND:
            return False
        from referencing.exceptions import Unresolvable

        try:
            return bool(_validator(schema, self.timeout).is_valid(value))
        except Unresolvable as error:
            warn_once(f"reward {self.kind}: {quoted(str(error))}; nothing is fetched: 0")
        except BEYOND as error:
            warn_once(f"reward {self.kind}: a schema could not be applied: {quoted(str(error))}: 0")
        return False


def _newest() -> Any:
    import jsonschema

    return jsonschema.Draft202012Validator


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _without_none(value: Any) -> Any:
    """Return nested objects without the keys that are None."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


@lru_cache(maxsize=256)
def _validator(schema: str, timeout: float) -> Any:
    """Return a validator that fetches nothing, and whose patterns have a time limit."""
    import jsonschema
    import referencing

    def fits(pattern: str, text: str) -> bool:
        return compiled(pattern).last(text, False, timeout) is not None

    def pattern(_: Any, wanted: str, value: Any, __: Any) -> Iterator[Any]:
        if isinstance(value, str) and not fits(wanted, value):
            yield jsonschema.ValidationError(f"{value!r} does not match {wanted!r}")

    def pattern_properties(
        validator: Any, wanted: Mapping[str, Any], value: Any, __: Any
    ) -> Iterator[Any]:
        for key, inner in wanted.items() if isinstance(value, dict) else ():
            for name in value:
                if fits(key, name):
                    yield from validator.descend(value[name], inner, path=name, schema_path=key)

    plain = json.loads(schema)
    kind = jsonschema.validators.validator_for(plain, _newest())
    own = {"pattern": pattern, "patternProperties": pattern_properties}
    return jsonschema.validators.extend(kind, own)(plain, registry=referencing.Registry())
