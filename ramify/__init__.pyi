"""The public names and the modules that hold them: for type checkers, and for the lazy import at run time."""

from ramify import ray as ray
from ramify.errors import BudgetExceeded as BudgetExceeded
from ramify.errors import Cancelled as Cancelled
from ramify.errors import CompileError as CompileError
from ramify.errors import InvalidConstraint as InvalidConstraint
from ramify.errors import InvalidRequest as InvalidRequest
from ramify.errors import ProgramError as ProgramError
from ramify.errors import RamifyError as RamifyError
from ramify.errors import UnsupportedField as UnsupportedField
from ramify.errors import UnsupportedNode as UnsupportedNode
from ramify.lang import grammars as grammars
from ramify.lang.api import assistant as assistant
from ramify.lang.api import assistant_begin as assistant_begin
from ramify.lang.api import assistant_end as assistant_end
from ramify.lang.api import flush_cache as flush_cache
from ramify.lang.api import function as function
from ramify.lang.api import gen as gen
from ramify.lang.api import gen_int as gen_int
from ramify.lang.api import gen_string as gen_string
from ramify.lang.api import get_server_info as get_server_info
from ramify.lang.api import limit as limit
from ramify.lang.api import select as select
from ramify.lang.api import separate_reasoning as separate_reasoning
from ramify.lang.api import system as system
from ramify.lang.api import system_begin as system_begin
from ramify.lang.api import system_end as system_end
from ramify.lang.api import tool as tool
from ramify.lang.api import user as user
from ramify.lang.api import user_begin as user_begin
from ramify.lang.api import user_end as user_end
from ramify.lang.backends.base import Backend as Backend
from ramify.lang.backends.endpoint import RuntimeEndpoint as RuntimeEndpoint
from ramify.lang.backends.openai import OpenAI as OpenAI
from ramify.lang.backends.replay import NotRecorded as NotRecorded
from ramify.lang.backends.replay import RecordingBackend as RecordingBackend
from ramify.lang.backends.replay import ReplayBackend as ReplayBackend
from ramify.lang.backends.router import Router as Router
from ramify.lang.backends.script import NotScripted as NotScripted
from ramify.lang.backends.scripted import ScriptedBackend as ScriptedBackend
from ramify.lang.batch.estimate import BatchEstimate as BatchEstimate
from ramify.lang.batch.summary import BatchSummary as BatchSummary
from ramify.lang.calls.choices import greedy_token_selection as greedy_token_selection
from ramify.lang.calls.choices import token_length_normalized as token_length_normalized
from ramify.lang.calls.choices import (
    unconditional_likelihood_normalized as unconditional_likelihood_normalized,
)
from ramify.lang.decide import adecide as adecide
from ramify.lang.decide import decide as decide
from ramify.lang.graph.conditions import repeat as repeat
from ramify.lang.graph.conditions import when as when
from ramify.lang.program import events as events
from ramify.lang.program.run import set_default_backend as set_default_backend
from ramify.lang.state.fork import ForkGroup as ForkGroup
from ramify.lang.state.state import ProgramState as ProgramState
from ramify.lang.tools.mcp import mcp as mcp
from ramify.lang.tools.tool import Tool as Tool
from ramify.lang.tools.tool import ToolCall as ToolCall
from ramify.lang.trace.spans import enable_otel as enable_otel
from ramify.lang.typed.decision import Decision as Decision
from ramify.lang.typed.decision import ModelDecision as ModelDecision
from ramify.lang.typed.questions import Levels as Levels
from ramify.runtime.engine.engine import Engine as Engine

__version__: str
