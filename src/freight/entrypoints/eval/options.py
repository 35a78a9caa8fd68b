"""The engine's options of one setting: those of the command's flags, and what the setting changes.

Knows no rows and no measures.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from freight.entrypoints.eval.settings import KEYS, Setting
from freight.entrypoints.run import engine_options
from freight.runtime.options import EngineOptions

__all__ = ["options_of"]


def options_of(flags: Mapping[str, Any], setting: Setting) -> EngineOptions:
    """What ``freight run`` would ask of the engine, with the approximations of the setting.

    These have no flags in this command, nor have traces, which would overwrite each other.
    InputError where a value does not exist.
    """
    defaults = {field.name: field.default for field in fields(EngineOptions)}
    exact = {key.field: defaults[key.field] for key in KEYS.values()}
    plain = engine_options(argparse.Namespace(**exact, trace=None, **flags))
    return replace(plain, **setting.fields)
