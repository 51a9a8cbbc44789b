"""The fields of batches. They are not in `ENDPOINTS`, as a body has to name an uploaded file."""

from __future__ import annotations

from ramify.runtime.server.tables.rows import Endpoint, FieldTable, refused, taken

BATCH_FIELDS = Endpoint(
    title="/v1/batches",
    path="/v1/batches",
    body=FieldTable(
        "",
        taken("input_file_id", "a file of at most 50,000 lines and 200 MiB, uploaded with `purpose` batch"),
        taken("endpoint", "that of all lines"),
        taken(
            "completion_window",
            "`24h`, or another number of minutes (`m`), hours (`h`) or days (`d`), up to `30d`. Then lines"
            " without an answer get the error `batch_expired`",
        ),
        taken("metadata", "comes back"),
        refused("output_expires_after", "Output files stay until they are deleted."),
    ),
    required={"input_file_id": "x", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
)
