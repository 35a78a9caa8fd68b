"""Stages are threads of one process here: each computes with one of its own."""

from __future__ import annotations

from ...runtime.conftest import single_thread

__all__ = ["single_thread"]
