"""Docstrings as the API reference shows them: an extension of griffe, which reads them for MkDocs without running code.

They are written for who reads the code: with references such as ``:class:`Plan```, with one line for several arguments
alike, and with arguments that stand in a dataclass of their own, from which a class gets them when it is made.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import griffe

__all__ = ["Docstrings", "apart", "documented", "plain"]

ROOT = Path(__file__).parents[2]
MADE_BY_SESSIONS = {
    "shardwise.session.Session",
    "shardwise.core.engine.module.ShardedModule",
    "shardwise.core.engine.optimizer.ShardedOptimizer",
    "shardwise.core.engine.one_parameter.OneParameter",
    "shardwise.core.engine.pipeline_steps.PipelineSteps",
    "shardwise.core.checkpoint.checkpointer.Checkpointer",
    "shardwise.core.mesh.mesh.Mesh",
    "shardwise.deepspeed.engine.DeepSpeedEngine",
}
"""Classes whose constructors users do not call."""
WITH_ATTRIBUTES = {
    "shardwise.session.Session",
    "shardwise.core.mesh.mesh.Mesh",
    "shardwise.deepspeed.engine.DeepSpeedEngine",
}
"""Those of them whose attributes users read."""

HIDDEN = {
    "shardwise.session.build": "names",
    "shardwise.huggingface.trainer.ShardwiseTrainer.save_model": "_internal_call",
}
"""Arguments that only other libraries and integrations pass."""
COMPOSED = ("shardwise.booster.plugin.", "shardwise.strategies.")
"""Where classes get texts of their arguments when they are made (shardwise/compat/arguments.py)."""
ARGS, SECTION = (
    re.compile(rf"^(?:{names}):\n(?:(?:    .*)?(?:\n|\Z))+", re.MULTILINE) for names in ("Args", "Args|Attributes")
)


@cache
def documented() -> dict[str, str]:
    """The path of each name that a page of the reference documents."""
    paths: dict[str, str] = {}
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for path, members in re.findall(
            r"(?m)^::: (\S+)(?:\n    options: .*members: \[(.+?)\])?", page.read_text("utf-8")
        ):
            own = path.rpartition(".")[2]
            paths |= {own: path} if own[0].isupper() or not members else {n: f"{path}.{n}" for n in members.split(", ")}
    return paths


def _link(role: re.Match[str], owner: griffe.Object | None) -> str:
    name = role[1].rpartition(".")[2]
    if owner is not None and owner.is_class and role[1] in owner.members:  # not every member is on a page
        return f'<autoref optional identifier="{owner.path}.{name}"><code>{name}</code></autoref>'
    path = documented().get(name, "")
    full = role[1].startswith("~shardwise") or role[1] == name
    return f"[`{name}`][{path}]" if path and full else f"`{role[1].lstrip('~')}`"


def plain(text: str, owner: griffe.Object | None) -> str:
    """References to names, also to members of the class ``owner``, are links where the reference documents them; those
    to notes in the code are left out.
    """
    return re.sub(r":\w+:`([^`]+)`", partial(_link, owner=owner), re.sub(r"\s*(?:See )?\[Note: [^\]]*\]\.?", "", text))


def apart(text: str) -> str:
    """Each argument has an entry of its own, also where several share one."""
    entry = re.compile(r"^( {4,})(\w+(?:, \w+)+): (.*(?:\n\1 +.*)*)$", re.MULTILINE)
    return entry.sub(lambda found: "\n".join(f"{found[1]}{name}: {found[3]}" for name in found[2].split(", ")), text)


def _value(constant: griffe.Object | griffe.Alias) -> Any:
    """The value of a constant, also of one that is imported."""
    return (constant.final_target if isinstance(constant, griffe.Alias) else constant).value


def _composed(path: str) -> str:
    """The docstring that a class has at run time, with the arguments of the dataclass that it inherits."""
    module, _, name = path.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    text = inspect.cleandoc(cls.__doc__ or "")
    if SECTION.search(text) is None:
        texts = (inspect.cleandoc(base.__doc__ or "") for base in cls.__mro__[1:] if is_dataclass(base))
        found = next((match[0] for match in map(SECTION.search, texts) if match is not None), "")
        text = f"{text}\n\n{found}"
    return text


class Docstrings(griffe.Extension):
    """Changes docstrings once all of them are known, and gives classes the names by which users import them."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        registry = importlib.import_module("shardwise.strategies.strategy_registry")
        for name, (body, _base) in registry._OF_TRAINER.items():
            pkg["lightning"].set_member(name, griffe.Alias(name, f"{body.__module__}.{body.__name__}"))
        for name, module in importlib.import_module("shardwise.huggingface")._WHERE.items():
            pkg["huggingface"].set_member(name, griffe.Alias(name, f"{pkg.path}.huggingface.{module}.{name}"))

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **_: Any) -> None:
        if obj.docstring is None:
            return
        text = "" if obj.is_module else obj.docstring.value
        if obj.path in MADE_BY_SESSIONS:
            obj.members.pop("__init__", None)
            text = (ARGS if obj.path in WITH_ATTRIBUTES else SECTION).sub("", text)
        if obj.path in HIDDEN:
            del obj.parameters[HIDDEN[obj.path]]
            text = re.sub(rf"(?m)^ +{HIDDEN[obj.path]}: .*\n", "", text)
        if obj.is_class and "dataclass" in obj.labels and any(each.value for each in obj.attributes.values()):
            text = text.replace("Attributes:\n", "Args:\n", 1)  # the section that shows defaults
        if obj.is_function:
            for each in obj.parameters:
                constant = str(each.default) if str(each.default).isupper() else ""
                if constant in obj.module.members:
                    each.default = _value(obj.module[constant])
                if each.kind is griffe.ParameterKind.var_keyword:
                    each.annotation = None  # such as Unpack[ShardArguments], with {} as the default
        if obj.is_class and obj.path.startswith(COMPOSED):
            text = _composed(obj.path)
        obj.docstring.value = apart(plain(text, obj if obj.is_class else obj.parent))
