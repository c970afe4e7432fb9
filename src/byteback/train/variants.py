# SPDX-License-Identifier: Apache-2.0
"""Variants: a recipe by its name, with some of its fields changed, from the command line or from a TOML file.

    unified-int8                              the recipe
    unified-int8:period=100                   changes every field called `period`, also nested ones
    unified-int8:grad_output.clip.period=100  the same, by its full path
    unified-int8:learning_rate=none           DSGC without DCLRS
    unified-int8:grad_output.clip=MaxAbs      DCLRS without DSGC; the value of a rule is the name of its class
    float32                                   no recipe

In a TOML file a table [recipes.NAME] with `base` and such keys defines NAME for use in `recipe`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from byteback.quantize import ClipRule, TensorRule
from byteback.recipes import LearningRateRule, Recipe, recipe_classes
from byteback.suggestions import unknown

FLOAT = "float32"
_UNSAFE = re.compile(r"[\x00-\x1f\x7f/\\+,:%]")
_FILES = ("config.toml", "summary.json", "report.html")  # of a run, beside the folders of its members
_LONGEST = 200  # bytes in the name of a folder; file systems take 255
Tables = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Variant:
    """A recipe and its name; `recipe` is None for float32."""

    name: str
    recipe: Recipe | None

    @property
    def folder(self) -> str:
        """The name as the name of a folder: "+" between its parts, and %XX for what a name of a folder should not have.

        Two names never share a folder, and none leaves the folder of the run or has the name of one of its files.

        >>> Variant("unified-int8:period=100,strict=true", None).folder
        'unified-int8+period=100+strict=true'
        >>> [Variant(name, None).folder for name in ("a/b", "a_b", "..")]
        ['a%2Fb', 'a_b', '%2E%2E']
        """
        base, colon, options = self.name.partition(":")
        parts = [base, *options.split(",")] if colon else [base]
        name = "+".join(_UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", part) for part in parts)
        if name in _FILES:
            return name.replace(".", "%2E")
        return re.sub(r"^\.+", lambda found: "%2E" * len(found[0]), name)


def parse(spec: str, tables: Tables | None = None) -> Variant:
    """Returns the variant that `spec` names.

    >>> parse("unified-int8:period=100").recipe.grad_output.clip.period
    100
    >>> parse("unified-int8:learning_rate=none").recipe.learning_rate is None
    True
    """
    tables = tables or {}
    if not spec or len(Variant(spec, None).folder.encode()) > _LONGEST:
        what = "empty" if not spec else "too long for the name of a folder"
        raise ValueError(
            f"recipe {spec[:40]!r}: the name is {what}. Choose a name of 1 to {_LONGEST} bytes; "
            "a table [recipes.NAME] in a TOML file gives options a short name."
        )
    base, _, options = spec.partition(":")
    changes = dict(_option(spec, part) for part in options.split(",")) if options else {}
    passed: list[str] = []
    while base in tables:
        if base in passed or base in (FLOAT, *recipe_classes()):
            why = "it is its own base" if base in passed else "there is already a recipe of that name"
            raise ValueError(f"recipes.{base}: {why}. Choose another name.")
        passed.append(base)
        table = dict(tables[base])
        below = table.pop("base", None)
        if not isinstance(below, str):
            raise ValueError(
                f'recipes.{base}: the table has no base. Add the recipe that it changes, such as base = "unified-int8".'
            )
        changes = {**_flat(table), **changes}
        base = below
    if base == FLOAT:
        if changes:
            raise ValueError(f"recipe {spec!r}: float32 is plain PyTorch and has no options. Remove {', '.join(changes)}.")
        return Variant(spec, None)
    classes = recipe_classes()
    if base not in classes:
        raise unknown("recipe", "name", base, [FLOAT, *sorted(classes), *tables])
    recipe: Any = classes[base]()
    for key, value in changes.items():
        recipe = _change(spec, recipe, key, value)
    return Variant(spec, recipe)


def _option(spec: str, part: str) -> tuple[str, Any]:
    key, equals, text = part.partition("=")
    if not equals or not key.strip():
        raise ValueError(
            f"recipe {spec!r}: {part!r} is not an option. Write NAME:key=value,key=value, such as unified-int8:period=100."
        )
    try:
        return key.strip(), json.loads(text)
    except json.JSONDecodeError:
        return key.strip(), text.strip()


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"clip": {"period": 1}} → {"clip.period": 1}"""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return flat


def _change(spec: str, recipe: Recipe, key: str, value: Any) -> Recipe:
    """Returns the recipe with every field that `key` names set to `value`."""
    fields = {path: (value, optional) for path, value, optional in _paths(recipe)}
    paths = {path: value for path, (value, _) in fields.items()}
    chosen = [path for path in paths if path == key] or [path for path in paths if path.endswith("." + key)]
    if not chosen:
        short = dict.fromkeys(part for path in paths for part in (path, path.rsplit(".", 1)[-1]))
        raise unknown(f"recipe {spec!r}", "option", key, sorted(short, key=lambda name: (name.count("."), name)))
    changed = recipe
    for path in chosen:
        changed = _replace(changed, path.split("."), _converted(spec, path, *fields[path], value))
    return changed


def _paths(data: Any, prefix: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Yields (dotted path, value, whether it may be None) of every field, including nested ones."""
    for field in dataclasses.fields(data):
        value = getattr(data, field.name)
        yield prefix + field.name, value, "None" in str(field.type)
        if dataclasses.is_dataclass(value):
            yield from _paths(value, f"{prefix}{field.name}.")


def _replace(data: Any, path: list[str], value: Any) -> Any:
    inner = value if len(path) == 1 else _replace(getattr(data, path[0]), path[1:], value)
    return dataclasses.replace(data, **{path[0]: inner})


def _converted(spec: str, path: str, now: Any, optional: bool, value: Any) -> Any:
    """Converts `value` to the type of the field."""
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        if not optional:
            raise ValueError(f"recipe {spec!r}: {path} is {now!r} and cannot be none. Use a {type(now).__name__}.")
        return None
    if isinstance(now, bool) and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    leaf = path.rsplit(".", 1)[-1]
    rules = {"clip": ClipRule, "learning_rate": LearningRateRule, "grad_output_for_weight": TensorRule}
    if leaf in rules and isinstance(value, str):
        known = {cls.__name__: cls for cls in _leaves(rules[leaf])}
        if value not in known:
            raise unknown(f"recipe {spec!r}", leaf, value, sorted(known))
        return known[value]()
    if isinstance(now, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if now is not None and type(now) is not type(value):
        raise ValueError(
            f"recipe {spec!r}: {path} is {now!r}, a {type(now).__name__}, but {value!r} is a {type(value).__name__}. Use a "
            f"{type(now).__name__}."
        )
    return value


def _leaves(base: type[Any]) -> Iterator[type[Any]]:
    children = base.__subclasses__()
    if base is TensorRule or not children:
        yield base
    for child in children:
        yield from _leaves(child)
