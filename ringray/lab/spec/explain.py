"""What pydantic found wrong with a spec, in the words of a person: line, field, given, expected."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from pydantic import BaseModel

from ringray.base.errors import SpecError, nearest
from ringray.lab.spec.fields import Mismatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

    from ringray.lab.spec.yaml_source import Source, Where

Model = type[BaseModel]


def explain(error: ValidationError, source: Source, model: Model) -> list[SpecError]:
    """The mistakes in ``error``, which came of validating ``source`` as ``model``."""
    found: list[SpecError] = []
    for detail in error.errors(include_url=False):
        found.extend(_explain(detail, source, model))
    return found


def _explain(detail: ErrorDetails, source: Source, model: Model) -> Iterator[SpecError]:
    where = detail["loc"]
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, Mismatch):
        yield _mismatch(cause, where, source)
    elif detail["type"] == "extra_forbidden":
        yield _unknown(where, source, model)
    elif detail["type"] == "missing":
        yield from _missing(where, source, model)
    elif not where:
        given = "the file is empty" if source.empty else f"got {_written(source, where)}"
        fields = ", ".join(model.model_fields)
        yield source.error(f"{given}, expected a mapping with the fields {fields}", line=1)
    else:
        inner = _section(model, where)
        fields = f" with the fields {', '.join(inner.model_fields)}" if inner else ""
        message = f"got {_written(source, where)}, expected a mapping{fields}"
        yield source.error(message, where, _line(source, where))


def _mismatch(cause: Mismatch, field: Where, source: Source) -> SpecError:
    where = (*field, *cause.at)
    message = f"got {_written(source, where)}, expected {cause.expected}"
    if cause.hint:
        message += f"; {cause.hint}"
    return source.error(message, where, _line(source, where))


def _unknown(where: Where, source: Source, model: Model) -> SpecError:
    *around, last = where
    section = _section(model, tuple(around)) or model
    name = str(last)
    elsewhere = [
        f"{other}.{name}"
        for other in model.model_fields
        for inner in [_section(model, (other,))]
        if inner and name in inner.model_fields
    ]
    meant = next(iter(elsewhere), None) or nearest(name, section.model_fields)
    hint = f"; did you mean {meant!r}?" if meant else ";"
    message = f"unknown field{hint} valid: {', '.join(section.model_fields)}"
    mark = source.marks.get(where)
    return source.error(message, where, mark.key_line if mark else None)


def _missing(where: Where, source: Source, model: Model) -> Iterator[SpecError]:
    """A missing section is reported as the fields in it that must be given."""
    section = _section(model, where)
    if section is not None:
        for name, field in section.model_fields.items():
            if field.is_required():
                yield from _missing((*where, name), source, model)
        return
    around = _section(model, where[:-1]) or model
    field = around.model_fields[str(where[-1])]
    expected = next(kind.expected for kind in field.metadata if hasattr(kind, "expected"))
    yield source.error(f"missing, expected {expected}", where, _line(source, where))


def _section(model: Model, where: Where) -> Model | None:
    """The model of the section at ``where``; None if that is a field with a value."""
    for part in where:
        annotation = model.model_fields[str(part)].annotation
        models = [
            one
            for one in (annotation, *get_args(annotation))
            if isinstance(one, type) and issubclass(one, BaseModel)
        ]
        if len(models) != 1 or "lengths" in models[0].model_fields:
            return None
        model = models[0]
    return model


def _written(source: Source, where: Where) -> str:
    mark = source.nearest_mark(where)
    return mark.written if mark and (where in source.marks or mark.scalar) else "nothing"


def _line(source: Source, where: Where) -> int | None:
    mark = source.nearest_mark(where)
    return mark.line if mark else None
