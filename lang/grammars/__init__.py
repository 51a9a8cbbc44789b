"""Ready-made grammars as constraints, public as `rm.grammars`."""

from ramify.lang.grammars.python_calls import python_call as python_call
from ramify.lang.grammars.python_calls import read_call as read_call
from ramify.lang.grammars.sqlite import sql as sql
