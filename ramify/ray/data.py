"""Batches on Ray Data: a program runs once for each row of a dataset, on engines in actors of a cluster."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from msgspec import structs

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.lang.backends.scripted import ScriptedBackend
from ramify.lang.batch.breaker import GIVE_UP_AFTER_S
from ramify.lang.batch.checkpoint import read_rerun
from ramify.lang.batch.fingerprint import Record, record_of
from ramify.lang.functions.program import Program
from ramify.lang.graph.recorder import NO_MODEL
from ramify.ray.installed import require
from ramify.ray.map_actor import Engine, ProgramActor, Work, make_backend
from ramify.ray.parts import Parts

BATCHES_IN_TASK = 4
"""Number of batches of one task that Ray Data 2.60 gives to an async actor at once."""
TASKS_IN_ACTOR = 2
"""Number of tasks that an actor runs at once. With two, its engine has rows while one task ends and the next
begins."""
MAX_RESTARTS = 10
"""Most times that Ray restarts an actor, unless `ray_remote_args` sets another number. Ray's default is no
limit, with which a row that kills the engine would run again for ever."""


def map_program(
    dataset: Any,
    fn: Program[..., Any, Any],
    *,
    engine: Engine,
    concurrency: int | tuple[int, int] = (1, 8),
    rows_per_batch: int = 32,
    rows_in_flight: int = 64,
    on_error: Literal["column", "raise"] = "column",
    key: str | None = None,
    columns: Mapping[str, Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    rerun: str | None = None,
    give_up_after: float | None = GIVE_UP_AFTER_S,
    num_cpus: float = 1,
    num_gpus: float = 0,
    ray_remote_args: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Run a program once for each row of a `ray.data.Dataset`; returns a dataset with its results.

    The columns with the names of the program's parameters give its arguments. All columns of the dataset are
    kept, and a column is added for each variable of the program. Further columns are added: ``returned``, the
    return value of the body; ``error``, null or a struct; and ``usage``, a struct of the row's tokens; the
    last two as in a results file. ``row_id`` is a 128-bit hash, as 32 hexadecimal digits, of the row's key
    and arguments, or without `key`, of all its columns. No row runs before the returned dataset is written or
    read.

    Args:
        engine: Options of the `Engine` that each actor starts; or a function that is called in the actor and
            returns a backend, such as ``lambda: rm.RuntimeEndpoint("http://…")``.
        concurrency: Number of actors; or the least and the greatest number, between which Ray scales with the
            work.
        rows_per_batch: Number of rows that Ray hands to an actor as one batch. An actor has up to 8 batches
            at once. Their rows share one window, so that rows with a common prefix run together.
        rows_in_flight: Most rows that run at once in an actor; at most 8 times `rows_per_batch`.
        on_error: ``"column"``: the error of a row is put in the column ``error``, and variables that were not
            set are null. ``"raise"``: the first failed row fails the job.
        key: A column that identifies a row, together with the arguments. Without a key, rows that are equal
            in all columns have the same ``row_id``, and get the same result if it is taken from a
            `checkpoint`.
        columns: Variable → type, for columns whose type is not to depend on the values: a Python type that
            pydantic knows, or an Arrow type. Other columns get the type of their values.
        checkpoint: A folder that all machines see. Each finished row is written there at once. If an actor or
            the job dies and is run again, these rows do not run again.
        rerun: With `checkpoint`, as in `run_batch`: ``"changed"``, ``"missing"``, ``"failed"``.
        give_up_after: Seconds without any answer after which an actor gives up its engine and ends. If
            `engine` is a function, the job fails instead. None for no limit.
        num_cpus, num_gpus: What Ray reserves for an actor. The engine computes with `num_cpus` threads,
            unless `engine` has ``threads``.
        ray_remote_args: Further options of Ray for actors, such as ``resources``. The default of
            ``max_restarts`` is 10.
        **options: Sampling options and arguments that all rows share, as in `run_batch`.

    A row that fails transiently runs again, as in `run_batch`. If the engine of an actor is gone, the actor
    ends its process, and Ray starts another actor. `fn` and `engine` are sent to the actors by Ray's
    cloudpickle.

    Raises `InvalidRequest` for a wrong argument, if Ray is not installed, and if `checkpoint` has results of
    another program.
    """
    data = require("ray.data")
    if not isinstance(fn, Program):
        raise InvalidRequest(f"{fn!r} is no program.", field="fn", remedy="Decorate it with @rm.function.")
    if "backend" in {**fn.bound, **options}:
        raise InvalidRequest(
            "The actors make their backends.", field="backend", remedy="Give engine, and no backend."
        )
    if on_error not in ("column", "raise"):
        raise InvalidRequest(f"on_error is {on_error!r}; it is 'column' or 'raise'.", field="on_error")
    held = rows_per_batch * BATCHES_IN_TASK * TASKS_IN_ACTOR
    sizes = (("rows_per_batch", rows_per_batch, None), ("rows_in_flight", rows_in_flight, held))
    for name, value, most in sizes:
        if value < 1 or (most is not None and value > most):
            raise InvalidRequest(
                f"{name} is {value}; it must be at least 1" + (f" and at most {most}." if most else "."),
                field=name,
                remedy="" if most is None else "An actor has 8 batches at once: raise rows_per_batch.",
            )
    words = read_rerun(rerun)
    if words and checkpoint is None:
        raise InvalidRequest("rerun needs checkpoint.", field="rerun")
    engine = _with_threads(engine, num_cpus)
    try:
        batch = fn._batch({**options, "backend": ScriptedBackend([])}, "auto", None, False, give_up_after)
    except UnsupportedField as error:
        said = error.message.replace("run_batch", "map_program")
        raise UnsupportedField(said, field=error.field, remedy=error.remedy) from None
    parts = None
    if checkpoint is not None:
        record = _record(fn, batch.settings.options, batch.common, engine)
        failed = {"failed"} if on_error == "raise" else set()
        parts = Parts(os.path.abspath(checkpoint), record, key, words | failed)
        parts.begin()
    work = Work(
        program=fn,
        engine=engine,
        options=options,
        window=held,
        rows_in_flight=rows_in_flight,
        give_up_after=give_up_after,
        raises=on_error == "raise",
        key=key,
        columns=dict(columns or {}),
        parts=parts,
    )
    least, most = (concurrency, concurrency) if isinstance(concurrency, int) else concurrency
    pool = data.ActorPoolStrategy(
        min_size=least, max_size=most, max_concurrent_calls_per_actor=TASKS_IN_ACTOR
    )
    with warnings.catch_warnings():
        # Ray 2.64 will take max_restarts in another way. VERSION is pinned to 2.60.
        warnings.filterwarnings("ignore", "`ray_remote_args` is deprecated")
        return dataset.map_batches(
            ProgramActor,
            fn_constructor_args=(work,),
            batch_size=rows_per_batch,
            batch_format="pyarrow",
            compute=pool,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            **{"max_restarts": MAX_RESTARTS, **(ray_remote_args or {})},
        )


def _with_threads(engine: Engine, num_cpus: float) -> Engine:
    """`engine` with its number of threads set. Raises the errors of `Engine` for wrong options."""
    if not isinstance(engine, Mapping):
        if not callable(engine):
            raise InvalidRequest(
                f"engine is {engine!r}; it must be options of rm.Engine, or a function that makes a backend.",
                field="engine",
            )
        return engine
    given = {"threads": max(1, int(num_cpus)), **engine}
    make_backend(given).close()  # type: ignore[attr-defined]  # it has started nothing
    return given


def _record(
    fn: Program[..., Any, Any], options: Mapping[str, Any], common: Mapping[str, Any], engine: Engine
) -> Record:
    """Record of the batch.

    It is made in the caller's process, which has the program's source; an actor has only the bytecode.
    """
    model = str(engine.get("model", "")) if isinstance(engine, Mapping) else ""
    info = structs.replace(NO_MODEL, name=model)
    record = record_of(fn, options, common, None, info, {})
    if not isinstance(engine, Mapping):
        return record | {"backend": {"kind": getattr(engine, "__qualname__", type(engine).__qualname__)}}
    lora = engine.get("lora")
    return record | {"backend": {"kind": "Engine", **({"lora": lora} if lora else {})}}
