"""The fields of TypeSafe's ``/v1/systemone``."""

from __future__ import annotations

from ramify.runtime.server.tables.rows import FieldTable, taken

QUESTION = FieldTable("questions.*", taken("type instructions criteria"))
CRITERIA = FieldTable("questions.*.criteria", taken("true false", "of a `noul`"))
