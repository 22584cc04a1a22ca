"""Errors of pydantic in plain words: line, field, what was given, what is expected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ringray.base.errors import SpecError, nearest
from ringray.lab.specs.fields import Mismatch
from ringray.lab.specs.yaml_source import Source, Where

Model = type[BaseModel]


def explain(error: ValidationError, source: Source, model: Model) -> list[SpecError]:
    """Returns the mistakes that validating ``source`` as ``model`` found."""
    details = error.errors(include_url=False)
    return [mistake for detail in details for mistake in _explain(detail, source, model)]


def _explain(detail: ErrorDetails, source: Source, model: Model) -> Iterator[SpecError]:
    where = detail["loc"]
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, Mismatch):
        where = (*where, *cause.place)
        hint = cause.hint and f"; {cause.hint}"
        yield source.error(f"got {source.written(where)}, expected {cause.expected}{hint}", where)
    elif detail["type"] == "extra_forbidden":
        yield _unknown(where, source, model)
    elif detail["type"] == "missing":
        yield from _missing(where, source, model)
    else:
        got = "the file is empty" if source.empty else f"got {source.written(where)}"
        section = _section(model, where) or model
        message = f"{got}, expected a mapping with the fields {', '.join(section.model_fields)}"
        yield source.error(message, where, None if where else 1)


def _unknown(where: Where, source: Source, model: Model) -> SpecError:
    fields = (_section(model, where[:-1]) or model).model_fields
    name = str(where[-1])
    sections = ((other, _section(model, (other,))) for other in model.model_fields)
    elsewhere = (
        f"{other}.{name}" for other, section in sections if section and name in section.model_fields
    )
    meant = next(elsewhere, None) or nearest(name, fields)
    hint = f"; did you mean {meant!r}?" if meant else ";"
    message = f"unknown field{hint} valid: {', '.join(fields)}"
    return source.error(message, where, source.line_of(where))


def _missing(where: Where, source: Source, model: Model) -> Iterator[SpecError]:
    """Reports a field, or of a section each field that must be given."""
    section = _section(model, where)
    if section is not None:
        for name, field in section.model_fields.items():
            if field.is_required():
                yield from _missing((*where, name), source, model)
        return
    field = (_section(model, where[:-1]) or model).model_fields[str(where[-1])]
    expected = next(kind.expected for kind in field.metadata if hasattr(kind, "expected"))
    yield source.error(f"missing, expected {expected}", where)


def _section(model: Model, where: Where) -> Model | None:
    """Returns the model of the section at ``where``; None for a field with a value."""
    for part in where:
        annotation = model.model_fields[str(part)].annotation
        inner = [
            type_
            for type_ in (annotation, *get_args(annotation))
            if isinstance(type_, type) and issubclass(type_, BaseModel)
        ]
        if not inner:
            return None
        model = inner[0]
    return model
