"""The fields of all bodies: which are taken, which have no effect, which are refused by name.

A `rows.FieldTable` has the fields of one object, an `Endpoint` the tables of one body. `Fields.finish`
ignores and refuses by a table. docs/field_tables.py writes the lists of docs/server.md from `ENDPOINTS`.
tests/server/test_field_tables.py holds the tables to the code.

To add a dialect:

1. Write a module with its tables here. A table may repeat the rows of another:
   ``FieldTable("messages[]", *openai.MESSAGE.rows, ignored("model_id"))``.
2. Parse the body by ``parse_body(request, ENDPOINT, parse)``, and call ``fields.finish(TABLE)`` for each
   object of it, the body included (``ENDPOINT.whole``), once its fields are taken.
3. Add the endpoints to `ENDPOINTS`, and sample bodies that have each object to `BODIES` in
   tests/server/sample_bodies.py.
4. Write a section into docs/server.md with the lines ``<!-- fields: TITLE -->`` and ``<!-- /fields -->``, and
   run ``make docs``.
"""

from ramify.runtime.server.tables import (
    anthropic,
    decisions,
    llamacpp,
    ollama,
    openai,
    programs,
    responses,
    sglang,
    systemone,
)
from ramify.runtime.server.tables.rows import Endpoint

ENDPOINTS: tuple[Endpoint, ...] = (
    *openai.ENDPOINTS,
    *responses.ENDPOINTS,
    *decisions.ENDPOINTS,
    *systemone.ENDPOINTS,
    *anthropic.ENDPOINTS,
    *ollama.ENDPOINTS,
    *sglang.ENDPOINTS,
    *llamacpp.ENDPOINTS,
    *programs.ENDPOINTS,
)
