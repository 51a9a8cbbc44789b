"""SQL from `grammars.sql`: SQLite prepares every text, and other texts are refused."""

from __future__ import annotations

import datetime
import re
import sqlite3
from typing import Any

import pytest

from ramify.constraint import Constraint
from ramify.errors import InvalidConstraint
from ramify.lang.grammars import sql
from tests.grammar.sampling import samples
from tests.grammar.vocabularies import accepts, compiled

SHOP = """
CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT NOT NULL, born DATE, active BOOLEAN, extra);
CREATE TABLE orders (id INTEGER PRIMARY KEY, user_id INTEGER REFERENCES users, total REAL, "Note" TEXT);
CREATE TABLE items (order_id INT, product TEXT, "select" INT, FOREIGN KEY (order_id) REFERENCES Orders(ID));
CREATE TABLE "tag list" ("a ""quoted"" name" TEXT);
"""
TABLES = {
    "users": {"id": int, "name": str, "born": datetime.date, "active": bool, "extra": None},
    "orders": {"id": "INTEGER", "user_id": "BIGINT", "total": float, "Note": "VARCHAR(20)"},
}
NAMES = {"group": ["order", 'x"y'], "values": ["True", "_1", "größe"]}
CREATED = """
CREATE TABLE users (id INTEGER, name TEXT, born DATE, active BOOLEAN, extra);
CREATE TABLE orders (id INTEGER, user_id BIGINT, total REAL, Note VARCHAR(20));
CREATE TABLE "group" ("order", "x""y");
CREATE TABLE "values" ("True", _1, größe);
"""
ALL = ("select", "insert", "update", "delete")
CASES = [
    (SHOP, {"most_tables": 3}, SHOP),
    (TABLES, {}, CREATED),
    (TABLES | NAMES, {"statements": ALL}, CREATED),
    (NAMES, {"joins": [("group.order", "values._1")]}, CREATED),
    ({"users": {"active": bool}}, {"statements": ALL}, CREATED),
    ({"users": {"name": str}}, {}, CREATED),
]


def problem(database: sqlite3.Connection, text: str) -> str | None:
    try:
        database.execute(f"EXPLAIN {text}")
    except sqlite3.Error as error:
        return f"{error}: {text}"
    return None


@pytest.mark.parametrize(("tables", "options", "script"), CASES)
@pytest.mark.parametrize("budget", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_sqlite_prepares_every_text(tables: Any, options: dict[str, Any], script: str, budget: int) -> None:
    database = sqlite3.connect(":memory:")
    database.executescript(script)
    texts = list(samples(sql(tables, **options), 2 * budget, budget=budget, seed=budget))
    assert [found for text in texts if (found := problem(database, text))] == []
    written = {word for text in texts for word in re.findall("[A-Z]{2,}", re.sub("'[^']*'", "", text))}
    assert {"SELECT", "FROM"} <= written
    if budget == 300:
        assert {"WHERE", "ORDER", "GROUP", "LIMIT"} <= written
        assert not options.get("statements") or {"INSERT", "UPDATE", "DELETE", "VALUES", "SET"} <= written
        assert tables != SHOP or {"JOIN", "HAVING", "DISTINCT", "BETWEEN", "IN"} <= written


@pytest.fixture(scope="module")
def shop() -> Any:
    return compiled(sql(SHOP, most_tables=3))


@pytest.mark.parametrize(
    "text",
    [
        "SELECT * FROM users",
        "SELECT name, born AS birthday FROM users WHERE active AND (id > 3 OR NOT name LIKE 'A%') LIMIT 5;",
        "SELECT name FROM users LIMIT 5 OFFSET 10",
        "SELECT DISTINCT name FROM users WHERE extra IS NOT NULL ORDER BY born DESC, name",
        "SELECT COUNT(*), AVG(total) FROM orders WHERE total * 2 + 1 >= ABS(user_id) / (total + 1)",
        "SELECT user_id, SUM(total) AS \"The sum\" FROM orders GROUP BY user_id HAVING COUNT(*) > 2 "
        "ORDER BY SUM(total) DESC LIMIT 1",
        "SELECT users.name, COUNT(orders.id) FROM users LEFT JOIN orders ON users.id = orders.user_id "
        "WHERE orders.total BETWEEN 10 AND 20.5 GROUP BY users.name",
        "SELECT users.name, items.product FROM items JOIN orders ON items.order_id = orders.id "
        "JOIN users ON orders.user_id = users.id",
        "SELECT id FROM users WHERE id IN (SELECT user_id FROM orders WHERE total > 5) OR id NOT IN (1, 2)",
        "SELECT total FROM orders WHERE total > (SELECT AVG(total) FROM orders WHERE Note <> 'it''s')",
        "SELECT name FROM users WHERE NOT EXISTS (SELECT 1 FROM orders WHERE users.id = orders.user_id)",
        'SELECT "a ""quoted"" name" FROM "tag list" WHERE LENGTH("a ""quoted"" name") > 3',
        'SELECT MAX("select") FROM items',
    ],
)  # fmt: skip
def test_what_may_be_written(shop: Any, text: str) -> None:
    database = sqlite3.connect(":memory:")
    database.executescript(SHOP)
    assert problem(database, text) is None
    assert accepts(shop, text)


@pytest.mark.parametrize(
    "text",
    [
        "SELECT nam FROM users",
        "SELECT total FROM users",
        "SELECT id FROM users JOIN orders ON users.id = orders.user_id",
        "SELECT orders.id FROM users",
        "SELECT users.id FROM users JOIN items ON users.id = items.order_id",
        "SELECT name FROM users WHERE COUNT(*) > 1",
        "SELECT name FROM users GROUP BY COUNT(*)",
        "SELECT name FROM users WHERE name > 3",
        "SELECT name FROM users WHERE id = 'a'",
        "SELECT name AS order FROM users",
        "SELECT name AS current_date FROM users",
        "SELECT select FROM items",
        "SELECT name FROM users WHERE name = 'it's'",
        "SELECT name FROM users; DROP TABLE users",
        "SELECT name FROM users -- all",
        "SELECT name FROM users WHERE id IN ()",
        "SELECT name FROM sqlite_schema",
        "DELETE FROM users WHERE id = 1",
        "SELECT name FROM users WHERE id IN (SELECT id, user_id FROM orders)",
        "",
    ],
)
def test_what_may_not_be_written(shop: Any, text: str) -> None:
    assert not accepts(shop, text)


def test_changes_need_a_condition_and_whole_rows() -> None:
    grammar = compiled(sql(TABLES, statements=["insert", "update", "delete"]))
    for text in (
        "INSERT INTO orders (id, user_id, total, Note) VALUES (1, 2, NULL, 'x'), (2, 2, 0.5, NULL)",
        "UPDATE users SET name = UPPER(name), born = NULL, id = id + 1, active = FALSE WHERE id = 3",
        "DELETE FROM orders WHERE user_id NOT IN (SELECT id FROM users)",
    ):
        assert accepts(grammar, text), text
    for text in (
        "INSERT INTO orders (id, user_id, total, Note) VALUES (1, 2, NULL)",
        "INSERT INTO orders (id, user_id, total, Note) VALUES ('a', 2, NULL, 'x')",
        "UPDATE users SET name = 'x'",
        "DELETE FROM orders",
        "SELECT id FROM orders",
    ):
        assert not accepts(grammar, text), text


def test_a_word_is_no_keyword() -> None:
    grammar = compiled(sql({"t": ["a"]}))
    names = {
        "a": True,
        "a1": True,
        "as": False,
        "ast": True,
        "is": False,
        "isnull": False,
        "isn": True,
        "_": True,
    }
    for name, allowed in names.items():
        assert accepts(grammar, f"SELECT a AS {name} FROM t") == allowed, name


@pytest.mark.parametrize(
    ("tables", "options", "why"),
    [
        ({}, {}, "no table"),
        ({"t": []}, {}, "no column of t"),
        ({"t": ["a", "A"]}, {}, "capitals"),
        ({"t": ["a\nb"]}, {}, "cannot be the name"),
        ({"t": {"a": 3}}, {}, "no type"),
        ({"t": {"a": dict}}, {}, "no type"),
        ({"t": "ab"}, {}, "columns of t are 'ab'"),
        ({"t": 5}, {}, "columns of t are 5"),
        (None, {}, "tables is None"),
        ({"t": ["a"]}, {"statements": ["drop"]}, "statements"),
        ({"t": ["a"]}, {"statements": "select"}, "statements"),
        ({"t": ["a"], "u": ["b"]}, {"joins": [("t.a", "u.c")]}, "'u.c'"),
        ({"t": ["a", "b"]}, {"joins": [("t.a", "t.b")]}, "itself"),
        ({f"t{i}": ["a"] for i in range(10)}, {}, "sets of tables"),
        ("CREATE TABLE t (a", {}, "SQLite does not take"),
        ("ATTACH 'x.db' AS x; CREATE TABLE t (a)", {}, "SQLite does not take"),
        ("SELECT 1", {}, "no table"),
    ],
)
def test_what_is_refused_says_why(tables: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidConstraint) as refused:
        sql(tables, **options)
    assert why in refused.value.message
    assert refused.value.field


def test_many_tables_are_joined_by_their_keys_alone() -> None:
    tables = {f"t{i}": ["id", "next"] for i in range(12)}
    chain = sql(tables, joins=[(f"t{i}.next", f"t{i + 1}.id") for i in range(11)])
    assert isinstance(chain, Constraint)
    assert '"t3.next" " = " "t4.id"' in chain.source
    assert "t3.id = t4.id" not in chain.source
