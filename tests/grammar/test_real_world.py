"""Schemas that others have published: the grammar accepts every valid instance and no invalid one.

The oracle is the jsonschema package, which has judged the recorded instances. A sample runs here, or all of them with
RAMIFY_ALL_SCHEMAS=1; ``python -m benchmarks.schemas`` runs all, beside other libraries.
"""
