"""A grammar for SQLite statements over given tables.

The columns that a statement may name depend on its FROM clause, which comes after the SELECT list. So the
grammar has rules for each set of tables that a statement may join, numbered in the order of `_scopes`:

    root      ::= select0 | select1 | select2             # FROM users; FROM orders; FROM both
    select0   ::= "SELECT " … number0 … " FROM users" …
    number0   ::= "id" | "age"
    number2   ::= "users.id" | "users.age" | "orders.id"  # qualified because there are several tables

The compiled grammar follows all alternatives in parallel until the output excludes all but one.
"""

from __future__ import annotations

import datetime
import decimal
import itertools
import re
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from ramify.constraint import Constraint
from ramify.errors import InvalidConstraint
from ramify.lang.grammars.notation import either, grammar, listed, quoted, texts, words_but
from ramify.spelling import nearest

Statement = Literal["select", "insert", "update", "delete"]
Columns = Mapping[str, Any] | Sequence[str]

MAX_SCOPES = 40
"""Most sets of tables that the grammar has rules for. Compiling the rules of one set takes about 40 ms."""

_WORDS = """
abort action add after all alter always analyze and as asc attach autoincrement before begin between by
cascade case cast check collate column commit conflict constraint create cross current current_date
current_time current_timestamp database default deferrable deferred delete desc detach distinct do drop
each else end escape except exclude exclusive exists explain fail false filter first following for foreign
from full generated glob group groups having if ignore immediate in index indexed initially inner insert
instead intersect into is isnull join key last left like limit match materialized natural no not nothing
notnull null nulls of offset on or order others outer over partition plan pragma preceding primary query
raise range recursive references regexp reindex release rename replace restrict returning right rollback
row rows savepoint select set table temp temporary then ties to transaction trigger true unbounded union
unique update using vacuum values view virtual when where window with without
"""
KEYWORDS = frozenset(_WORDS.split())
"""The keywords of https://sqlite.org/lang_keywords.html, and true and false. Names of tables and columns that
are keywords are written in quotes."""

LETTERS = "abcdefghijklmnopqrstuvwxyz_"
NUMBER, TEXT, TRUTH, ANY = KINDS = ("number", "text", "truth", "any")
_TYPES = {
    NUMBER: (int, float, decimal.Decimal),
    TEXT: (str, datetime.date, datetime.time),
}
_AFFINITIES = {
    NUMBER: ("INT", "REAL", "FLOA", "DOUB", "NUM", "DEC"),
    TEXT: ("CHAR", "CLOB", "TEXT", "DATE", "TIME", "UUID"),
}

COMMON = {
    "word": words_but(KEYWORDS, LETTERS, LETTERS + "0123456789"),
    "string": r"""("'" ([^'\x00-\x1f] | "''")* "'")""",
    "decimal": '"-"? ("0" | [1-9] [0-9]{0,17}) ("." [0-9]{1,17})?',
    "count": "[1-9] [0-9]{0,8}",
    "operator": texts([" + ", " - ", " * ", " / "]),
    "alias": r'word | "\"" [^"\x00-\x1f]+ "\""',
    "compared": texts([" = ", " <> ", " < ", " <= ", " > ", " >= "]),
    "null": '" IS " "NOT "? "NULL"',
    "direction": '" ASC" | " DESC"',
}


def sql(
    tables: str | Mapping[str, Columns],
    *,
    statements: Sequence[Statement] = ("select",),
    joins: Sequence[tuple[str, str]] | None = None,
    most_tables: int = 2,
) -> Constraint:
    """SQL statements that SQLite prepares without an error on a database with these tables.

    A SELECT has columns, arithmetic, aggregates, WHERE with subqueries, JOIN, GROUP BY, HAVING, ORDER BY and
    LIMIT. A SELECT names only columns of the tables in its FROM clause. If the clause joins tables, the names
    are qualified. UPDATE and DELETE have a WHERE clause. INSERT gives values for all columns, in the order of
    the columns. Keywords are in capitals, with one space between words; a semicolon may end the statement.

    Args:
        tables: ``CREATE TABLE`` statements, or a mapping from each table to its columns. The columns are a
            list of names, or a mapping from names to types (Python types, or SQL types as strings). With
            types, numbers are compared only with numbers, and texts only with texts.
        statements: The kinds of statements that may be written.
        joins: Pairs of columns such as ``("orders.user_id", "users.id")`` on which tables may be joined. By
            default the foreign keys of the ``CREATE TABLE`` statements; without foreign keys, all pairs of
            columns of the same type.
        most_tables: Most tables that a SELECT joins, each once.

    Raises `InvalidConstraint` for tables, columns or joins that cannot be used, and if there are more than
    `MAX_SCOPES` sets of tables that a statement may join.
    """
    known, keys = _created(tables) if isinstance(tables, str) else (_typed(tables), [])
    _check(known)
    unknown = [one for one in statements if one not in ("select", "insert", "update", "delete")]
    if isinstance(statements, str) or unknown or not statements:
        raise InvalidConstraint(
            f"statements is {statements!r}; it must be a list of select, insert, update and delete.",
            field="statements",
        )
    chosen = keys if joins is None else joins
    equal = _columns_of_one_type(known) if joins is None and not keys else _pairs(known, chosen)
    return grammar(_rules(known, equal, _scopes(known, equal, most_tables), statements))


# --- tables ---------------------------------------------------------------------------------------

Tables = dict[str, dict[str, str]]
"""Table → column → the kind of the column's values, one of `KINDS`."""

Joins = dict[tuple[str, str], list[tuple[list[str], list[str]]]]
"""(table, other table) → pairs of lists of columns. A join may equate any column of the first list, which are
columns of the table, with any column of the second list, which are columns of the other table."""


def _typed(tables: Mapping[str, Columns]) -> Tables:
    if not isinstance(tables, Mapping):
        raise InvalidConstraint(
            f"tables is {tables!r:.80}; it must be columns by table, or CREATE TABLE statements.",
            field="tables",
        )
    for table, columns in tables.items():
        if isinstance(columns, str) or not isinstance(columns, Iterable):
            raise InvalidConstraint(
                f"The columns of {table} are {columns!r:.80}; they must be names, or types by name.",
                field="tables",
            )
    return {
        table: {column: _kind(kind) for column, kind in columns.items()}
        if isinstance(columns, Mapping)
        else dict.fromkeys(columns, ANY)
        for table, columns in tables.items()
    }


def _kind(kind: Any) -> str:
    """The kind (one of `KINDS`) of the values of a Python type, or of an SQL type given as text. SQLite's
    rules of column affinity decide for SQL types."""
    if isinstance(kind, str):
        name = kind.upper()
        affine = [one for one, parts in _AFFINITIES.items() if any(part in name for part in parts)]
        return TRUTH if "BOOL" in name else (*affine, ANY)[0]
    if kind is None:
        return ANY
    if not isinstance(kind, type) or issubclass(kind, dict | list | tuple | set | frozenset):
        raise InvalidConstraint(
            f"{kind!r} is no type of a column.",
            field="tables",
            remedy='Write int, str or "TEXT", for example.',
        )
    return TRUTH if kind is bool else next((one for one, of in _TYPES.items() if issubclass(kind, of)), ANY)


def _created(script: str) -> tuple[Tables, list[tuple[str, str]]]:
    """The tables that the statements in `script` create, and the foreign keys as pairs of qualified
    columns."""
    tables: Tables = {}
    database = sqlite3.connect(":memory:")
    try:
        database.set_authorizer(lambda action, *_: action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_PRAGMA))
        database.executescript(script)
        database.set_authorizer(None)
        names = database.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        for (table,) in names:
            columns = database.execute("SELECT name, type FROM pragma_table_info(?)", (table,))
            tables[table] = {column: _kind(kind) for column, kind in columns}
        keys = database.execute(
            """SELECT child.name, key."from", parent.name, column.name
            FROM sqlite_schema AS child, pragma_foreign_key_list(child.name) AS key
            JOIN sqlite_schema AS parent ON parent.name = key."table" COLLATE NOCASE
            JOIN pragma_table_info(parent.name) AS column
            ON CASE WHEN key."to" IS NULL THEN column.pk = key.seq + 1
               ELSE column.name = key."to" COLLATE NOCASE END
            WHERE child.type = 'table' AND parent.name <> child.name"""
        ).fetchall()
    except sqlite3.Error as error:
        raise InvalidConstraint(f"SQLite does not take the tables: {error}.", field="tables") from None
    finally:
        database.close()
    return tables, [(f"{child}.{column}", f"{parent}.{key}") for child, column, parent, key in keys]


def _check(tables: Tables) -> None:
    for what, names in (("table", [*tables]), *((f"column of {one}", [*of]) for one, of in tables.items())):
        if not names:
            raise InvalidConstraint(f"There is no {what}.", field="tables")
        for name in names:
            if not isinstance(name, str) or not name or not name.isprintable():
                raise InvalidConstraint(f"{name!r} cannot be the name of a {what}.", field="tables")
        if len({name.lower() for name in names}) < len(names):
            raise InvalidConstraint(f"Two names of a {what} differ in capitals alone.", field="tables")


def _columns_of_one_type(tables: Tables) -> Joins:
    return {
        (one, other): [
            (left, right)
            for kind in KINDS
            if (left := _of_kind(tables[one], kind)) and (right := _of_kind(tables[other], kind))
        ]
        for one, other in itertools.permutations(tables, 2)
    }


def _of_kind(columns: Mapping[str, str], kind: str) -> list[str]:
    return [column for column, own in columns.items() if own == kind]


def _pairs(tables: Tables, pairs: Sequence[tuple[str, str]]) -> Joins:
    columns = {f"{table}.{column}": (table, column) for table in tables for column in tables[table]}
    found: Joins = {}
    for pair in pairs:
        for name in pair:
            if name not in columns:
                raise InvalidConstraint(
                    f"joins has {name!r}, which is no column of the tables.",
                    field="joins",
                    remedy=nearest(name, columns),
                )
        (one, left), (other, right) = (columns[name] for name in pair)
        if one == other:
            raise InvalidConstraint(f"joins joins {one!r} with itself, which needs an alias.", field="joins")
        found.setdefault((one, other), []).append(([left], [right]))
        found.setdefault((other, one), []).append(([right], [left]))
    return found


Scope = tuple[str, ...]
"""The tables that a statement joins, in the order of the tables in `Tables`."""


def _scopes(tables: Tables, joins: Joins, most_tables: int) -> list[Scope]:
    found: list[Scope] = [(table,) for table in tables]
    last = found
    for _ in range(most_tables - 1):
        wider = {frozenset({*one, table}) for one in last for table in tables if _join(joins, one, table)}
        last = [tuple(sorted(one, key=[*tables].index)) for one in wider if len(one) > len(last[0])]
        found = found + sorted(last)
        if not last or len(found) > MAX_SCOPES:
            break
    if len(found) > MAX_SCOPES:
        raise InvalidConstraint(
            f"More than {MAX_SCOPES} sets of tables may be joined.",
            field="tables",
            remedy="Give fewer tables, or joins=, or a smaller most_tables=.",
        )
    return found


def _join(joins: Joins, scope: Scope, table: str) -> str:
    """The GBNF expression for the condition of ``JOIN table ON``: a column of `scope` equals a column of
    `table`. Empty if `joins` allows no pair of these columns."""
    return either(
        *(
            f'{texts(_name(one, column) for column in left)} " = " {texts(_name(table, c) for c in right)}'
            for one in scope
            for left, right in joins.get((one, table), ())
        )
    )


def _name(*parts: str) -> str:
    return ".".join(
        part
        if _PLAIN.fullmatch(part) and part.lower() not in KEYWORDS
        else f'"{part.replace(chr(34), chr(34) * 2)}"'
        for part in parts
    )


_PLAIN = re.compile("[A-Za-z_][A-Za-z0-9_]*")


# --- rules ----------------------------------------------------------------------------------------


def _rules(
    tables: Tables, joins: Joins, scopes: Sequence[Scope], statements: Sequence[Statement]
) -> dict[str, str]:
    found = {"root": "", **COMMON, **_subqueries(tables)}
    roots = []
    for i, scope in enumerate(scopes):
        found |= _expressions(i, tables, scope, _exists(tables, scopes, scope))
        if "select" in statements:
            found[f"select{i}"] = _select(i, joins, scope)
            roots.append(f"select{i}")
    for i, (table, columns) in enumerate(tables.items()):
        written = {"insert": _insert, "update": _update, "delete": _delete}
        for statement, write in written.items():
            if statement in statements:
                found[f"{statement}{i}"] = write(i, table, columns)
                roots.append(f"{statement}{i}")
    return found | {"root": f'{either(*roots)} ";"?'}


def _subqueries(tables: Tables) -> dict[str, str]:
    """The rules for subqueries over one table, which select one number or the values of one column. The WHERE
    clause of a subquery has no subqueries."""
    numbers: list[str] = []
    rows: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for i, (table, columns) in enumerate(tables.items()):
        source = f'{quoted(f" FROM {_name(table)}")} (" WHERE " filter{i})?'
        total = f'("AVG(" | "SUM(" | "MIN(" | "MAX(") number{i} ")"' if NUMBER in columns.values() else ""
        numbers.append(f"{either(quoted('COUNT(*)'), total)} {source}")
        for kind in dict.fromkeys(columns.values()):
            rows[kind].append(f'"DISTINCT "? {kind}{i} {source}')
    found = {f"rows-{kind}": f'"SELECT " {either(*of)}' for kind, of in rows.items() if of}
    return found | {"total": f'"SELECT " {either(*numbers)}'}


def _exists(tables: Tables, scopes: Sequence[Scope], scope: Scope) -> str:
    """The GBNF expression for ``EXISTS`` with a correlated subquery over a table that may be joined with the
    table of `scope`. Empty if `scope` has several tables."""
    wider = [(i, set(other) - {*scope}) for i, other in enumerate(scopes) if len(other) == 2 > len(scope)]
    return either(
        *(
            f'{quoted(f"EXISTS (SELECT 1 FROM {_name(*more)} WHERE ")} filter{i} ")"'
            for i, more in wider
            if len(more) == 1
        )
    )


def _expressions(i: int, tables: Tables, scope: Scope, exists: str) -> dict[str, str]:
    """The rules for values and conditions over the columns of `scope`. The names of the rules end with
    `i`."""
    rules = {}
    columns = dict.fromkeys(KINDS, "")
    for kind in KINDS:
        names = [
            _name(column) if len(scope) == 1 else _name(table, column)
            for table in scope
            for column in _of_kind(tables[table], kind)
        ]
        if names:
            columns[kind] = f"{kind}{i}"
            rules[f"{kind}{i}"] = texts(names)
    number, text, truth, any_ = columns.values()
    called = either(number, number and f'"ABS(" {number} ")"', text and f'"LENGTH(" {text} ")"')
    inner = number and f'"(" {number} operator ({number} | decimal) ")"'
    numeric = called and f"numeric{i}"
    sums = {
        f"numeric{i}": f"{called} (operator operand{i})*",
        f"operand{i}": either(called, "decimal", inner),
        f"sum{i}": f"operand{i} (operator operand{i})*",
    }
    rules |= (sums if numeric else {}) | {
        f"column{i}": either(*columns.values()),
        f"textual{i}": either(text, text and f'("LOWER(" | "UPPER(") {text} ")"'),
        f"value{i}": either(numeric, text and f"textual{i}", truth, any_),
        f"measure{i}": either(
            f'"COUNT(" ("*" | "DISTINCT "? column{i}) ")"',
            numeric and f'("SUM(" | "AVG(" | "MIN(" | "MAX(") {numeric} ")"',
        ),
        f"aggregate{i}": either(
            f"measure{i}", (text or any_) and f'("MIN(" | "MAX(") {either(text, any_)} ")"'
        ),
    }

    kinds = {kind for columns in tables.values() for kind in columns.values()}

    def predicates(subqueries: bool) -> str:
        def common(literal: str, kind: str) -> str:
            rows = f"rows-{kind}" if subqueries and kind in kinds else ""
            return f'" NOT"? " IN (" {either(listed(literal), rows)} ")" | null'

        total = '"(" total ")"' if subqueries else ""
        tests = {
            numeric: f'compared {either(f"sum{i}", total)} | " NOT"? " BETWEEN " sum{i} " AND " sum{i} | '
            + common("decimal", NUMBER),
            text and f"textual{i}": f'compared (string | textual{i}) | " NOT"? " LIKE " string | '
            + common("string", TEXT),
            truth: '" = " ("TRUE" | "FALSE") | null | ""',
            any_: f"compared (decimal | string | {any_}) | {common('(decimal | string)', ANY)}",
        }
        return either(
            *(f"{left} ({right})" for left, right in tests.items() if left),
            exists if subqueries else "",
        )

    def chain(term: str) -> str:
        return f'"NOT "? {term} ((" AND " | " OR ") "NOT "? {term})*'

    return {name: body for name, body in rules.items() if body} | {
        f"plain{i}": predicates(False),
        f"predicate{i}": predicates(True),
        f"filter{i}": chain(f"plain{i}"),
        f"group{i}": chain(f"predicate{i}"),
        f"condition{i}": chain(f'(predicate{i} | "(" group{i} ")")'),
    }


def _select(i: int, joins: Joins, scope: Scope) -> str:
    sources = []
    for order in itertools.permutations(scope):
        joined = [_join(joins, order[:n], order[n]) for n in range(1, len(order))]
        if all(joined):
            source = quoted(f" FROM {_name(order[0])}")
            for table, condition in zip(order[1:], joined, strict=True):
                source += f' (" JOIN " | " LEFT JOIN ") {quoted(f"{_name(table)} ON ")} {condition}'
            sources.append(source)

    def ordered(by: str) -> str:
        return '" ORDER BY " ' + listed(f"{by} direction?")

    having = f'" HAVING " measure{i} compared decimal ((" AND " | " OR ") measure{i} compared decimal)*'
    grouped = f'" GROUP BY " {listed(f"column{i}")} ({having})? ({ordered(f"(aggregate{i} | value{i})")})?'
    items = listed(f'(aggregate{i} | value{i}) (" AS " alias)?')
    return (
        f'"SELECT " ("*" | "DISTINCT "? {items}) {either(*sources)} (" WHERE " condition{i})? '
        f'({grouped} | {ordered(f"value{i}")})? (" LIMIT " count (" OFFSET " count)?)?'
    )


def _insert(i: int, table: str, columns: Mapping[str, str]) -> str:
    row = ' ", " '.join(f'{_LITERALS[kind][:-1]} | "NULL")' for kind in columns.values())
    names = ", ".join(map(_name, columns))
    return quoted(f"INSERT INTO {_name(table)} ({names}) VALUES ") + " " + listed(f'"(" {row} ")"')


def _update(i: int, table: str, columns: Mapping[str, str]) -> str:
    values = {NUMBER: f"sum{i}", TEXT: f"(string | textual{i})"}
    changes = either(
        *(
            f'{kind}{i} " = " ({values.get(kind, _LITERALS[kind])} | "NULL")'
            for kind in dict.fromkeys(columns.values())
        )
    )
    return f'{quoted(f"UPDATE {_name(table)} SET ")} {listed(changes)} " WHERE " condition{i}'


def _delete(i: int, table: str, columns: Mapping[str, str]) -> str:
    return f"{quoted(f'DELETE FROM {_name(table)} WHERE ')} condition{i}"


_LITERALS = {
    NUMBER: "(decimal)",
    TEXT: "(string)",
    TRUTH: '("TRUE" | "FALSE")',
    ANY: "(decimal | string)",
}
